"""What a training reads its batches from: a DataLoader, whose place is known, or what can be read anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from trimtab.checkpoint.loader import resumable
from trimtab.core.errors import InputError


def readable(loader: Any, *, guarded: bool = True) -> Any:
    """The loader as a training reads it: one that knows its place where that is possible, else as it is.

    Example:
        >>> readable([1, 2])
        [1, 2]
        >>> readable(7)
        Traceback (most recent call last):
            ...
        trimtab.core.errors.InputError: the training loader is a int; expected a DataLoader, or a list of batches
    """
    if not isinstance(loader, Iterable) or isinstance(loader, str | bytes):
        raise InputError(
            f"the training loader is a {type(loader).__name__}; expected a DataLoader, or a list of batches"
        )
    if num_batches(loader) == 0:
        raise InputError(f"the training loader has no batches{_why(loader)}")
    return resumable(loader) if guarded and isinstance(loader, DataLoader) else loader


def to_measure(loader: Any) -> Any:
    """The validation loader, if it has something to measure on."""
    if loader is not None and num_batches(loader) == 0:
        raise InputError(f"the validation loader has no batches{_why(loader)}, or give None: nothing is measured then")
    return loader


def num_batches(loader: Any) -> int | None:
    """How many batches an epoch has; None where the loader does not say."""
    try:
        return len(loader)
    except TypeError:
        return None


def place_of(loader: Any) -> Any:
    """The loader, if it can say where it is: what a checkpoint holds of it; else None."""
    return loader if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") else None


def nothing_came(loader: Any, epoch: int) -> InputError:
    """An epoch without a single batch is no epoch."""
    if epoch == 1:
        return InputError(f"the training loader gave no batch{_why(loader)}")
    return InputError(
        f"the training loader gave no batch in epoch {epoch}: it can be read only once. Give a DataLoader, a list, or "
        "an object whose __iter__ begins anew"
    )


def _why(loader: Any) -> str:
    size, drop = getattr(loader, "batch_size", None), bool(getattr(loader, "drop_last", False))
    if size is None:
        return "; give one with data"
    try:
        rows = f"{len(loader.dataset)} rows"
    except TypeError:
        rows = "a dataset of unknown length"
    return f": {rows}, batch_size {size}, drop_last {drop}; give more data" + (
        " or a smaller batch_size" if drop else ""
    )
