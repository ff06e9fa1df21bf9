"""Kill a rank at random points of training and of saving: torchrun starts all again, and the run ends as undisturbed.

python -m tests.distributed.kills [--count 50] [--ranks 2] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from tests.distributed.launch import torchrun

STEPS, EVERY = 12, 3
EXACT = ("weights", "moments", "buffers", "rng")


def run(folder: Path, ranks: int, settings: dict[str, Any]) -> tuple[int, list[dict[str, Any]], str]:
    """One run in a folder of its own: how many restarts it took, how each process ended, and what it logged."""
    folder.mkdir()
    jobs = {"end": ("saved", {"steps": STEPS, "every": EVERY, **settings})}
    done = torchrun(ranks, "-m", "tests.distributed.saving", str(folder), json.dumps(jobs), restarts=1)
    assert done.returncode == 0, done.stderr
    told = [json.loads((folder / f"end-{rank}.json").read_text()) for rank in range(ranks)]
    return sum(one["restarts"] for one in told) // ranks, told, done.stderr


def place(draw: random.Random, ranks: int, num_operations: int) -> dict[str, Any]:
    """Half of the time in training, half of the time while something is written."""
    kill: dict[str, Any] = {"rank": draw.randrange(ranks)}
    if draw.random() < 0.5:
        return {**kill, "step": draw.randrange(STEPS), "place": draw.randrange(4)}
    return {**kill, "operation": 1 + draw.randrange(num_operations)}


def kills(folder: Path, *, count: int, ranks: int, seed: int, way: str = "fsdp") -> list[dict[str, Any]]:
    """What came of each kill."""
    draw = random.Random(seed)
    _, undisturbed, _ = run(folder / "undisturbed", ranks, {"way": way})
    out = []
    for number in range(count):
        kill = place(draw, ranks, min(one["operations"] for one in undisturbed))
        restarts, told, _ = run(folder / str(number), ranks, {"way": way, "kill": kill})
        exact = all(mine[name] == want[name] for mine, want in zip(told, undisturbed, strict=True) for name in EXACT)
        data = all(mine["seen"] == want["seen"][mine["start"] :] for mine, want in zip(told, undisturbed, strict=True))
        same = len({one["from"] for one in told}) == 1
        sound = _usable(told[0]) == _usable(undisturbed[0])
        out.append({"kill": kill, "restarts": restarts, "from": told[0]["from"], "exact": exact and data and same})
        out[-1]["sound"] = sound
    return out


def _usable(told: dict[str, Any]) -> list[list[Any]]:
    """Steps and states of what can be resumed from; what was saved just before a rank died may be condemned."""
    return [entry[:2] for entry in told["listed"] if entry[1] != "bad"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", default="fsdp", choices=["fsdp", "ddp"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = kills(Path(folder), count=args.count, ranks=args.ranks, seed=args.seed, way=args.way)
    for one in told:
        print(one, flush=True)
    killed, exact = sum(one["restarts"] for one in told), sum(one["exact"] and one["sound"] for one in told)
    print(f"{len(told)} runs, {killed} killed and started again, {exact} ended exactly as the undisturbed one")


if __name__ == "__main__":
    main()
