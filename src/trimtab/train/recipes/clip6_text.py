"""Names as numbers: pieces of their words, hashed and weighted by how rare they are, in one space for all languages."""

from __future__ import annotations

import math
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

WIDTH = 1024
NUM_BUCKETS = 1 << 14
SHORTEST, LONGEST = 1, 4


def pieces(name: str) -> list[str]:
    """Each word with its bounds, and all its runs of 1 to 4 letters; accents and case do not count.

    Related languages share them: `radioactive` and `radiactivo` have most of their pieces in common.

    Example:
        >>> pieces("Épi")
        ['<epi>', '<', 'e', 'p', 'i', '>', '<e', 'ep', 'pi', 'i>', '<ep', 'epi', 'pi>', '<epi', 'epi>']
    """
    letters = unicodedata.normalize("NFKD", name.lower().replace("ß", "ss"))
    words = "".join(c for c in letters if not unicodedata.combining(c)).replace("-", " ").split()
    found: dict[str, None] = {}
    for word in (f"<{word}>" for word in words):
        found[word] = None
        for size in range(SHORTEST, LONGEST + 1):
            found |= dict.fromkeys(word[i : i + size] for i in range(len(word) - size + 1))
    return list(found)


def name_features(languages: Sequence[Sequence[str]], learn: Sequence[bool]) -> tuple[Tensor, ...]:
    """The names of each language as rows of root mean square 1, `[n, WIDTH]`; a name without a letter is a row of zeros.

    A row is the sum of one fixed random vector per piece, times the logarithm of how rare the piece is in the names to
    `learn` from: nothing of the others is looked at.
    """
    split = [[pieces(name) for name in names] for names in languages]
    seen: Counter[str] = Counter()
    for rows in split:
        for row, known in zip(rows, learn, strict=True):
            seen.update(row if known else ())
    most = sum(learn) * len(languages) + 1
    table = torch.randn(NUM_BUCKETS, WIDTH, generator=torch.Generator().manual_seed(0))
    return tuple(_summed(rows, table, seen, most) for rows in split)


def _summed(rows: Sequence[Iterable[str]], table: Tensor, seen: Counter[str], most: int) -> Tensor:
    buckets, weights, begins = [], [], []
    for row in rows:
        begins.append(len(buckets))
        for piece in row:
            buckets.append(zlib.crc32(piece.encode("utf-8")) % NUM_BUCKETS)
            weights.append(math.log(most / (seen[piece] + 1)))
    sums = functional.embedding_bag(
        torch.tensor(buckets), table, torch.tensor(begins), mode="sum", per_sample_weights=torch.tensor(weights)
    )
    return functional.normalize(sums, dim=-1) * math.sqrt(WIDTH)
