"""The tensors of a batch, each with its path: list them, replace them, and tell inputs from targets."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAX_DEPTH = 4
LARGE = 1 << 22

TARGET_KEYS = ("target", "targets", "label", "labels", "y")


def leaves(batch: object, at: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its path.

    Example:
        >>> [path for path, _ in leaves({"x": torch.ones(1), "more": [torch.ones(2), torch.ones(3)]})]
        ['x', 'more.0', 'more.1']
    """
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "fiub":
        yield at, torch.from_numpy(batch)
    elif isinstance(batch, Tensor):
        yield at, batch
    elif depth < MAX_DEPTH:
        for key, part in _parts(batch):
            yield from leaves(part, f"{at}.{key}" if at else str(key), depth + 1)


def _parts(batch: object) -> Iterator[tuple[object, object]]:
    if isinstance(batch, Mapping):
        yield from batch.items()
    elif isinstance(batch, list | tuple):
        yield from enumerate(batch)
    elif hasattr(batch, "data") and isinstance(getattr(batch, "data", None), dict):
        yield from batch.data.items()


def mapped(batch: object, change: Callable[[str, Tensor], Tensor], at: str = "", depth: int = 0) -> object:
    """The same batch with every tensor changed; what is no tensor stays.

    Example:
        >>> mapped((torch.ones(1), "a"), lambda path, t: t + 1)
        (tensor([2.]), 'a')
    """
    if isinstance(batch, Tensor):
        return change(at, batch)
    if depth >= MAX_DEPTH:
        return batch

    def inner(key: object, part: object) -> object:
        return mapped(part, change, f"{at}.{key}" if at else str(key), depth + 1)

    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        make: Callable[..., object] = type(batch)
        return make(*(inner(i, part) for i, part in enumerate(batch)))
    if isinstance(batch, list | tuple):
        return type(batch)(inner(i, part) for i, part in enumerate(batch))
    if isinstance(batch, Mapping):
        found = {key: inner(key, part) for key, part in batch.items()}
        try:
            return found if isinstance(batch, dict) and type(batch) is dict else type(batch)(found)  # type: ignore[call-arg]
        except Exception:
            return found
    return batch


def fresh(batch: object) -> object:
    """A copy that may be changed in place."""
    return mapped(batch, lambda _, t: t.detach().clone().requires_grad_(t.requires_grad))


def num_samples(batch: object) -> int | None:
    """How many samples there are: the leading size that most tensors share."""
    sizes = [t.shape[0] for _, t in leaves(batch) if t.dim()]
    return max(set(sizes), key=lambda n: (sizes.count(n), -sizes.index(n))) if sizes else None


def tensor_hash(tensor: Tensor) -> int:
    """A fingerprint of all its values."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return id(tensor)
    flat = tensor.detach().cpu().contiguous().reshape(-1)[:LARGE]
    raw = (
        flat.view(torch.uint8)
        if flat.numel() and not flat.is_complex()
        else torch.view_as_real(flat)
        if flat.numel()
        else flat
    )
    return zlib.crc32(raw.numpy().tobytes(), tensor.numel() & 0xFFFF)


def is_label_like(tensor: Tensor) -> bool:
    """Whole numbers that are no mask and no image."""
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype not in (torch.bool, torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Paths of a batch: inputs, and targets that the loss compares with.

    `sure` says that targets were seen there, or are there by contract; `fed` is what was seen to go into the model.
    """

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    sure: bool
    fed: tuple[str, ...] = ()


def roles_of(batch: object, given: list[Tensor], compared: Tensor | None, *, by_contract: bool) -> Roles:
    """Sort the tensors of a batch.

    Example:
        >>> x, y = torch.randn(4, 2), torch.arange(4)
        >>> roles_of((x, y), [x], y, by_contract=False)
        Roles(inputs=('0',), targets=('1',), sure=True, fed=('0',))
    """
    found = dict(leaves(batch))
    seen = tuple(p for p, t in found.items() if any(same_values(t, g) for g in given))
    wanted = tuple(p for p, t in found.items() if compared is not None and p not in seen and same_values(t, compared))
    if not wanted and compared is not None:
        # A model that computes its own loss is given its targets too: of what the loss compared with, the name tells.
        wanted = tuple(
            p
            for p, t in found.items()
            if p.rpartition(".")[2] in TARGET_KEYS and is_next(t, compared) and any(q != p for q in seen)
        )
    if wanted:
        return Roles(inputs=tuple(p for p in found if p not in wanted), targets=wanted, sure=True, fed=seen)
    guessed = _by_place(batch)
    guess = tuple(p for p in found if guessed and (p == guessed or p.startswith(f"{guessed}.")) and p not in seen)
    return Roles(inputs=tuple(p for p in found if p not in guess), targets=guess, sure=by_contract, fed=seen)


def _by_place(batch: object) -> str:
    if isinstance(batch, Mapping):
        return next((k for k in TARGET_KEYS if k in batch), "")
    return str(len(batch) - 1) if isinstance(batch, list | tuple) and len(batch) > 1 else ""


def holds(whole: Tensor, part: Tensor) -> bool:
    """Whether a tensor is another one, or all of it but its first or last column."""
    if same_values(whole, part):
        return True
    fits = whole.dim() == part.dim() == 2 and whole.shape[0] == part.shape[0] and whole.shape[1] == part.shape[1] + 1
    return fits and (same_values(whole[:, :-1], part) or same_values(whole[:, 1:], part))


def is_next(whole: Tensor, part: Tensor) -> bool:
    """Whether a loss compared with these targets, as they are or moved by one place: next tokens.

    Example:
        >>> tokens = torch.arange(12).reshape(2, 6)
        >>> is_next(tokens, tokens[:, 1:].reshape(-1)), is_next(tokens, tokens.flip(0))
        (True, False)
        >>> is_next(tokens, torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100))
        True
    """
    if same_values(whole, part):
        return True
    if whole.dim() != 2 or whole.shape[1] < 2:
        return False
    if part.numel() == whole.shape[0] * (whole.shape[1] - 1):
        return same_values(whole[:, 1:], part)
    return part.numel() == whole.numel() and same_values(whole[:, 1:], part.reshape(whole.shape)[:, :-1])


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether they hold the same numbers, in whatever shape and type."""
    if a.numel() != b.numel() or a.is_meta or b.is_meta or not a.numel() or a.is_complex() or b.is_complex():
        return False
    if a.data_ptr() == b.data_ptr():
        return True
    return torch.equal(a.detach().reshape(-1).double().cpu(), b.detach().reshape(-1).double().cpu())
