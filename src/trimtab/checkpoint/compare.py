"""What a checkpoint holds beside what is here: differences in words, gathered before anything is changed."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.core.errors import CheckpointError
from trimtab.core.printable import brief

SHOWN = 5
"""Names in one line of a difference; the rest are counted."""


def listed(names: Iterable[str], shown: int = SHOWN) -> str:
    """Some names, and how many more there are.

    Example:
        >>> listed(["a", "b", "c"], shown=2)
        'a, b and 1 more'
    """
    kept = list(names)
    more = f" and {len(kept) - shown} more" if len(kept) > shown else ""
    return ", ".join(brief(name) for name in kept[:shown]) + more


def joined(path: str, key: Any) -> str:
    """The name of something inside of a container; one that is too long is cut, and keeps a mark to tell it by.

    A file can nest thousands of tensors below a name of a million letters: each would have it in its own.

    Example:
        >>> joined("model", "weight"), joined("", 3), len(joined("x" * 300, "y" * 300)) < 420
        ('model.weight', '3', True)
    """
    return _cut(f"{path}.{_cut(_named(key), 120)}" if path else _cut(_named(key), 120), 400)


def _named(key: Any) -> str:
    return str(key) if not isinstance(key, int) or key.bit_length() < 1000 else brief(key)


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[: length - 10]}…{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"


def missing_and_extra(part: str, here: Iterable[str], saved: Iterable[str], what: str) -> list[str]:
    """Lines for the names that are only here, or only in the checkpoint."""
    ours, theirs = dict.fromkeys(here), dict.fromkeys(saved)
    lines = []
    if absent := [name for name in ours if name not in theirs]:
        lines.append(f"{part}: {what} here but not in the checkpoint: {listed(absent)}")
    if extra := [name for name in theirs if name not in ours]:
        lines.append(f"{part}: {what} in the checkpoint but not here: {listed(extra)}")
    return lines


def kind_of(value: Any) -> str:
    """A tensor by type and shape, everything else by its class."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__


def different(part: str, name: str, here: str, saved: str) -> str:
    """One line: the name, what the checkpoint has, and what is here."""
    return f"{part}: {name} is {saved} in the checkpoint, {here} here"


def labelled(objects: Any) -> dict[str, Any]:
    """One object, or several in a list or dict, each under a name; None is none."""
    if objects is None:
        return {}
    if isinstance(objects, Mapping):
        return {str(name): one for name, one in objects.items()}
    if isinstance(objects, Sequence):
        return {str(index): one for index, one in enumerate(objects)}
    return {"0": objects}


def paired(here: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was saved, under the labels of this side: a guard, a list and a dict label the same objects differently.

    One and one belong together whatever they are called; several only by their labels, or by their order where one
    side has none but their places.

    Example:
        >>> paired({"": "adam"}, {"0": "its state"}), paired({"g": 1, "d": 2}, {"0": "first", "1": "second"})
        ({'': 'its state'}, {'g': 'first', 'd': 'second'})
    """
    if set(here) == set(saved) or len(here) != len(saved):
        return saved
    places = [str(place) for place in range(len(here))]
    if len(here) == 1 or places in (list(here), list(saved)):
        return dict(zip(here, saved.values(), strict=True))
    return saved


def refuse(differences: Sequence[str]) -> None:
    """Raise a `CheckpointError` that lists every difference, if there are any."""
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        raise CheckpointError(
            f"the checkpoint does not fit; nothing was changed. {len(differences)} difference(s):\n{lines}\n"
            "Build the objects as they were when it was saved, or choose another checkpoint."
        )


def copied(value: Any, device_of: Callable[[Tensor], torch.device | None] = lambda t: None) -> Any:
    """A deep copy of plain data and tensors: what is loaded must never share memory with what it was loaded from."""
    if isinstance(value, Tensor):
        return value.detach().to(device_of(value) or value.device, copy=True)
    if isinstance(value, dict):
        whole = copy.copy(value)  # an OrderedDict or defaultdict keeps its kind
        whole.update((key, copied(one, device_of)) for key, one in value.items())
        return whole
    if type(value) in (list, tuple):
        return type(value)(copied(one, device_of) for one in value)
    return copy.deepcopy(value)
