"""A training of which only the steps were seen, as a script makes them."""

from __future__ import annotations

from typing import Any

from torch import nn

from trimtab.checks.drive import Options
from trimtab.checks.probe import SCAN_S, Probe
from trimtab.checks.scan import scan
from trimtab.checks.target import Target
from trimtab.checks.watch import Watch
from trimtab.sample.probes.wiring import _ties


def watched(
    model: nn.Module, optimizers: list[Any], watch: Watch, options: Options, schedulers: tuple[Any, ...]
) -> Probe:
    """A training that was only watched: nothing of it can be run again."""
    target = Target(model=model, optimizer=optimizers, loader=[], step_fn=lambda model, batch: None)
    probe = Probe(target, options)
    probe.rewind, probe.watch, probe.ours = (lambda: None), watch, False
    probe.calls = [c for c in watch.calls if c.events or c.failure is not None]
    for call in probe.calls:
        call.note_losses()
    probe.watched_only = "the training is a script: its steps cannot be made again"
    probe.scan = scan([tuple(c.inputs) for c in probe.calls if c.inputs], budget_s=SCAN_S)
    probe.nonfinite_at_start, probe.average_at_start = (), None
    probe.split_twins, probe.num_ties, probe.broken_ties = (), len(_ties(model)), ()
    probe.schedulers = schedulers
    return probe
