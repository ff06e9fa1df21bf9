"""Compiled optimizers, and compiled functions around them, are guarded as any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.matrix import sampled
from trimtab import Guard

# What PyTorch's compiler warns of while it compiles is its own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]
STEPS = 24
BAD = 14
Compile = Callable[[Any], Callable[[], object]]


def bound_method(optimizer: Any) -> Callable[[], object]:
    return torch.compile(optimizer.step, backend="eager")


def function(optimizer: Any) -> Callable[[], object]:
    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    return step


def function_with_more(optimizer: Any) -> Callable[[], object]:
    @torch.compile(backend="eager")
    def step() -> Tensor:
        before = sum(p.detach().sum() for g in optimizer.param_groups for p in g["params"])
        optimizer.step()
        return before + sum(p.detach().sum() for g in optimizer.param_groups for p in g["params"])

    return step


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
}


def train(make: Callable[[Any], Any], compiled: Compile, *, bad: bool = False, **settings: Any) -> tuple[Any, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = make(model.parameters())
    guard = Guard.attach(model, optimizer, run_dir=False, **settings) if settings else None
    step = compiled(optimizer)
    source = torch.Generator().manual_seed(0)
    for i in range(STEPS):
        x = torch.randn(16, 8, generator=source)
        if bad and i == BAD:
            x[2] = float("nan")
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if guard is not None:
            guard.observe(loss=loss)
        step()
        optimizer.zero_grad()
    if guard is not None:
        guard.close()
    return [p.detach().clone() for p in model.parameters()], guard


@pytest.mark.parametrize(
    "compiled",
    sampled({one.__name__: one for one in (bound_method, function, function_with_more)}, "bound_method"),
)
@pytest.mark.parametrize("name", sampled(list(OPTIMIZERS), ["adamw fused"]))
def test_a_compiled_step_is_guarded(name: str, compiled: Compile) -> None:
    want, _ = train(OPTIMIZERS[name], compiled)
    got, guard = train(OPTIMIZERS[name], compiled, mode="advise")
    assert all(map(torch.equal, got, want))
    assert guard.findings == []
    assert guard.health()["steps"] == {"": STEPS}
    got, guard = train(OPTIMIZERS[name], compiled, bad=True, mode="advise")
    assert all(bool(torch.isfinite(p).all()) for p in got)
    assert (guard.rejected, {f.step for f in guard.findings}) == (1, {BAD})
    assert guard.health()["steps"] == {"": STEPS}


def test_clipping_reaches_a_compiled_step() -> None:
    def eager(optimizer: Any) -> Callable[[], object]:
        return optimizer.step  # type: ignore[no-any-return]

    want, _ = train(OPTIMIZERS["sgd"], eager, clip=0.1)
    got, guard = train(OPTIMIZERS["sgd"], bound_method, clip=0.1)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))
    assert guard.health()["steps"] == {"": STEPS}


@pytest.mark.parametrize("way", ["step", "observe"])
def test_a_guarded_step_inside_a_compiled_function(way: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Guard(model, optimizer, run_dir=False) as guard:

        @torch.compile(backend="eager")
        def step(x: Tensor) -> Tensor:
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            if way == "step":
                guard.step(loss, batch=x)
            else:
                guard.observe(loss=loss, batch=x)
                optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for i in range(STEPS):
            x = torch.randn(16, 8)
            if i == BAD:
                x[2] = float("nan")
            step(x)
    assert guard.health()["steps"] == {"": STEPS}
    assert guard.rejected == 1
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
