"""WIRE015: an optimizer holds a parameter more than once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.core.window import listed
from trimtab.doctor.checklist import Line, failed, passed
from trimtab.doctor.probe import Probe
from trimtab.torchutil.optimizers import groups_of, params_of


class DuplicateParameters:
    """An optimizer holds a parameter more than once.

    ## What it means
    It is moved once for each time it is held: its learning rate is double, and its moments are wrong.

    ## How it is checked
    The groups of every optimizer.

    ## What to try
    1. Tied weights count once: `{id(p): p for p in params}.values()`.
    """

    code: ClassVar[str] = "WIRE015"
    name: ClassVar[str] = "duplicate-parameters"
    title: ClassVar[str] = "no parameter is held twice"
    causes: ClassVar[tuple[str, ...]] = ("learning-rate", "double-step")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report parameters that are held twice."""
        twice: list[str] = []
        for optimizer in probe.optimizers:
            ids = [id(p) for p in params_of(optimizer)]
            twice += [probe.names[key] for key in dict.fromkeys(ids) if ids.count(key) > 1]
        everywhere = [id(p) for p in params_of(*probe.target.optimizers)]
        twice += [probe.names[key] for key in dict.fromkeys(everywhere) if everywhere.count(key) > 1]
        twice = list(dict.fromkeys(twice))
        if twice:
            yield failed(
                self,
                f"{len(twice)} parameters are held more than once.",
                listed(tuple(twice)),
                "params = {id(p): p for p in params}.values()",
                tuple(twice)[:8],
            )
        else:
            groups = len(groups_of(*probe.optimizers))
            yield passed(self, f"{len(probe.held)} parameters in {groups} groups")
