"""The guard's part of the self-test: an update with a NaN in it leaves no bit changed, and the record tells of it."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.guard.guard import Guard
from trimtab.record.reader import read_run
from trimtab.report.replay import replay
from trimtab.train.selftest_kit import Facts, Group, Part, expect, loss_of, network

NUM_STEPS, BAD_STEP = 40, 25

Make = Callable[[Any], torch.optim.Optimizer]


def _rejecting(device: torch.device, *, make: Make) -> Facts:
    model = network(device)
    try:
        optimizer = make(model.parameters())
    except RuntimeError as error:  # this build of torch has no fused kernels for this device
        return {"not tried": str(error).partition("\n")[0]}
    with Guard(model, optimizer, run_dir=False) as guard:
        for _ in range(3):
            _step(guard, model, optimizer, device)
        before = _bits(model, optimizer)
        _step(guard, model, optimizer, device, factor=math.nan)
        changed = [name for name, value in _bits(model, optimizer).items() if not _equal(before.get(name), value)]
        expect(not changed, f"a NaN update changed {', '.join(changed[:3])}")
        _step(guard, model, optimizer, device)
        moved = any(not _equal(before[name], p) for name, p in model.named_parameters())
        expect(moved, "the healthy step after the rejected one changed nothing")
    expect(guard.rejected == 1, f"{guard.rejected} updates were rejected; expected 1")
    return {"Rejected": guard.rejected, "Tensors bit-identical": len(before)}


def _step(
    guard: Guard, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, factor: float = 1.0
) -> None:
    loss = loss_of(model, device, factor)
    loss.backward()  # type: ignore[no-untyped-call]
    guard.step(loss)
    optimizer.zero_grad()


def _bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that a step may change, by name."""
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for index, state in copy.deepcopy(optimizer.state_dict()["state"]).items():
        found |= {f"{name} of parameter {index}": v for name, v in state.items() if isinstance(v, Tensor)}
    return found


def _equal(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and torch.equal(a, b)


def _record(device: torch.device) -> Facts:
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        with Guard(model, optimizer, run_dir=place) as guard:
            for step in range(NUM_STEPS):
                _step(guard, model, optimizer, device, factor=math.nan if step == BAD_STEP else 1.0)
        run = read_run(place)
        expect(not run.problems, f"the record cannot be read back whole: {'; '.join(run.problems)}")
        steps = run.series("loss")[0].tolist()
        expect(steps == list(range(NUM_STEPS)), f"{len(steps)} of {NUM_STEPS} steps are on record")
        told = sorted({f.code for f in run.findings if f.step == BAD_STEP})
        expect("LOSS001" in told, f"the NaN at step {BAD_STEP} is not on record (found there: {told or 'nothing'})")
        again = replay(place)
        expect(again.identical, f"verdicts made again from the record differ: {'; '.join(again.differences[:2])}")
    return {"Steps on record": len(steps), "Findings": ", ".join(told), "Replay": "identical"}


def _part(name: str, make: Make) -> Part:
    return Part(name=f"NaN update rejected, {name}", body=partial(_rejecting, make=make))


GUARD = Group(
    heading="Testing Guard",
    parts=(
        _part("SGD", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        _part("Adam", lambda p: torch.optim.Adam(p, lr=1e-3)),
        _part("AdamW fused", lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
        _part("SGD fused", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)),
        Part(name="record written, read back, replayed", body=_record),
    ),
)
