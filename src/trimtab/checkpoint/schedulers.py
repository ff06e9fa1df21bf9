"""The state of learning-rate schedulers, taken with their class and compared before it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.checkpoint.compare import copied, different, labelled, missing_and_extra, paired

log = logging.getLogger("trimtab")

PLANNED = ("total_steps", "T_max", "T_0", "step_size", "total_iters")
"""How long a schedule is meant to be; loading one of another length is easily overlooked."""


def capture(scheduler: Any) -> dict[str, Any]:
    """The state of every scheduler, with its class."""
    return {
        label: {"class": type(one).__name__, "state": one.state_dict()} for label, one in labelled(scheduler).items()
    }


def differences(scheduler: Any, saved: Mapping[str, Any]) -> list[str]:
    """Why `saved` does not belong to these schedulers, one line each."""
    here = capture(scheduler)
    saved = paired(here, saved)
    lines = missing_and_extra("scheduler", here, saved, "schedulers")
    for label in (label for label in here if label in saved):
        part = "scheduler" if len(here) == 1 else f"scheduler {label}"
        ours, theirs = here[label], saved[label]
        if ours["class"] != theirs["class"]:
            lines.append(different(part, "its class", ours["class"], theirs["class"]))
            continue
        num_here, num_saved = (len(entry["state"].get("base_lrs", ())) for entry in (ours, theirs))
        if num_here != num_saved:
            lines.append(different(part, "the number of base learning rates", str(num_here), str(num_saved)))
    return lines


def load(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Load the state of every scheduler; a plan that was made for another length is told."""
    here = labelled(scheduler)
    saved = paired(here, saved)
    for label, one in here.items():
        state = copied(saved[label]["state"])
        for name in PLANNED:
            if name in state and getattr(one, name, state[name]) != state[name]:
                told = "scheduler: %s is %s in the checkpoint, %s here; the one of the checkpoint is used"
                log.warning(told, name, state[name], getattr(one, name))
        one.load_state_dict(state)


def keep(scheduler: Any) -> Callable[[], None]:
    """A function that puts the schedulers back as they are now."""
    before = copied(capture(scheduler))
    return lambda: load(scheduler, before)
