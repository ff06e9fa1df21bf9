"""The text of a language model: read, cut into tokens, and laid out in windows with their targets one place on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trimtab.core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What the text is made of: characters, or words and what is between them."""

    known: Mapping[str, int]
    words: bool

    def encode(self, text: str) -> list[int]:
        """The number of each token; one that is not known counts as the most frequent."""
        return [self.known.get(part, 0) for part in (_words(text) if self.words else text)]

    def decode(self, numbers: list[int]) -> str:
        """The text of these tokens."""
        parts = list(self.known)
        return "".join(parts[number] for number in numbers)


def read_text(path: str | None) -> str:
    """The file, or Python's own reference without one; InputError if there is nothing to read."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"the text {path} cannot be read: {error}; give the path of a text file") from None
    if not text.strip():
        raise InputError(f"the text {path} is empty; give a file with something to learn")
    return text


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def tokens_of(text: str, *, words: bool = False, most: int = 0) -> Tokens:
    """The tokens of a text, the most frequent first; `most` limits their number, 0: all.

    Example:
        >>> tokens = tokens_of("to be or not to be", words=True)
        >>> tokens.decode(tokens.encode("to be"))
        'to be'
    """
    counted = Counter(_words(text) if words else text).most_common(most or None)
    return Tokens(known={part: number for number, (part, _) in enumerate(counted)}, words=words)


def windows(numbers: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Rows of `seq` tokens one after another, and the same one token later."""
    num = (len(numbers) - 1) // seq
    return numbers[: num * seq].reshape(num, seq), numbers[1 : num * seq + 1].reshape(num, seq)


def apart(rows: Tensor, first: int, num: int) -> list[int]:
    """Up to `num` rows from `first` on, evenly spread, that do not occur before it: seen text would measure nothing.

    If all of them occur before, as in a text that repeats itself, they are used all the same.

    Example:
        >>> import torch
        >>> apart(torch.tensor([[1, 2], [3, 4], [2, 3], [5, 6], [1, 5]]), 2, 2)
        [3, 4]
    """
    seen = "".join(map(chr, rows[:first].flatten().tolist()))
    held = range(first, len(rows))
    fresh = [row for row in held if "".join(map(chr, rows[row].tolist())) not in seen] or list(held)
    return [fresh[place * len(fresh) // min(num, len(fresh))] for place in range(min(num, len(fresh)))]
