"""What a schedule will do: looked at by moving it on, and back again."""

from __future__ import annotations

import warnings

from trimtab.checks.probe import Probe


def half_way(probe: Probe) -> float | None:
    """The learning rate half an epoch ahead, as a part of its peak; None where the length of an epoch is not known."""
    try:
        num = len(probe.target.loader) // 2  # type: ignore[arg-type]
    except TypeError:
        num = probe.scan.num // 2 if probe.scan.complete else 0
    if num < 4:
        return None
    probe.rewind()
    top = max((float(g.get("lr", 0.0)) for o in probe.optimizers for g in o.param_groups), default=0.0)
    last = top
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _ in range(num):
                for scheduler in probe.schedulers:
                    if not hasattr(scheduler, "num_bad_epochs"):
                        scheduler.step()
                last = max((float(g.get("lr", 0.0)) for o in probe.optimizers for g in o.param_groups), default=0.0)
                top = max(top, last)
        except Exception:
            return None
        finally:
            probe.rewind()
    return last / top if top > 0 else None
