"""Bad batches at random steps of random processes, for a long time: nobody hangs, and all end with the same weights.

python -m tests.distributed.soak [--steps 500] [--ranks 4] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from tests.distributed.launch import told_by


def soak(folder: Path, *, steps: int, ranks: int, seed: int) -> dict[str, Any]:
    """Both ways of training, with a bad batch in every tenth step or so; what came of it."""
    draw = random.Random(seed)
    bad = [[step, draw.randrange(ranks)] for step in range(5, steps) if draw.random() < 0.1]
    told = told_by(folder, ranks, {way: (way, {"steps": steps, "bad": bad}) for way in ("ddp", "fsdp")})
    out: dict[str, Any] = {"bad": len(bad)}
    for way, each in told.items():
        first = each[0]
        out[way] = {
            "rejected": sorted({one["rejected"] for one in each}),
            "same weights": all(one["weights"] == first["weights"] for one in each),
            "same counts": all(one["counts"] == first["counts"] for one in each),
            "same findings": all(_names(one) == _names(first) for one in each),
            "ranks named": sum(name == "nonfinite-loss" for _, name, _, _ in first["findings"]),
        }
    return out


def _names(one: dict[str, Any]) -> list[list[Any]]:
    """Step and name of each finding: only the process with the bad batch says what else it knows of it."""
    return [finding[:2] for finding in one["findings"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for key, value in soak(Path(folder), steps=args.steps, ranks=args.ranks, seed=args.seed).items():
            print(f"{key}: {value}")


if __name__ == "__main__":
    main()
