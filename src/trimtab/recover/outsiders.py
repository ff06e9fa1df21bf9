"""What others put into their files, sorted into the sections that a checkpoint of ours has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.core.errors import CheckpointError
from trimtab.recover.compare import labelled, listed
from trimtab.recover.modules import COMPILED
from trimtab.recover.optimizers import inner

MODEL = ("model_state_dict", "state_dict", "model", "net", "module")
OPTIMIZER = ("optimizer_state_dict", "optimizer", "optim")
SCHEDULER = ("scheduler_state_dict", "lr_scheduler_state_dict", "scheduler", "lr_scheduler")
PARALLEL = "module."


def sections_of_foreign(loaded: Any, path: Path, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The sections in what `load_foreign` read: a state dict, or a dict that has one under a usual name.

    `given` are the optimizer and scheduler it is meant for: such files do not say of which class theirs are.

    Example:
        >>> import torch
        >>> found = sections_of_foreign({"state_dict": {"module.w": torch.ones(1)}, "epoch": 3}, Path("old.pth"))
        >>> found["model"], found["extra"]
        ({'w': tensor([1.])}, {'epoch': 3})
    """
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(loaded).__name__}; expected a state dict, or a dict with one under {listed(MODEL)}"
        )
    if _is_state_dict(loaded):
        return {"model": _plain_names(loaded)}
    under = next((name for name in MODEL if _is_state_dict(loaded.get(name))), None)
    if under is None:
        held = listed(map(str, loaded)) or "nothing"
        raise CheckpointError(f"{path} holds no state dict; expected one under {listed(MODEL)}, found: {held}")
    sections: dict[str, Any] = {"model": _plain_names(loaded[under])}
    used = {under}
    for section, names in (("optimizer", OPTIMIZER), ("scheduler", SCHEDULER)):
        name = next((name for name in names if isinstance(loaded.get(name), Mapping)), None)
        if name is not None:
            used.add(name)
            here = labelled((given or {}).get(section))
            itself = inner if section == "optimizer" else lambda one: one
            kind = next((type(itself(one)).__name__ for one in here.values()), "")
            sections[section] = {next(iter(here), "0"): {"class": kind, "state": loaded[name]}}
    sections["extra"] = {str(name): one for name, one in loaded.items() if name not in used}
    return sections


def _is_state_dict(value: Any) -> bool:
    """A mapping of names to tensors; a module may keep other things in its state, but no dicts within dicts."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        return False
    return any(isinstance(one, Tensor) for one in value.values()) and not any(
        isinstance(one, Mapping) for one in value.values()
    )


def _plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Names without what `torch.compile` and the data-parallel wrappers add to them."""
    names = [name.replace(COMPILED, "") for name in state]
    prefix = PARALLEL if all(name.startswith(PARALLEL) for name in names) else ""
    return {name.removeprefix(prefix): one for name, one in zip(names, state.values(), strict=True)}
