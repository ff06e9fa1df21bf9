"""A stable similarity in the place of a module's own `calculate_loss`, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trimtab.losses.versions import StableLoss, get_stable_loss_function

NAME, KEPT = "calculate_loss", "calculate_loss_original"

__all__ = ["replace_loss_function_with_stable_version", "restore_loss_function"]


def replace_loss_function_with_stable_version(
    module: Any, loss_version: int = 1, normalize: bool = True, eps: float = 1e-8
) -> StableLoss:
    """Make `module.calculate_loss` the stable similarity of that version; returns it.

    What was there stays as `module.calculate_loss_original`, whether it was a method, a function or a submodule (whose
    parameters keep their place and their keys in `state_dict`). A second call chooses another version and keeps the
    first original; `restore_loss_function` puts it back.

    Example:
        >>> import torch
        >>> class Module(torch.nn.Module):
        ...     def calculate_loss(self, *features):
        ...         return torch.einsum("az,bz,cz->abc", *features)
        >>> module = Module()
        >>> _ = replace_loss_function_with_stable_version(module, loss_version=1)
        >>> module.calculate_loss(*torch.randn(3, 2, 8)).shape
        torch.Size([2, 2, 2])
        >>> restore_loss_function(module), restore_loss_function(module)
        (True, False)
    """
    loss = get_stable_loss_function(loss_version=loss_version, normalize=normalize, eps=eps)
    if not _is_replaced(module):
        original: Callable[..., Any] | None = getattr(module, NAME, None)
        if not callable(original):
            raise ValueError(
                f"a {type(module).__name__} has no method {NAME}, so nothing would use the stable version; "
                f"set the attribute that your training calls to get_stable_loss_function({loss_version})"
            )
        # Straight into the instance: a submodule that is registered under this name stays where it is.
        module.__dict__[KEPT] = original
    module.__dict__[NAME] = loss
    return loss


def restore_loss_function(module: Any) -> bool:
    """Put back what `replace_loss_function_with_stable_version` replaced; False where nothing was.

    Example:
        >>> restore_loss_function(object())
        False
    """
    if not _is_replaced(module):
        return False
    original = module.__dict__.pop(KEPT)
    del module.__dict__[NAME]
    if getattr(module, NAME, None) != original:  # it was an attribute of the instance, not of its class
        module.__dict__[NAME] = original
    return True


def _is_replaced(module: Any) -> bool:
    return KEPT in getattr(module, "__dict__", {})
