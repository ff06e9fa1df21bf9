"""A hook on a model that waits for its first call to train, once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trimtab.sample.forward import inert, only_traced
from trimtab.sample.hooks import native, own_hook


class Door:
    """Open until the model is called with gradients on; what was hooked on in answer sees that very call."""

    def __init__(self, model: nn.Module, called: Callable[[nn.Module], None]) -> None:
        self.model = weakref.ref(model)
        self._called = called
        self._handle: Any = own_hook(model.register_forward_pre_hook(self, with_kwargs=True), listed=False)

    @property
    def open(self) -> bool:
        """Whether it still waits."""
        return self._handle is not None

    @native
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Runs before the model's forward."""
        if only_traced() or not torch.is_grad_enabled() or self._handle is None:
            return
        self.close()
        before = set(module._forward_pre_hooks)
        self._called(module)
        for key, hook in list(module._forward_pre_hooks.items()):
            if key not in before:  # came too late to be called by PyTorch this time
                if key in module._forward_pre_hooks_with_kwargs:
                    hook(module, args, kwargs)
                else:
                    hook(module, args)

    def close(self) -> None:
        """Wait no longer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __reduce__(self) -> Any:
        return inert()
