"""How well encodings of the same things find each other: every modality by every other, and by all others together.

`MetricsFile` writes one JSON object a line, as an experiment logger would get it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.core.errors import InputError

NUM_FEW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieval:
    """Shares of `num` samples that were found first (`r1`), or among the first five (`r5`).

    `left_out_r1[m]` is how often modality m of a sample is found with all its other modalities; `pairs_r1[p][q]` how
    often modality q is found with modality p alone. By chance it is `1 / num`.
    """

    names: tuple[str, ...]
    num: int
    left_out_r1: tuple[float, ...]
    left_out_r5: tuple[float, ...]
    pairs_r1: tuple[tuple[float, ...], ...]
    pairs_r5: tuple[tuple[float, ...], ...]

    def metrics(self) -> dict[str, float]:
        """The means over modalities, and over ordered pairs, with or without the first modality in them."""
        others = range(1, len(self.names))
        found = {"r1": _mean(self.left_out_r1), "r5": _mean(self.left_out_r5)}
        pairs = list(itertools.permutations(range(len(self.names)), 2))
        found["pairs_r1"] = _mean([self.pairs_r1[p][q] for p, q in pairs])
        found["pairs_r5"] = _mean([self.pairs_r5[p][q] for p, q in pairs])
        first = self.names[0]
        found[f"{first}_r1"], found[f"{first}_r5"] = self.left_out_r1[0], self.left_out_r5[0]
        found["others_r1"] = _mean([self.left_out_r1[m] for m in others])
        return found

    def __str__(self) -> str:
        return "".join(f"\n    {line}" for line in self.table())

    def table(self) -> list[str]:
        """The lines of a table: the query in rows, what is looked for in columns, R@1 / R@5 in per cent.

        Example:
            >>> same = torch.eye(8)
            >>> print(*retrieval([same, same], ("a", "b")).table(), sep="\\n")
            R@1 / R@5 in % of 8; by chance 12.5 / 62.5
            given           a          b
            a               ·  100 / 100
            b       100 / 100          ·
            others  100 / 100  100 / 100
        """
        widest = max(len("others"), *(len(name) for name in self.names))
        chance = " / ".join(f"{100 * min(k / self.num, 1.0):.1f}" for k in (1, NUM_FEW))
        lines = [f"R@1 / R@5 in % of {self.num}; by chance {chance}"]
        lines.append(" ".join([f"{'given':<{widest}}", *(f"{name:>10}" for name in self.names)]))
        for p, name in enumerate(self.names):
            row = [
                _cell(r1, r5) if p != q else "·"
                for q, (r1, r5) in enumerate(zip(self.pairs_r1[p], self.pairs_r5[p], strict=True))
            ]
            lines.append(" ".join([f"{name:<{widest}}", *(f"{cell:>10}" for cell in row)]))
        alone = [_cell(r1, r5) for r1, r5 in zip(self.left_out_r1, self.left_out_r5, strict=True)]
        return [*lines, " ".join([f"{'others':<{widest}}", *(f"{cell:>10}" for cell in alone)])]


@torch.no_grad()
def retrieval(
    encodings: Sequence[Tensor], names: Sequence[str], *, product: bool = False, present: Tensor | None = None
) -> Retrieval:
    """Look for every modality `[n, d]` of every sample, among all samples.

    `present` `[n, N]` says which samples have which modality: what is missing is neither asked nor looked for.

    A query of several modalities is the sum of their unit vectors, which is what the length of the sum, the cosines and
    the distances compare with; `product` multiplies them instead, as a loss of products does.
    """
    units = [functional.normalize(one.double(), dim=-1) for one in encodings]
    num = len(units)
    there = torch.ones(len(units[0]), num, dtype=torch.bool) if present is None else present.cpu()
    left_out = []
    for m, view in enumerate(units):
        others = torch.stack(units[:m] + units[m + 1 :])
        also = torch.stack([there[:, p] for p in range(num) if p != m])
        # Encodings of what is missing are zero, which a product of the others must not see.
        query = others.masked_fill(~also[..., None].to(others.device), 1.0).prod(0) if product else others.sum(0)
        both = there[:, m] & also.any(0)
        left_out.append(ranks(query[both], view[both]))
    pairs = [
        [ranks(units[p][both], units[q][both]) for q in range(num) if (both := there[:, p] & there[:, q]) is not None]
        for p in range(num)
    ]
    return Retrieval(
        names=tuple(names),
        num=len(units[0]),
        left_out_r1=tuple(_within(rank, 1) for rank in left_out),
        left_out_r5=tuple(_within(rank, NUM_FEW) for rank in left_out),
        pairs_r1=tuple(tuple(_within(rank, 1) for rank in row) for row in pairs),
        pairs_r5=tuple(tuple(_within(rank, NUM_FEW) for rank in row) for row in pairs),
    )


def ranks(queries: Tensor, views: Tensor) -> Tensor:
    """How many others come before the right one, for each query; who is as near as the right one comes before it.

    So a model that answers everything alike finds nothing, and neither does one of NaN.

    Example:
        >>> ranks(torch.eye(3), torch.eye(3)), ranks(torch.ones(3, 1), torch.ones(3, 1))
        (tensor([0, 0, 0]), tensor([2, 2, 2]))
    """
    scores = queries @ views.T
    return (~(scores < scores.diagonal()[:, None])).sum(1) - 1


def _within(rank: Tensor, few: int) -> float:
    return float((rank < few).double().mean()) if len(rank) else 0.0  # no two samples have both


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _cell(r1: float, r5: float) -> str:
    return f"{100 * r1:.0f} / {100 * r5:.0f}"


class MetricsFile:
    """Has the `.log(values, step=)` that a guard sends its numbers to: `loss`, `lr`, `grad/*`, `val/*` by step.

    What JSON has not (NaN, Inf) is null.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "metrics.jsonl"
        ...     MetricsFile(path).log({"grad/global_norm": 0.5, "loss": math.nan}, step=3)
        ...     path.read_text()
        '{"step": 3, "grad/global_norm": 0.5, "loss": null}\\n'
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("", encoding="utf-8")
        except OSError as error:
            raise InputError(f"the metrics file {path} cannot be written: {error}; give another path") from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append one line, under the names of the document: the file is nobody else's, and needs no prefix."""
        named = ((name.removeprefix("trimtab/"), value) for name, value in values.items())
        plain = {name: value if math.isfinite(value) else None for name, value in named}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **plain}) + "\n")
