"""The state of optimizers: taken with the names of their parameters, compared, and loaded without losing a bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.checkpoint.compare import copied, different, labelled, missing_and_extra, paired
from trimtab.checkpoint.modules import parameter_names

HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how a step is computed, not what it computes: those of the optimizer that is here stay."""


def capture(optimizer: Any, model: nn.Module | None) -> dict[str, Any]:
    """The state of every optimizer, with its class and the names and shapes of its parameters by group."""
    names = parameter_names(model)
    found = {}
    for label, one in ((label, inner(one)) for label, one in labelled(optimizer).items()):
        entry = {"class": type(one).__name__, "state": one.state_dict()}
        if isinstance(one, Optimizer):
            groups = [group["params"] for group in one.param_groups]
            entry["names"] = [[names.get(id(p), "") for p in group] for group in groups]
            entry["shapes"] = [[list(p.shape) for p in group] for group in groups]
        found[label] = entry
    return found


def inner(optimizer: Any) -> Any:
    """The optimizer itself, where a framework has wrapped it."""
    wrapped = getattr(optimizer, "optimizer", None)
    return wrapped if not isinstance(optimizer, Optimizer) and isinstance(wrapped, Optimizer) else optimizer


def differences(optimizer: Any, saved: Mapping[str, Any], model: nn.Module | None) -> list[str]:
    """Why `saved` cannot be loaded into these optimizers, one line each; nothing is changed."""
    here = capture(optimizer, model)
    saved = paired(here, saved)
    lines = missing_and_extra("optimizer", here, saved, "optimizers")
    for label in (label for label in here if label in saved):
        part = "optimizer" if len(here) == 1 else f"optimizer {label}"
        ours, theirs = here[label], saved[label]
        if ours["class"] != theirs["class"]:
            lines.append(different(part, "its class", ours["class"], theirs["class"]))
        elif "names" in ours and "names" in theirs:
            lines.extend(_group_differences(part, ours, theirs))
    return lines


def _group_differences(part: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    counts = [[len(group) for group in entry["shapes"]] for entry in (ours, theirs)]
    if len(counts[0]) != len(counts[1]):
        yield different(part, "the number of parameter groups", str(len(counts[0])), str(len(counts[1])))
        return
    for index, (num_here, num_saved) in enumerate(zip(*counts, strict=True)):
        if num_here != num_saved:
            yield different(part, f"group {index}", f"{num_here} parameters", f"{num_saved} parameters")
            continue
        for place in range(num_here):
            name_here, name_saved = ours["names"][index][place], theirs["names"][index][place]
            shape_here, shape_saved = ours["shapes"][index][place], theirs["shapes"][index][place]
            if (name_here and name_saved and name_here != name_saved) or shape_here != shape_saved:
                told = [
                    f"{name or 'a parameter'} {tuple(shape)}"
                    for name, shape in ((name_here, shape_here), (name_saved, shape_saved))
                ]
                yield different(part, f"parameter {place} of group {index}", *told)


def load(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Load the state of every optimizer; it shares no memory with `saved` afterwards."""
    here = labelled(optimizer)
    saved = paired(here, saved)
    for label, one in here.items():
        one, state = inner(one), saved[label]["state"]
        if isinstance(one, Optimizer):
            _load_one(one, state)
        else:
            one.load_state_dict(copied(state))


def keep(optimizer: Any) -> Callable[[], None]:
    """A function that puts the optimizers back as they are now."""
    undo: list[Callable[[], None]] = []
    for one in map(inner, labelled(optimizer).values()):
        if isinstance(one, Optimizer) and type(one).load_state_dict is Optimizer.load_state_dict:
            # Loading replaces these objects and leaves the old ones alone: keeping them costs no memory.
            undo.append(_setter(one, one.state, one.param_groups))
        else:
            undo.append(_loader(one, copied(one.state_dict())))

    def put_back() -> None:
        for back in undo:
            back()

    return put_back


def _setter(one: Optimizer, state: Any, groups: Any) -> Callable[[], None]:
    return lambda: one.__dict__.update(state=state, param_groups=groups)


def _loader(one: Any, state: Any) -> Callable[[], None]:
    return lambda: one.load_state_dict(state)


def _load_one(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    state = copied(dict(saved))
    for group, ours in zip(state.get("param_groups", ()), optimizer.param_groups, strict=False):
        group.update({option: ours[option] for option in HOW if option in ours})
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        _set_exactly(optimizer, state)


def _set_exactly(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loading casts moments to the type of their parameter, and leaves step counts on the device they were saved from.

    Moments kept in float32 for parameters in bfloat16 would lose their lower half.
    """
    for group, packed in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, index in zip(group["params"], packed["params"], strict=True):
            for key, value in state["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    optimizer.state[parameter][key] = placed(key, value, parameter, group)


def placed(key: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A moment on the device of its parameter, a step count where the optimizer wants it."""
    if key != "step":
        return value.to(parameter.device)
    if group.get("fused"):
        return value.to(parameter.device, torch.float32)
    return value.to(parameter.device if group.get("capturable") else "cpu")
