"""The remedies by the kind of action they carry out. Adding one is one file and one name in this tuple."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trimtab.act.agree import REFUSED
from trimtab.act.back_off_scaler import BackOffScaler
from trimtab.act.cut_lr import CutLR
from trimtab.act.raise_weight_decay import RaiseWeightDecay
from trimtab.act.rewind import Rewind
from trimtab.act.skip import Skip
from trimtab.act.skip_data import SkipData
from trimtab.act.stop import Stop
from trimtab.core.contain import Contained
from trimtab.core.types import Decision, Outcome, Remedy

_ALL: tuple[Remedy, ...] = (Rewind(), CutLR(), RaiseWeightDecay(), BackOffScaler(), Skip(), SkipData(), Stop())
BUILTIN: dict[str, Remedy] = {remedy.kind: remedy for remedy in _ALL}


def carry_out(decision: Decision, lane: Any, contained: Contained) -> Iterator[Outcome]:
    """Do what was decided, one action after the other; a remedy that breaks is an outcome too."""
    for action in decision.actions:
        failed = Outcome(at=decision.at, action=action, applied=False, detail="the remedy failed; see the log")
        remedy = BUILTIN[action.kind]
        together = getattr(lane, "together", None)
        if together is not None and together.refuses(action):
            yield Outcome(at=decision.at, action=action, applied=False, detail=REFUSED, optimizer=lane.label)
            continue
        if action.kind == "skip_data" and not SkipData.can(lane):
            continue  # nobody told which samples these are: there is nothing to put on record
        outcome: Outcome | None = contained.call(f"the remedy ({action})", remedy.apply, action, lane, decision.at)
        yield replace(outcome or failed, optimizer=lane.label)
