"""Doctor says nothing against a sound training, and leaves it as it found it, to the bit."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.doctor.bench import PROJECTS, ask, build
from tests.matrix import sampled

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def optimizers(built: dict[str, Any]) -> list[Any]:
    given = built["optimizer"]
    return list(given.values()) if isinstance(given, dict) else given if isinstance(given, list) else [given]


def reachable(built: dict[str, Any]) -> dict[str, nn.Module]:
    """The modules a training has: the model, its average, and what its step keeps for itself."""
    found = {"model": built["model"]}
    if isinstance(built.get("ema"), nn.Module):
        found["ema"] = built["ema"]
    for cell in getattr(built.get("step_fn"), "__closure__", None) or ():
        if isinstance(cell.cell_contents, nn.Module):
            found[f"closure {len(found)}"] = cell.cell_contents
    return found


def frozen(value: Any) -> Any:
    """Something that can be compared later, whatever happens to the value."""
    if isinstance(value, Tensor):
        raw = value.detach().clone()
        raw = torch.view_as_real(raw) if raw.is_complex() else raw
        return (tuple(value.shape), str(value.dtype), value.requires_grad, raw.contiguous().numpy().tobytes())
    if isinstance(value, dict):
        return {str(k): frozen(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(v) for v in value]
    return copy.deepcopy(value) if not callable(value) else id(value)


def picture(built: dict[str, Any]) -> dict[str, Any]:
    """Everything that doctor could have moved."""
    seen: dict[str, Any] = {}
    for label, module in reachable(built).items():
        for name, p in module.named_parameters(remove_duplicate=False):
            grad = None if p.grad is None else frozen(p.grad.to_dense())
            seen[f"{label}.{name}"] = (id(p), frozen(p), grad, len(p._backward_hooks or {}))
        for name, b in module.named_buffers(remove_duplicate=False):
            seen[f"{label}.{name} buffer"] = (id(b), frozen(b))
        for name, part in module.named_modules():
            hooks = [len(getattr(part, h)) for h in HOOKS]
            attributes = sorted(k for k in vars(part) if not k.endswith("_hooks"))
            seen[f"{label}.{name} flags"] = (part.training, hooks, attributes, "forward" in vars(part))
    for i, one in enumerate(optimizers(built)):
        state = one.state_dict()
        groups = [{k: frozen(v) for k, v in g.items() if k != "params"} for g in one.param_groups]
        seen[f"optimizer {i}"] = (
            groups,
            frozen(state["state"]),
            [[id(p) for p in g["params"]] for g in one.param_groups],
        )
        seen[f"optimizer {i} own"] = (sorted(vars(one)), "step" in vars(one), len(one._optimizer_step_pre_hooks))
    for key in ("scaler", "scheduler"):
        if key in built:
            seen[key] = frozen(built[key].state_dict())
            seen[f"{key} own"] = sorted(vars(built[key]))
    for cell in getattr(built.get("step_fn"), "__closure__", None) or ():
        if isinstance(cell.cell_contents, dict | int | float):
            seen[f"cell {len(seen)}"] = frozen(cell.cell_contents)
    generator = getattr(built["loader"], "generator", None)
    seen["loader generator"] = None if generator is None else frozen(generator.get_state())
    return seen


def surroundings() -> dict[str, Any]:
    """What a program can switch for everybody."""
    return {
        "torch rng": frozen(torch.get_rng_state()),
        "python rng": random.getstate(),
        "numpy rng": frozen(np.random.get_state()[1].tolist()),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "filters": list(warnings.filters),
        "patched": [
            torch.Tensor.backward.__module__,
            torch.autograd.backward.__module__,
            nn.utils.clip_grad_norm_.__module__,
            nn.Module.__call__.__module__,
            torch.optim.Optimizer.zero_grad.__module__,
            torch.amp.GradScaler.step.__module__,
            torch.manual_seed.__module__,
        ],
    }


def after_a_few_steps(built: dict[str, Any]) -> None:
    """In the middle of a training there is more to lose: moments, gradients, counters."""
    built["model"].train()
    batches = iter(built["loader"])
    for _ in range(3):
        batch = next(batches, None)
        if batch is None or "step_fn" not in built:
            break
        loss = built["step_fn"](built["model"], batch)
        if isinstance(loss, Tensor) and loss.requires_grad and not any(o.state for o in optimizers(built)):
            loss.backward()
            for one in optimizers(built):
                one.step()
    for p in list(built["model"].parameters())[:1]:
        if p.grad is None and p.requires_grad and not p.is_sparse:
            p.grad = torch.ones_like(p)


@pytest.mark.parametrize("project", sampled(PROJECTS, PROJECTS[::4]))
def test_e20_no_alarm_and_everything_is_as_it_was(project: str) -> None:
    built = build(project)
    after_a_few_steps(built)
    torch.manual_seed(11)
    torch.rand(3)
    before, around = picture(built), surroundings()
    verdict = ask(built)
    after, around_after = picture(built), surroundings()
    assert around_after == around
    assert sorted(after) == sorted(before)
    changed = [key for key in before if after[key] != before[key]]
    assert changed == []
    assert (verdict.fails, verdict.warns) == ((), ())
    assert not [line for line in verdict.report.lines if "the check itself ended" in line.evidence]


def test_the_picture_sees_a_change_of_one_bit() -> None:
    built = build("loop")
    after_a_few_steps(built)
    before = picture(built)
    momentum = next(iter(built["optimizer"].state.values()))["momentum_buffer"]
    for tensor in (built["model"].head.weight.data, built["model"].head.weight.grad, momentum):
        old = tensor.clone()
        tensor.view(-1)[3].mul_(1.0 + 1e-6)
        assert picture(built) != before
        tensor.copy_(old)
    assert picture(built) == before
    built["scheduler"].step()
    assert picture(built) != before


def test_a_training_goes_on_as_if_nothing_had_been_asked() -> None:
    """The same losses, with and without a look by doctor in between."""

    def losses(*, asked: bool) -> list[float]:
        built = build("loop")
        if asked:
            ask(built)
        torch.manual_seed(3)
        return [float(built["step_fn"](built["model"], batch).detach()) for batch in built["loader"]][:20]

    assert losses(asked=True) == losses(asked=False)
