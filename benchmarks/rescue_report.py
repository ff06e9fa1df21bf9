"""The page that benchmarks/rescue.py writes."""

from __future__ import annotations

import math
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

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
    middle: float  # of several clean runs
    unguarded: float
    guarded: float
    deeds: str


def near(loss: float, other: float, tolerance: float) -> bool:
    """Whether a loss is no more than 5 % and a tolerance above another."""
    return loss <= other * (1 + WITHIN) + tolerance


@dataclass(frozen=True)
class About:
    """How the runs were made."""

    steps: int
    onset: int
    num_twins: int
    command: str
    seen: Sequence[int]
    fresh: Sequence[int]


def commit() -> str:
    """Which state of the sources this is."""
    git = ("git", "-C", str(Path(__file__).parent))
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    changed = subprocess.run([*git, "status", "--short", "src"], capture_output=True, text=True, check=False).stdout
    return head.strip() + (" with changes" if changed.strip() else "")


def worse(row: Row, spread: float) -> str:
    """Whether a guarded run ended above its unguarded twin."""
    if near(row.guarded, row.unguarded, spread):
        return "no"
    return "within seed spread" if near(row.guarded, row.unguarded, RANGE * spread) else "**yes**"


def table(rows: Sequence[Row], sound: Mapping[str, Sequence[float]], about: About) -> str:
    """All runs, how many were rescued, and how near sound runs come to each other."""
    spread = {family: statistics.stdev(losses) for family, losses in sound.items()}
    keys = [
        *dict.fromkeys(row.group for row in rows), "all",
        *dict.fromkeys(f"fault {row.fault}" for row in rows), *dict.fromkeys(f"family {row.family}" for row in rows),
    ]  # fmt: skip
    out = [
        "# Rescue: runs in which something goes wrong, with and without a guard in mode act",
        "",
        f"trimtab {__version__} at {commit()}, torch {torch.__version__}, Python {platform.python_version()}, CPU, "
        f"{about.steps} steps, fault at step {about.onset}. Made by `{about.command}`; what is measured, and the "
        "tolerances, are said there.",
        "",
        f"Seeds looked at while the mechanism was made: {', '.join(map(str, about.seen))}. Seeds of this report, run "
        f"once: {', '.join(map(str, about.fresh))}.",
        "",
        "| runs | number | unguarded rescued, strict | guarded rescued, strict | fair | range | "
        "worse than doing nothing: strictly | beyond seed spread |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key in keys:
        mine = [r for r in rows if key in ("all", r.group, f"fault {r.fault}", f"family {r.family}")]
        alone = sum(near(r.unguarded, r.clean, spread[r.family]) for r in mine)
        ok = (
            sum(near(r.guarded, r.clean, spread[r.family]) for r in mine),
            sum(near(r.guarded, r.middle, spread[r.family]) for r in mine),
            sum(near(r.guarded, r.clean, RANGE * spread[r.family]) for r in mine),
        )
        told = [worse(r, spread[r.family]) for r in mine]
        shares = " | ".join(f"{n} ({n / len(mine):.1%})" for n in ok)
        bad = f"{sum(t != 'no' for t in told)} | {told.count('**yes**')}"
        out.append(f"| {key} | {len(mine)} | {alone} ({alone / len(mine):.1%}) | {shares} | {bad} |")
    out += ["", "| family | clean runs, other order of data | deviation | pairs of them within, strict | range |"]
    out += ["|---|---|---|---|---|"]
    for family, losses in sound.items():
        pairs = list(permutations(losses, 2))
        shares = " | ".join(
            f"{sum(near(a, b, t * spread[family]) for a, b in pairs) / len(pairs):.0%}" for t in (1.0, RANGE)
        )
        out.append(f"| {family} | {min(losses):.4f} to {max(losses):.4f} | {spread[family]:.4f} | {shares} |")
    out += [
        "",
        f"Rescued: yes in every measure, or in which. The middle is the median of {about.num_twins} clean runs.",
        "",
        "| fault | family | seed | clean | middle | unguarded | guarded | guarded / clean | rescued | "
        "worse than doing nothing | what was done |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        width = spread[r.family]
        measures = {
            "strict": near(r.guarded, r.clean, width),
            "fair": near(r.guarded, r.middle, width),
            "range": near(r.guarded, r.clean, RANGE * width),
        }
        passed = [name for name, good in measures.items() if good]
        told = "yes" if len(passed) == len(measures) else ", ".join(passed) or "**no**"
        out.append(
            f"| {r.fault} | {r.family} | {r.seed} | {r.clean:.4f} | {r.middle:.4f} | {r.unguarded:.4g} | "
            f"{r.guarded:.4f} | {r.guarded / r.clean:.3f} | {told} | {worse(r, width)} | {r.deeds} |"
        )
    return "\n".join([*out, ""])
