"""Which tensors of a batch are inputs and which are targets: said by the contract, or seen at the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.checks.leaves import leaves
from trimtab.checks.target_steps import TARGET_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Paths of a batch: inputs, and targets that the loss compares with.

    `sure` says that targets were seen there, or are there by contract; `fed` is what was seen to go into the model.
    """

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    sure: bool
    fed: tuple[str, ...] = ()


def roles_of(batch: Any, given: list[Tensor], compared: Tensor | None, *, by_contract: bool) -> Roles:
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


def _by_place(batch: Any) -> str:
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
