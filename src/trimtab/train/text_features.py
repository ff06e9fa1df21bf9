"""Texts as numbers: pieces of their words, hashed and weighted by how rare they are, in one space for all languages."""

from __future__ import annotations

import math
import unicodedata
import zlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

NUM_HASHES = 1 << 16
NUM_PLACES = 8
"""Each piece of a word is added at this many places of a row, with random signs: few share all of theirs."""
SHORTEST, LONGEST = 1, 3
_CPU = torch.device("cpu")


def pieces(name: str) -> list[str]:
    """Each word with its bounds, and all its runs of 1 to 3 letters; accents and case do not count.

    Related languages share them: `radioactive` and `radiactivo` have most of their pieces in common.

    Example:
        >>> pieces("Épi")
        ['<epi>', '<', 'e', 'p', 'i', '>', '<e', 'ep', 'pi', 'i>', '<ep', 'epi', 'pi>']
    """
    letters = unicodedata.normalize("NFKD", name.lower().replace("ß", "ss"))
    words = "".join(c for c in letters if not unicodedata.combining(c)).replace("-", " ").split()
    found: dict[str, None] = {}
    for word in (f"<{word}>" for word in words):
        found[word] = None
        for size in range(SHORTEST, LONGEST + 1):
            found |= dict.fromkeys(word[i : i + size] for i in range(len(word) - size + 1))
    return list(found)


def hash_of(piece: str) -> int:
    """The number of a piece, from 0 to `NUM_HASHES`.

    Example:
        >>> hash_of("<epi>")
        190
    """
    return zlib.crc32(piece.encode("utf-8")) % NUM_HASHES


class PieceSums:
    """Rows `[n, width]` of root mean square 1: the sum of one fixed random vector per piece, times its weight.

    Example:
        >>> sums = PieceSums(512)
        >>> rows = sums.rows([[hash_of(p) for p in pieces(text)] for text in ("radioactive", "radiactivo", "ancla")])
        >>> (rows[0] @ rows.T).argsort(descending=True).tolist()
        [0, 1, 2]
    """

    def __init__(self, width: int) -> None:
        self.width = width
        draw = torch.Generator().manual_seed(0)
        self._places = torch.randint(width, (NUM_HASHES, NUM_PLACES), generator=draw, device=_CPU)
        signs = torch.randint(2, (NUM_HASHES, NUM_PLACES), generator=draw, device=_CPU)
        self._signs = 2.0 * signs - 1.0

    def rows(self, hashes: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None) -> Tensor:
        """One row for each list of hashes; that of an empty list is zero."""
        at = [i for i, row in enumerate(hashes) for _ in row]
        found = torch.tensor([one for row in hashes for one in row], dtype=torch.long, device=_CPU)
        factors = self._signs[found]
        if weights is not None:
            each = [one for row in weights for one in row]
            factors = torch.tensor(each, dtype=torch.float32, device=_CPU)[:, None] * factors
        where = torch.tensor(at, dtype=torch.long, device=_CPU)[:, None] * self.width + self._places[found]
        sums = torch.zeros(len(hashes) * self.width, dtype=torch.float32, device=_CPU)
        sums.index_add_(0, where.flatten(), factors.flatten())
        return functional.normalize(sums.view(len(hashes), self.width), dim=-1) * math.sqrt(self.width)


def name_features(languages: Sequence[Sequence[str]], learn: Sequence[bool], width: int) -> tuple[Tensor, ...]:
    """The names of each language as rows of root mean square 1, `[n, width]`; an empty name is a row of zeros.

    A row is the sum of one fixed random vector per piece, times the logarithm of how rare the piece is in the names to
    `learn` from: nothing of the others is looked at.

    Example:
        >>> names = [["radioactive", "apple", ""], ["radiactivo", "manzana", "ancla"]]
        >>> english, spanish = name_features(names, [True, True, True], 512)
        >>> (english[0] @ spanish.T).argmax().item(), english[2].norm().item()
        (0, 0.0)
    """
    split = [[pieces(name) for name in names] for names in languages]
    seen: Counter[str] = Counter()
    for rows in split:
        for row, known in zip(rows, learn, strict=True):
            seen.update(row if known else ())
    most = sum(learn) * len(languages) + 1
    sums = PieceSums(width)
    return tuple(
        sums.rows(
            [[hash_of(piece) for piece in row] for row in rows],
            [[math.log(most / (seen[piece] + 1)) for piece in row] for row in rows],
        )
        for rows in split
    )
