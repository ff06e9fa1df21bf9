"""What all processes of a run must do alike or not at all: asked at the end of every step, by a hash of it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from trimtab.core.types import Action, Decision
from trimtab.remedies.rewind import Rewind
from trimtab.sample.reduce import Peers
from trimtab.sample.watch import Step

log = logging.getLogger("trimtab")
TOGETHER = ("rewind", "cut_lr", "raise_weight_decay", "back_off_scaler", "stop")
"""The rest changes nothing that is the same in all processes: a skip is only put on record, data is each one's own."""
REFUSED = "the processes of this run did not decide the same at this step: none of them does it"


class Together:
    """Decisions of one lane that wait for the other processes; where there are none nothing waits."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._waiting: list[Decision] = []
        self.refused: frozenset[str] = frozenset()
        """The kinds of action that were not agreed on at the last step."""

    def waits(self, decision: Decision) -> bool:
        """Whether the decision has to wait until all can be asked."""
        if not self._peers.present():
            return False
        self._waiting.append(decision)
        return True

    def refuses(self, action: Action) -> bool:
        """Whether the processes did not agree on it. Buffers are each one's own, as data is."""
        return action.kind in self.refused and not action.args.get("buffers")

    def settle(self, lane: Any) -> None:
        """Once in every step of every process, whether it decided anything or not: what all decided alike is done."""
        if not self._peers.present():
            return
        decided, self._waiting = self._waiting, []
        same = self._peers.agreed(hashes_of(decided, lane))
        self.refused = frozenset(kind for kind, alike in zip(TOGETHER, same, strict=True) if not alike)
        if "rewind" in self.refused and not self._peers.alone:
            log.warning("step %d: not every process would go back, and to the same state: none does", lane.attempts - 1)
        for decision in decided:
            lane.decided(decision, settled=True)


def share_loss(step: Step, peers: Peers, device: torch.device) -> None:
    """Every process has a loss of its own; judged by their mean, all come to the same conclusions."""
    if step.shared or not peers.present():
        return
    mine = step.scalars.get("loss")
    if step.undo_flag is not None:  # the device decides: nobody waits for it
        loss = peers.mean_on_device(mine, device)
    else:
        loss = peers.mean(None if mine is None else float(mine))
    if loss is not None:
        step.scalars["loss"] = loss


def hashes_of(decisions: Sequence[Decision], lane: object) -> list[int]:
    """For each kind of action one number, the same for the same thing; 0 where nothing is to be done.

    Example:
        >>> cut = Action(kind="cut_lr", args={"factor": 0.5})
        >>> one = hashes_of([Decision(about=4, at=5, actions=(cut,))], None)
        >>> [number > 0 for number in one]
        [False, True, False, False, False]
    """
    alike = [(d, a) for d in decisions for a in d.actions if not a.args.get("buffers")]
    return [_hash([_told(d, a, lane) for d, a in alike if a.kind == kind]) for kind in TOGETHER]


def _told(decision: Decision, action: Action, lane: Any) -> str:
    where = Rewind.plan(action, lane, decision.at) if action.kind == "rewind" else ""
    return f"{decision.at} {action.kind} {sorted(action.args.items())} {where}"


def _hash(told: list[str]) -> int:
    if not told:
        return 0
    return 1 + int.from_bytes(hashlib.blake2b("\n".join(told).encode(), digest_size=8).digest()) // 4
