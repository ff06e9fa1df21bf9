"""PyTorch's undocumented skip protocol, held to what trimtab relies on: a new release that changes it fails here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

FUSED = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


def state_of(optimizer: Any) -> list[Tensor]:
    return [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]


@pytest.mark.parametrize("name", FUSED)
def test_found_inf_skips_and_grad_scale_divides(name: str) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    optimizer: Any = FUSED[name]([p])
    assert optimizer._step_supports_amp_scaling is True
    p.grad = torch.ones(4)
    optimizer.step()
    weights, state = p.detach().clone(), state_of(optimizer)
    p.grad = torch.full((4,), torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(p, weights)
    assert all(torch.equal(a, b) for a, b in zip(state, state_of(optimizer), strict=True))
    del optimizer.found_inf
    p.grad = torch.full((4,), 8.0)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(4.0)
    optimizer.step()
    assert torch.equal(p.grad, torch.full((4,), 2.0)), "the fused kernel rewrites the gradients"


@pytest.mark.parametrize("name", FUSED)
def test_an_open_gate_changes_no_bit(name: str) -> None:
    torch.manual_seed(0)
    start, grads = torch.randn(50), torch.randn(5, 50)
    ends = []
    for gated in (False, True):
        p = torch.nn.Parameter(start.clone())
        optimizer: Any = FUSED[name]([p])
        for g in grads:
            p.grad = g.clone()
            if gated:
                optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.ones(())
            optimizer.step()
        ends.append(p.detach().clone())
    assert torch.equal(*ends)


def test_optimizers_that_are_not_fused_do_not_claim_it() -> None:
    p = torch.nn.Parameter(torch.ones(4))
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam):
        assert not getattr(make([p], lr=0.1), "_step_supports_amp_scaling", False)


def test_hooks_may_replace_the_closure() -> None:
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.1)
    called = []
    optimizer.register_step_pre_hook(lambda o, a, k: ((*a[:1], lambda: called.append("ours")), k))
    optimizer.step(lambda: called.append("theirs"))
    assert called == ["ours"]
