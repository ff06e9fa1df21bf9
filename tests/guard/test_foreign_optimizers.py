"""Optimizers from outside PyTorch, each a stand-in for a kind: a rejected step is an exact no-op, or it is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimtab import Guard, InputError


class Muon(torch.optim.Optimizer):
    """As Muon with its auxiliary Adam: makes a gradient where there is none, and orthogonalizes the momentum."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        found = list(params)
        matrices = {"params": [p for p in found if p.dim() > 1], "use_muon": True, "lr": 0.02, "momentum": 0.95}
        others = {"params": [p for p in found if p.dim() < 2], "use_muon": False, "lr": 0.01, "betas": (0.9, 0.95)}
        super().__init__([matrices, others], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)  # in the original, so that all ranks do the same
                state = self.state[p]
                if group["use_muon"]:
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    u, _, v = torch.linalg.svd(momentum, full_matrices=False)
                    p.add_(u @ v, alpha=-group["lr"])
                else:
                    if not state:
                        state["exp_avg"], state["exp_avg_sq"], state["step"] = (
                            torch.zeros_like(p),
                            torch.zeros_like(p),
                            0,
                        )
                    state["step"] += 1
                    state["exp_avg"] = state["exp_avg"] * 0.9 + p.grad * 0.1  # new tensors, not in place
                    state["exp_avg_sq"] = state["exp_avg_sq"] * 0.95 + p.grad.square() * 0.05
                    p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + 1e-8, value=-group["lr"])


class ScheduleFree(torch.optim.Optimizer):
    """Counts steps and sums weights in its groups, and refuses to step in eval mode."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.05, "k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            rate = group["lr"] * min(1.0, (group["k"] + 1) / 3)
            group["lr_max"] = max(rate, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            share = weight / group["weight_sum"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=rate * (0.9 * (1 - share) - 1))
                z.sub_(p.grad, alpha=rate)
            group["k"] += 1


class EightBit(torch.optim.Optimizer):
    """Quantized moments with one shared map, built in a first step that a private flag remembers."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.02})
        self._ready = False
        self._map: Tensor | None = None
        self.history: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self._ready:
            self._map = torch.linspace(-1, 1, 256)
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p] = {
                        "state1": torch.zeros(p.shape, dtype=torch.uint8),
                        "absmax": torch.zeros(()),
                        "qmap": self._map,
                    }
            self._ready = True
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                moment = state["qmap"][state["state1"].long()] * state["absmax"] * 0.9 + p.grad * 0.1
                state["absmax"].copy_(moment.abs().max())
                noise = torch.rand_like(moment) / 256  # rounds at random, with everybody's numbers
                levels = (moment / state["absmax"].clamp_min(1e-12) + 1) / 2 * 255 + noise
                state["state1"].copy_(levels.round().clamp(0, 255).to(torch.uint8))
                p.sub_(moment, alpha=group["lr"])
        self.history.append(float(sum(s["absmax"] for s in self.state.values())))


class FusedAdam(torch.optim.Optimizer):
    """As apex's: flat moments in attributes, of which states are views, and a claim to know GradScaler's protocol."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.02, "step": 0})
        self._step_supports_amp_scaling = True
        mine = self.param_groups[0]["params"]
        self._flat = {name: torch.zeros(sum(p.numel() for p in mine)) for name in ("exp_avg", "exp_avg_sq")}
        self.overflow_buf = torch.zeros(1, dtype=torch.int32)
        start = 0
        for p in mine:
            self.state[p] = {name: flat[start : start + p.numel()] for name, flat in self._flat.items()}
            start += p.numel()

    @torch.no_grad()
    def step(self, closure: Any = None, grads: Any = None, scale: Any = None) -> None:
        group = self.param_groups[0]
        group["step"] += 1
        self.overflow_buf += 1
        flat = torch.cat([p.grad.flatten() for p in group["params"]])
        first, second = self._flat.values()
        first.lerp_(flat, 0.1)
        second.lerp_(flat.square(), 0.05)
        for p in group["params"]:
            views = self.state[p]
            p.sub_((views["exp_avg"] / (views["exp_avg_sq"].sqrt() + 1e-8)).reshape(p.shape), alpha=group["lr"])


class InAttributes(torch.optim.Optimizer):
    """Keeps everything in attributes of its own: lists, a counter object, random numbers, another optimizer."""

    class Counter:
        def __init__(self) -> None:
            self.num = 0

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.01})
        mine = self.param_groups[0]["params"]
        self._momenta = [torch.zeros_like(p) for p in mine]
        self._counter, self._random = self.Counter(), torch.Generator().manual_seed(5)
        self._ages: dict[str, list[int]] = {"all": []}
        self._inner = torch.optim.SGD(mine, lr=0.01, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._counter.num += 1
        self._ages["all"].append(self._counter.num)
        for p, momentum in zip(self.param_groups[0]["params"], self._momenta, strict=True):
            momentum.mul_(0.9).add_(p.grad)
            p.sub_(momentum + 1e-3 * torch.randn(p.shape, generator=self._random), alpha=0.01)
        self._inner.step()


class InGroups(torch.optim.Optimizer):
    """Keeps its moments in its groups, as lists beside the parameters."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.01})
        for group in self.param_groups:
            group["moments"] = [torch.zeros_like(p) for p in group["params"]]
            group["counts"] = {"steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["counts"]["steps"] += 1
            for p, moment in zip(group["params"], group["moments"], strict=True):
                moment.mul_(0.9).add_(p.grad)
                p.sub_(moment, alpha=group["lr"])


class NoOptimizer:
    """Not even a subclass: its groups are built anew whenever they are asked for."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = list(params)
        self._velocity = [torch.zeros_like(p) for p in self._params]
        self.num = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self._params), "lr": 0.05}]

    @torch.no_grad()
    def step(self) -> None:
        self.num += 1
        for p, velocity in zip(self._params, self._velocity, strict=True):
            velocity.mul_(0.9).add_(torch.zeros_like(p) if p.grad is None else p.grad)
            p.sub_(velocity, alpha=0.05)

    def zero_grad(self) -> None:
        for p in self._params:
            p.grad = None


KINDS: list[Callable[[Iterable[Tensor]], Any]] = [
    Muon,
    ScheduleFree,
    EightBit,
    FusedAdam,
    InAttributes,
    InGroups,
    NoOptimizer,
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(i: int) -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(i))


def inside(optimizer: Any) -> Any:
    """All that it keeps, without hooks and without the weights."""
    skipped = ("_params", "state", "param_groups", "defaults")
    own = {k: v for k, v in vars(optimizer).items() if not k.endswith("_hooks") and k not in skipped}
    own.pop("_inner", None)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = list(getattr(optimizer, "state", {}).values())
    nested = getattr(optimizer, "_inner", None)
    return copy.deepcopy([own, groups, state, None if nested is None else nested.state_dict()["state"]])


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__dict__") and not callable(a):
        return equal(vars(a), vars(b))
    return callable(a) or bool(a == b)


@pytest.mark.parametrize("bad_at", [0, 4], ids=["at the first step", "later"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rejected_step_is_as_if_it_had_never_been(kind: Any, bad: float, bad_at: int) -> None:
    ends: list[tuple[list[Tensor], Any]] = []
    for guarded in (False, True):
        model = net()
        optimizer = kind(model.parameters())
        guard = Guard.attach(model, optimizer, run_dir=False) if guarded else None
        torch.manual_seed(1)
        for i in range(8):
            x = batch(i)
            if i == bad_at and not guarded:
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            if i == bad_at:
                before = [p.detach().clone() for p in model.parameters()], inside(optimizer)
                weight: Any = model[2].weight
                weight.grad[1, 2] = bad
                optimizer.step()
                assert all(torch.equal(a, b) for a, b in zip(before[0], model.parameters(), strict=True))
                assert equal(before[1], inside(optimizer))
                assert torch.isfinite(weight.grad).sum() == weight.numel() - 1, "gradients are given back as they were"
            else:
                optimizer.step()
        if guard is not None:
            guard.close()
            assert guard.rejected == 1
            assert {f.code for f in guard.findings} == {"GRAD001"}
        ends.append(([p.detach().clone() for p in model.parameters()], inside(optimizer)))
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0], ends[1][0], strict=True))
    assert equal(ends[0][1], ends[1][1])


def test_views_of_one_buffer_stay_views_of_it() -> None:
    model = net()
    optimizer = FusedAdam(model.parameters())
    flat = optimizer._flat["exp_avg"]
    with Guard.attach(model, optimizer, run_dir=False):
        for value in (1.0, math.nan, 1.0):
            optimizer.zero_grad()
            (model(batch(0)).square().mean() * value).backward()
            optimizer.step()
    assert optimizer._flat["exp_avg"] is flat
    assert all(
        entry["exp_avg"].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        for entry in optimizer.state.values()
    )


class MasterWeights(torch.optim.SGD):
    """As in apex's O2 or DeepSpeed: steps on copies and writes them into the model itself."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.theirs = list(params)
        super().__init__([p.detach().clone().requires_grad_() for p in self.theirs], lr=0.1)


def test_one_that_steps_on_copies_of_the_weights_is_refused_at_once() -> None:
    model = net()
    with pytest.raises(InputError, match="belong to the model"):
        Guard.attach(model, MasterWeights(model.parameters()), run_dir=False)


def test_one_without_groups_is_refused_at_once() -> None:
    class Bare:
        def step(self) -> None:
            pass

    with pytest.raises(InputError, match="without param_groups or step"):
        Guard.attach(net(), Bare(), run_dir=False)
