"""Checkpoints of this run as states to go back to, where memory holds none from before the trouble."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trimtab.act.copies import Copied, Key
from trimtab.act.rewind import Reached
from trimtab.act.ring import sound_rates
from trimtab.core.errors import CheckpointError
from trimtab.core.types import Snapshot
from trimtab.recover import container, modules, optimizers
from trimtab.recover.checkpointer import Checkpointer
from trimtab.recover.compare import copied, paired, refuse
from trimtab.torchutil.param_groups import rates_of

log = logging.getLogger("trimtab")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint of this run: how many steps of each lane are in it, and the rates at that time."""

    path: Path
    steps: Mapping[str, int]
    rates: Mapping[str, list[float]]


class DiskStates:
    """Knows which checkpoints were written by this run, or came before the one it was resumed from."""

    def __init__(self, checkpointer: Checkpointer, objects: Mapping[str, Any], lanes: Mapping[str, Any]) -> None:
        self._checkpointer, self._lanes = checkpointer, lanes
        self._model: nn.Module = objects["model"]
        self._optimizers: Mapping[str, Any] = objects["optimizer"]
        self._ema = objects.get("ema")
        self._copied = Copied(self._model, self._optimizers, self._ema)
        self._saved: list[Saved] = []

    def saved(self, path: Path) -> None:
        """A checkpoint was written now."""
        steps = {label: lane.attempts for label, lane in self._lanes.items()}
        rates = {label: rates_of(lane.optimizer) for label, lane in self._lanes.items()}
        self._saved.append(Saved(path=path, steps=steps, rates=rates))

    def resumed(self, snapshot: Snapshot) -> None:
        """This run goes on from there: what came before it are its own states as well."""
        older = [s for s in self._checkpointer.history() if s.path != snapshot.path]
        one = next(iter(self._lanes)) if len(self._lanes) == 1 else None  # of several the numbers are not known
        self._saved = [Saved(path=s.path, steps={one: s.step}, rates={}) for s in older if one is not None]
        self.saved(snapshot.path)

    # -- going back ----------------------------------------------------------------------------------------------

    def go_back(self, label: str, before: int, back: int) -> Reached | None:
        """Put the newest sound state before `before`, or one of the `back` before it, in place; None without one.

        A checkpoint of as many steps was written when the next step had begun, so it may already hold what did the
        damage: it has to be older. One whose checksums do not hold, or that does not fit, is told and left out.
        """
        known, usable = self._usable(label, before)
        for one in reversed(usable[: max(len(usable) - back, 1)]):
            try:
                sections = container.read(one.path).sections
                missing = self._put_back(sections)
            except CheckpointError as error:
                log.warning("%s is not gone back to: %s", one.path.name, error)
                continue
            told = sections.get("guard", {}).get("lanes", {})
            for name, lane in self._lanes.items():
                lane.was_put_back(told.get(name))
            return Reached(
                step=one.steps[label] - 1,
                proven=known[one.path].state == "good",
                source=f"from the checkpoint {one.path.name}, verified",
                missing=missing,
                rates=sound_rates(one.rates.get(label, []), [s.rates.get(label, []) for s in usable]),
            )
        return None

    def put_buffers_back(self, label: str, before: int) -> bool:
        """Put only the buffers of that state in place; whether there was anything to put back."""
        _, usable = self._usable(label, before)
        for one in reversed(usable if any(True for _ in self._model.buffers()) else []):
            try:
                model = container.read(one.path, sections=["model"]).sections["model"]
                refuse(modules.differences("model", self._model, model))
            except CheckpointError as error:
                log.warning("the buffers in %s are not gone back to: %s", one.path.name, error)
                continue
            named = {n: model.get(modules.plain_name(self._model, n)) for n, _ in self._model.named_buffers()}
            return self._copied.put_buffers_back({("model", n): t for n, t in named.items() if isinstance(t, Tensor)})
        return False

    def would_reach(self, label: str, before: int, back: int) -> int | None:
        """The last step in the state that `go_back` would put in place, if its checksums hold."""
        _, usable = self._usable(label, before)
        return usable[max(len(usable) - 1 - back, 0)].steps[label] - 1 if usable else None

    def _usable(self, label: str, before: int) -> tuple[dict[Path, Snapshot], list[Saved]]:
        self._wait()
        known = {s.path: s for s in self._checkpointer.list() if s.state != "bad" and not s.repaired}
        return known, [s for s in self._saved if s.path in known and s.steps.get(label, before) < before]

    def condemn(self, label: str, since: int, reason: str) -> None:
        """Trouble began at step `since` of a lane: what was written from then on is never resumed from."""
        self._wait()
        self._checkpointer.condemn_these([s.path for s in self._saved if s.steps.get(label, -1) >= since], reason)

    def _wait(self) -> None:
        try:
            self._checkpointer.wait()
        except CheckpointError as error:
            log.warning("the last checkpoint could not be written: %s", error)

    def _put_back(self, sections: Mapping[str, Any]) -> int:
        """Write a checkpoint over what is there now, in place; nothing is changed where it does not fit.

        As with copies in memory, schedule, loss scaler, random numbers and data are not taken back.
        """
        model, ema = sections.get("model", {}), sections.get("ema")
        moments = paired(self._optimizers, sections.get("optimizer", {}))
        averaged = self._ema if isinstance(self._ema, nn.Module) and ema is not None else None
        lines = modules.differences("model", self._model, model)
        lines += optimizers.differences(self._optimizers, moments, self._model)
        lines += [] if averaged is None else modules.differences("ema", averaged, ema or {})
        strange = [n for n, m in moments.items() if not {"state", "param_groups"} <= set(m["state"])]
        refuse([*lines, *(f"optimizer {n}: it keeps its state in a way of its own" for n in strange)])
        live, numbers = self._copied.live()
        tensors: dict[Key, Tensor] = {}
        others: dict[Key, Any] = {}
        for key in live:
            owner, saved = (self._model, model) if key[0] == "model" else (averaged, ema)
            name = modules.plain_name(owner, str(key[1])) if key[0] in ("model", "ema") and owner is not None else None
            if name is not None and saved is not None and isinstance(saved.get(name), Tensor):
                tensors[key] = saved[name]
        for label, optimizer in self._optimizers.items():
            state = moments[label]["state"]
            for key, value in _moments(label, optimizer, state):
                (tensors if isinstance(value, Tensor) else others)[key] = value
            for key in (k for k in numbers if k[:2] == ("group", label)):
                group = dict(enumerate(state["param_groups"])).get(key[2], {})  # type: ignore[call-overload]
                others |= {key: group[key[3]]} if key[3] in group else {}
        missing = self._copied.put_back(tensors, others)
        if self._ema is not None and averaged is None and ema is not None and hasattr(self._ema, "load_state_dict"):
            self._ema.load_state_dict(copied(ema))
        return missing


def _moments(label: str, optimizer: Any, state: Mapping[str, Any]) -> list[tuple[Key, Any]]:
    """The saved state of one optimizer under the names that copies in memory have, where its parameters are."""
    found: list[tuple[Key, Any]] = []
    owners = dict(enumerate((p, group) for group in optimizer.param_groups for p in group["params"]))
    for where, entries in state["state"].items():
        if not isinstance(entries, Mapping):
            found.append((("state", label, where), entries))
            continue
        for name, value in entries.items():
            if isinstance(value, Tensor) and where in owners:
                value = optimizers.placed(name, value, *owners[where])
            found.append((("state", label, where, name), value))
    return found
