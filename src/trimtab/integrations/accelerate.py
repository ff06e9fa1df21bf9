"""Accelerate: `guard = trimtab.accelerate.guard(accelerator, model, optimizer)`, after `prepare`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trimtab.core.contain import Contained
from trimtab.guard.guard import Guard
from trimtab.integrations.training_guard import check_settings, missing
from trimtab.torchutil.patch import wrap_on_object

try:
    import accelerate as _accelerate  # noqa: F401
except ImportError as error:
    raise missing("accelerate", "accelerate") from error

log = logging.getLogger("trimtab")


def guard(accelerator: Any, model: Any, optimizer: Any, **settings: Any) -> Guard:
    """Guard a loop that Accelerate drives; call it after `accelerator.prepare`.

    The losses given to `accelerator.backward` are seen as they are, also when gradients are accumulated, and so is the
    norm before `accelerator.clip_grad_norm_`. `save_state` and `load_state` carry the guard's state along.

    Args:
        accelerator: The `Accelerator`.
        model: What `prepare` returned.
        optimizer: One optimizer from there, or a list or dict of them.
        settings: Keywords of `trimtab.Guard`.
    """
    check_settings(settings)
    made = Guard.attach(model, optimizer, **{"scaler": getattr(accelerator, "scaler", None), **settings})
    made.watch_clipping()

    def backward(inner: Callable[..., Any], loss: Any, **kwargs: Any) -> Any:
        made.observe(loss)
        return inner(loss, **kwargs)

    made.also_remove(wrap_on_object(accelerator, "backward", backward))
    kept = _State(made, f"trimtab_guard_{accelerator.process_index}.pt")
    for hook in (
        accelerator.register_save_state_pre_hook(kept.save),
        accelerator.register_load_state_pre_hook(kept.load),
    ):
        made.also_remove(hook.remove)
    return made


class _State:
    """Writes the guard's state beside the accelerator's own, and reads it where there is one."""

    def __init__(self, guard: Guard, name: str) -> None:
        self._guard, self._name, self._contained = guard, name, Contained()

    def save(self, models: Any, weights: Any, output_dir: str) -> None:
        self._contained.call("saving the guard's state", self._save, Path(output_dir) / self._name)

    def _save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self._guard.state_dict(), path)

    def load(self, models: Any, input_dir: str) -> None:
        self._contained.call("loading the guard's state", self._load, Path(input_dir) / self._name)

    def _load(self, path: Path) -> None:
        if path.exists():
            self._guard.load_state_dict(torch.load(path, weights_only=True))
        else:
            log.warning("Accelerate: %s is not there: the guard begins without a history", path)
