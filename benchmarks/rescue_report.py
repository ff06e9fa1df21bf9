"""The page that benchmarks/rescue.py writes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch

from trimtab import __version__

WITHIN = 0.05
RANGE = 1.64 * math.sqrt(2.0)


@dataclass(frozen=True)
class Row:
    """One fault in one family with one seed: where the three arms ended."""

    fault: str
    family: str
    seed: int
    group: str
    clean: float
    unguarded: float
    guarded: float
    deeds: str


def near(loss: float, other: float, tolerance: float) -> bool:
    """Whether a loss is no more than 5 % and a tolerance above another."""
    return loss <= other * (1 + WITHIN) + tolerance


def table(
    rows: Sequence[Row], sound: Mapping[str, Sequence[float]], *, steps: int, onset: int, kept_out: tuple[str, str]
) -> str:
    """All runs, how many were rescued, and how near sound runs come to each other."""
    spread = {family: statistics.stdev(losses) for family, losses in sound.items()}
    keys = [
        *dict.fromkeys(row.group for row in rows), "all",
        *dict.fromkeys(f"fault {row.fault}" for row in rows), *dict.fromkeys(f"family {row.family}" for row in rows),
    ]  # fmt: skip
    out = [
        "# Rescue: runs in which something goes wrong, with and without a guard in mode act",
        "",
        f"trimtab {__version__}, torch {torch.__version__}, CPU, {steps} steps, fault at step {onset}. Made by "
        "`python benchmarks/rescue.py`; what is measured, and the two tolerances, are said there.",
        "",
        "| runs | number | unguarded rescued (strict / range) | guarded rescued, strict | guarded rescued, range | "
        "worse than unguarded (strict / range) |",
        "|---|---|---|---|---|---|",
    ]
    for key in keys:
        mine = [r for r in rows if key in ("all", r.group, f"fault {r.fault}", f"family {r.family}")]
        alone, ok, bad = (
            [sum(test(r, times * spread[r.family]) for r in mine) for times in (1.0, RANGE)]
            for test in (
                lambda r, t: near(r.unguarded, r.clean, t),
                lambda r, t: near(r.guarded, r.clean, t),
                lambda r, t: not near(r.guarded, r.unguarded, t),
            )
        )
        shares = " | ".join(f"{n} ({n / len(mine):.1%})" for n in ok)
        out.append(f"| {key} | {len(mine)} | {alone[0]} / {alone[1]} | {shares} | {bad[0]} / {bad[1]} |")
    out += ["", "| family | clean runs, other order of data | deviation | pairs of them within, strict | range |"]
    out += ["|---|---|---|---|---|"]
    for family, losses in sound.items():
        pairs = list(permutations(losses, 2))
        shares = [sum(near(a, b, t * spread[family]) for a, b in pairs) / len(pairs) for t in (1.0, RANGE)]
        values = f"{min(losses):.4f} to {max(losses):.4f}"
        out.append(f"| {family} | {values} | {spread[family]:.4f} | {shares[0]:.0%} | {shares[1]:.0%} |")
    out += [
        "",
        f"Kept out while the mechanism was made: the family {kept_out[0]} and the fault {kept_out[1]}.",
        "",
        "| fault | family | seed | clean | unguarded | guarded | guarded / clean | rescued | what was done |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        strict, ranged = near(r.guarded, r.clean, spread[r.family]), near(r.guarded, r.clean, RANGE * spread[r.family])
        told = "yes" if strict else "range only" if ranged else "**no**"
        out.append(
            f"| {r.fault} | {r.family} | {r.seed} | {r.clean:.4f} | {r.unguarded:.4g} | {r.guarded:.4f} | "
            f"{r.guarded / r.clean:.3f} | {told} | {r.deeds} |"
        )
    return "\n".join([*out, ""])
