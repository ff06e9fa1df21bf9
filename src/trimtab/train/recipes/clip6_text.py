"""Names as numbers: pieces of their words, hashed and weighted by how rare they are, in one space for all languages."""

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
"""Each piece of a word is written to so many places of a row, with random signs: hardly two share all of theirs."""
SHORTEST, LONGEST = 1, 3


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
    draw = torch.Generator().manual_seed(0)
    places = torch.randint(width, (NUM_HASHES, NUM_PLACES), generator=draw)
    signs = 2.0 * torch.randint(2, (NUM_HASHES, NUM_PLACES), generator=draw) - 1.0

    def summed(rows: list[list[str]]) -> Tensor:
        found = [(i, piece) for i, row in enumerate(rows) for piece in row]
        hashes = torch.tensor([zlib.crc32(piece.encode("utf-8")) % NUM_HASHES for _, piece in found])
        weights = torch.tensor([math.log(most / (seen[piece] + 1)) for _, piece in found])
        at = torch.tensor([i for i, _ in found])[:, None] * width + places[hashes]
        sums = torch.zeros(len(rows) * width)
        sums.index_add_(0, at.flatten(), (weights[:, None] * signs[hashes]).flatten())
        return functional.normalize(sums.view(len(rows), width), dim=-1) * math.sqrt(width)

    return tuple(summed(rows) for rows in split)
