"""Running a step again changes nothing: weights, gradients, buffers, moments, modes, random numbers, the batch."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trimtab.trace.step_replay import ForwardCall, RandomState, Replay
from trimtab.trace.trace import Trace, trace, trace_call

LAYERS = {
    "linear": lambda: nn.Linear(4, 4),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "dropout": lambda: nn.Dropout(0.5),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "rrelu": lambda: nn.RReLU(),
    "in place": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
    "log": lambda: Log(),
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
    "evaluated": lambda: nn.BatchNorm1d(4).eval(),
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> list[Any]:
    """All that could change, as plain bytes."""
    tensors = [*model.state_dict().values(), x, torch.get_rng_state()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    tensors += [v for own in optimizer.state.values() for v in own.values() if isinstance(v, Tensor)]
    plain = [t.detach().reshape(-1).view(torch.uint8).tolist() if t.dim() else t.item() for t in tensors]
    modes = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    grads = [id(p.grad) for p in model.parameters()]
    flags = torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.is_autocast_enabled("cpu")
    return [str(plain), modes, grads, flags, random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[union-attr]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    value=st.sampled_from([0.0, math.nan, math.inf, 1.0, -3.0]),
    whole=st.booleans(),
    steps=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_trace_changes_nothing(
    layers: list[str], optimizer: str, value: float, whole: bool, steps: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), *(LAYERS[name]() for name in layers))
    moves = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    for _ in range(2):
        model(torch.rand(5, 4) + 1).sum().backward()
        moves.step()
    x = torch.rand(5, 4) + 1
    x[3] = value
    before = everything(model, moves, x)

    def step() -> Tensor:
        loss = (model(x) * random.random() * float(np.random.rand())).mean()
        loss.backward()
        if steps:
            moves.step()
        return loss

    if whole:
        found = trace_call(step, model=model, batch=x)
    else:
        found = trace(Replay(model, [ForwardCall(model, (x,), {}, RandomState(torch.get_rng_state()))]))
    assert everything(model, moves, x) == before
    assert isinstance(found, Trace)
    if math.isnan(value) and not found.error:
        assert found.origin is not None
        assert found.origin.samples in ((3,), ())


def test_dropout_is_drawn_again_as_it_was() -> None:
    """Only the row and the column that dropout let through can fail: with other random numbers another one would."""
    torch.manual_seed(3)
    drop = nn.Dropout(0.5)
    x = torch.ones(16, 1)
    state = RandomState(torch.get_rng_state())
    kept = drop(x).reshape(-1) > 0

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = drop

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x).log()

    net = Net()
    torch.manual_seed(11)
    found = trace(Replay(net, [ForwardCall(net, (x,), {}, state)])).failing
    assert found is not None
    assert torch.equal(found.args[0].reshape(-1) > 0, kept)


def test_an_optimizer_that_nobody_told_of_is_put_back() -> None:
    class Hidden:
        def __init__(self) -> None:
            self.model = nn.Linear(2, 1)
            self.moves = {"adam": [torch.optim.Adam(self.model.parameters(), lr=0.1)]}

        def step(self) -> Tensor:
            loss = self.model(torch.zeros(3, 2)).log().mean()
            loss.backward()
            self.moves["adam"][0].step()
            return loss

    hidden = Hidden()
    weights = [p.detach().clone() for p in hidden.model.parameters()]
    trace_call(lambda: hidden.step(), model=hidden.model)
    assert all(torch.equal(a, b) for a, b in zip(weights, hidden.model.parameters(), strict=True))
    assert not hidden.moves["adam"][0].state
    assert all(p.grad is None for p in hidden.model.parameters())


def test_hooks_of_ours_do_not_see_the_replay_but_those_of_the_user_do() -> None:
    from trimtab.torchutil.patch import own_hook

    seen: list[str] = []
    model = nn.Linear(2, 1)
    own = own_hook(model.register_forward_pre_hook(lambda module, args: seen.append("ours")))
    model.register_forward_pre_hook(lambda module, args: seen.append("theirs"))
    order = list(model._forward_pre_hooks)
    trace(Replay(model, [ForwardCall(model, (torch.full((3, 2), math.nan),), {})]))
    assert set(seen) == {"theirs"}
    assert list(model._forward_pre_hooks) == order
    own.remove()
