"""Tests on this machine whether trimtab does what it promises; every part runs, and failures are reported.

- monitor: real gradients, healthy and spoiled, and clipping beside torch's own;
- guard: an update with a NaN in it leaves no bit changed, and the record tells of it;
- losses: every version against its formula, spoiled inputs, and six modalities at once.
"""

from __future__ import annotations

import copy
import math
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trimtab import __version__
from trimtab.compat.monitors.gradient_monitor import GradientHealthMonitor, GradientStats
from trimtab.core.printable import silenced
from trimtab.guard.guard import Guard
from trimtab.losses import get_stable_loss_function, nway_logits, nway_loss
from trimtab.record.reader import read_run
from trimtab.report.replay import replay

Facts = Mapping[str, object]
Kind = Literal["has_nan", "has_inf"]


class SelfTestError(Exception):
    """Something did not behave as promised; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One promise, and what tries it: a function that raises SelfTestError, or returns what it measured."""

    name: str
    body: Callable[[torch.device], Facts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parts under one heading."""

    heading: str
    parts: tuple[Part, ...]


def expect(holds: bool, message: str) -> None:
    """Fail the part unless this holds."""
    if not holds:
        raise SelfTestError(message)


def network(device: torch.device) -> nn.Module:
    """A small network with BatchNorm."""
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4)).to(device)


def loss_of(model: nn.Module, device: torch.device, factor: float = 1.0) -> Tensor:
    """Its loss on a random batch, times a factor."""
    x = torch.randn(16, 16, device=device)
    return nn.functional.cross_entropy(model(x), torch.arange(16, device=device) % 4) * factor


def _checked(device: torch.device, factor: float = 1.0, spoil: float | None = None) -> GradientStats:
    """What the monitor says of real gradients: as they are, scaled, or with one bad value in one layer."""
    model = network(device)
    loss_of(model, device, factor).backward()  # type: ignore[no-untyped-call]
    weight = model.get_parameter("0.weight")
    if spoil is not None and weight.grad is not None:
        weight.grad[3, 3] = spoil
    return GradientHealthMonitor(model).check_gradients()


def _facts(stats: GradientStats) -> Facts:
    return {
        "Global norm": f"{stats['global_grad_norm']:.4g}",
        "Max norm": f"{stats['max_grad_norm']:.4g}",
        "Min norm": f"{stats['min_grad_norm']:.4g}",
        "Has NaN": stats["has_nan"],
        "Has Inf": stats["has_inf"],
    }


def _healthy(device: torch.device) -> Facts:
    model = network(device)
    loss_of(model, device).backward()  # type: ignore[no-untyped-call]
    stats = GradientHealthMonitor(model).check_gradients()
    parts = [torch.linalg.vector_norm(p.grad.double()) for p in model.parameters() if p.grad is not None]
    true = float(torch.linalg.vector_norm(torch.stack(parts)))
    found = stats["global_grad_norm"]
    expect(
        math.isclose(found, true, rel_tol=1e-4), f"the global norm is {found:.6g}; in double precision it is {true:.6g}"
    )
    expect(not (stats["has_nan"] or stats["has_inf"]), "healthy gradients were called non-finite")
    expect(
        stats["params_with_grads"] == len(parts), f"{stats['params_with_grads']} of {len(parts)} gradients were seen"
    )
    return _facts(stats)


def _nonfinite(device: torch.device, *, value: float, key: Kind, other: Kind) -> Facts:
    stats = _checked(device, spoil=value)
    expect(stats[key], f"one {value} in a gradient was not seen ({key} is False)")
    expect(not stats[other], f"one {value} in a gradient was taken for another kind ({other} is True)")
    expect(bool(stats["recommendations"]), f"one {value} in a gradient was seen, but nothing was recommended")
    return _facts(stats)


def _vanishing(device: torch.device) -> Facts:
    stats = _checked(device, factor=1e-12)
    expect(
        any("anish" in r for r in stats["recommendations"]), f"gradients of {_size(stats)} were not called vanishing"
    )
    return _facts(stats)


def _exploding(device: torch.device) -> Facts:
    stats = _checked(device, factor=1e6)
    expect(
        any("xplod" in r for r in stats["recommendations"]), f"gradients of {_size(stats)} were not called exploding"
    )
    return _facts(stats)


def _size(stats: GradientStats) -> str:
    return f"norm {stats['global_grad_norm']:.3g}"


def _clipping(device: torch.device) -> Facts:
    mine = network(device)
    loss_of(mine, device, 100.0).backward()  # type: ignore[no-untyped-call]
    theirs = copy.deepcopy(mine)
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    before = GradientHealthMonitor(mine).apply_gradient_clipping(max_norm=1.0)
    expected = float(nn.utils.clip_grad_norm_(theirs.parameters(), 1.0))
    expect(
        math.isclose(before, expected, rel_tol=1e-5),
        f"the norm before clipping is {before:.6g}; torch says {expected:.6g}",
    )
    pairs = [(p.grad, q.grad) for p, q in zip(mine.parameters(), theirs.parameters(), strict=True)]
    apart = max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)
    expect(apart <= 1e-6, f"clipped gradients differ from torch's by up to {apart:.2g}")
    return {"Norm before": f"{before:.4g}", "Largest difference to torch": f"{apart:.1e}"}


MONITOR = Group(
    heading="Testing Gradient Health Monitor",
    parts=(
        Part(name="healthy gradients", body=_healthy),
        Part(name="NaN in a gradient", body=partial(_nonfinite, value=math.nan, key="has_nan", other="has_inf")),
        Part(name="Inf in a gradient", body=partial(_nonfinite, value=math.inf, key="has_inf", other="has_nan")),
        Part(name="vanishing gradients", body=_vanishing),
        Part(name="exploding gradients", body=_exploding),
        Part(name="clipping as torch does it", body=_clipping),
    ),
)


NUM_STEPS, BAD_STEP = 40, 25

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


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
        codes = sorted({f.code for f in run.findings if f.step == BAD_STEP})
        expect("LOSS001" in codes, f"the NaN at step {BAD_STEP} is not on record (found there: {codes or 'nothing'})")
        again = replay(place)
        expect(again.identical, f"verdicts made again from the record differ: {'; '.join(again.differences[:2])}")
    return {"Steps on record": len(steps), "Findings": ", ".join(codes), "Replay": "identical"}


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


BATCH, WIDTH = 16, 64
RANGES = {0: (-1.0, 1.0), 1: (0.0, 3.0), 2: (-1.0, 1.0), 3: (-1.0, 0.0)}


def _features(device: torch.device, num: int, batch: int = BATCH) -> list[Tensor]:
    return [torch.randn(batch, WIDTH).to(device).requires_grad_() for _ in range(num)]


def _by_formula(version: int, xs: list[Tensor]) -> Tensor:
    """All tuples of three modalities by definition, in double precision."""
    a, b, c = (x.detach().cpu().double() for x in xs)
    rows = [u / u.norm(dim=-1, keepdim=True) for u in (a, b, c)]
    shape = (BATCH, BATCH, BATCH, WIDTH)
    u, v, w = rows[0][:, None, None].expand(shape), rows[1][:, None].expand(shape), rows[2].expand(shape)
    if version == 0:
        product: Tensor = (u * v * w).sum(-1)
        return product
    total = u + v + w
    length: Tensor = torch.linalg.vector_norm(total, dim=-1)
    if version == 1:
        return length
    if version == 2:
        cosines = torch.stack([(x * total).sum(-1) for x in (u, v, w)]).prod(0) / length**3
        return cosines.sign() * cosines.abs().pow(1 / 3)
    return -torch.stack([torch.linalg.vector_norm(x - total / 3, dim=-1) for x in (u, v, w)]).mean(0)


def _version(device: torch.device, *, version: int) -> Facts:
    xs = _features(device, 3)
    out = get_stable_loss_function(loss_version=version)(*xs)
    out.square().sum().backward()  # type: ignore[no-untyped-call]
    values = out.detach().cpu().double()
    low, high = RANGES[version]
    expect(bool(torch.isfinite(values).all()), "similarities of ordinary features are not finite")
    expect(low - 1e-4 <= float(values.min()), f"the least similarity is {float(values.min()):.6g}, below {low}")
    expect(float(values.max()) <= high + 1e-4, f"the largest similarity is {float(values.max()):.6g}, above {high}")
    apart = float((values - _by_formula(version, xs)).abs().max())
    expect(apart < 1e-5, f"similarities differ from their formula by up to {apart:.2g}")
    _expect_gradients(xs)
    return {
        "Shape": out.shape,
        "Range": f"[{float(values.min()):.4f}, {float(values.max()):.4f}]",
        "Mean": f"{float(values.mean()):.4f}",
        "Std": f"{float(values.std()):.4f}",
        "Valid": "✓",
        "Backward pass": "✓",
    }


def _spoiled(device: torch.device) -> Facts:
    """A row of zeros in every modality, at every magnitude and in half precision: no NaN, and no gradient for it."""
    largest = 0.0
    for dtype, factor in ((torch.float32, 1e20), (torch.float32, 1e-20), (torch.bfloat16, 1.0), (torch.float16, 1.0)):
        for version in RANGES:
            xs = [(x.detach() * factor).to(dtype) for x in _features(device, 3, batch=4)]
            for x in xs:
                x[1] = 0.0
                x.requires_grad_()
            get_stable_loss_function(loss_version=version)(*xs).sum().backward()  # type: ignore[no-untyped-call]
            what = f"version {version} in {str(dtype).removeprefix('torch.')} with features of {factor:g}"
            _expect_gradients(xs, f" ({what})")
            for x in xs:
                expect(x.grad is not None and not bool(x.grad[1].any()), f"a zero row has a gradient ({what})")
                if x.grad is not None and factor == 1.0:
                    largest = max(largest, float(x.grad.abs().max()))
    return {"Largest gradient": f"{largest:.3g}"}


def _six(device: torch.device) -> Facts:
    """The lines through the diagonal are all that the documented cross-entropy over `[B]^6` ever uses."""
    xs = _features(device, 6, batch=4)
    z = nway_logits(xs, similarity="norm", logit_scale=10.0)
    target = torch.zeros_like(z)
    index = torch.arange(4, device=device)
    target[(index,) * 6] = 1.0
    turns = [[(k + r) % 6 for k in range(6)] for r in range(6)]
    every = torch.stack([cross_entropy(z.permute(t), target.permute(t), reduction="sum") for t in turns]).mean() / 4
    mine: Tensor = nway_loss(xs, similarity="norm", objective="axis", logit_scale=10.0)
    apart = abs(float(mine.detach()) / float(every.detach()) - 1)
    expect(apart < 1e-4, f"the loss of lines differs from that of all 4^6 logits by {apart:.2g}")
    large = _features(device, 6, batch=128)
    loss: Tensor = nway_loss(large, similarity="norm", objective="axis", logit_scale=10.0)
    loss.backward()  # type: ignore[no-untyped-call]
    _expect_gradients(large)
    return {"Loss": f"{float(loss.detach()):.4f}", "Batch": 128, "Difference to all logits": f"{apart:.1e}"}


def _expect_gradients(xs: list[Tensor], where: str = "") -> None:
    for m, x in enumerate(xs):
        expect(x.grad is not None, f"modality {m} got no gradient{where}")
        expect(x.grad is not None and bool(torch.isfinite(x.grad).all()), f"modality {m} got a bad gradient{where}")


LOSSES = Group(
    heading="Testing Stable Loss Functions",
    parts=(
        Part(name="Einsum-based (v0)", body=partial(_version, version=0)),
        Part(name="Norm-based (v1)", body=partial(_version, version=1)),
        Part(name="Cosine similarity (v2)", body=partial(_version, version=2)),
        Part(name="Distance-based (v3)", body=partial(_version, version=3)),
        Part(name="zero rows, extreme values, half precision", body=_spoiled),
        Part(name="six modalities", body=_six),
    ),
)


GROUPS: tuple[Group, ...] = (MONITOR, GUARD, LOSSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one part on one device; `problem` is empty if it passed."""

    heading: str
    name: str
    device: str
    passed: bool
    problem: str = ""
    facts: Facts = field(default_factory=dict)


def run_selftest(groups: Sequence[Group] | None = None, devices: Sequence[str] | None = None) -> Iterator[Result]:
    """Try every part on the CPU, and on the accelerator where there is one. A part that breaks is a failed part.

    Example:
        >>> all(result.passed for result in run_selftest(devices=["cpu"]))
        True
    """
    for group in GROUPS if groups is None else groups:
        for device in map(torch.device, devices or available()):
            for part in group.parts:
                yield _try(group, part, device)


def available() -> list[str]:
    """The CPU, and the accelerator where there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def versions() -> dict[str, str]:
    """What is tested, and on what."""
    return {"trimtab": __version__, "torch": torch.__version__, "Python": platform.python_version()}


def _try(group: Group, part: Part, device: torch.device) -> Result:
    facts: Facts = {}
    problem = ""
    try:
        with torch.random.fork_rng(), silenced():
            torch.manual_seed(0)
            facts = part.body(device)
    except SelfTestError as error:
        problem = str(error)
    except Exception as error:  # reported, and the other parts run
        problem = f"{type(error).__name__}: {error}"
    return Result(
        heading=group.heading, name=part.name, device=str(device), passed=not problem, problem=problem, facts=facts
    )
