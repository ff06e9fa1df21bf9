"""Do the suggestions of `trimtab tune` help, against a fixed setting and against a random choice?

    OMP_NUM_THREADS=1 python benchmarks/aids.py --out benchmarks/results/aids_cpu2_DATE.md
    OMP_NUM_THREADS=1 python benchmarks/aids.py --parts lr --tasks looked-at --seeds 100,101     (while an aid is made)
    python benchmarks/aids.py --read RAW... --out FILE                                           (several runs as one)

Ten small trainings (`aids_tasks.py`), five seeds. For each the validation loss at the end is compared between the
suggested setting, fixed ones, random ones (log-uniform), and the best of a grid, which is the reference and no
contender. Tasks marked "held out" were not looked at while the aids were made. A run fails when it ends no better than
it began. All arms of a seed share weights, batches and faults; they take turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aids_tasks import TASKS, build

import trimtab
from trimtab.doctor.target import compute_loss, endless, validation_loss
from trimtab.record.reader import read_run
from trimtab.report.suggest import suggest_clip, suggest_warmup
from trimtab.train.lr_range import find_lr

NUM = 150
OUTLIERS, LR_SPIKE = (50, 51, 90), range(120, 123)
RATES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0)
CLIPS = (1.0, 10.0)
WARMUPS = (0, 15, 50)
BRAVE = 8.0
TITLES = {
    "lr": "Learning rate",
    "clean": "Clip threshold, nothing goes wrong",
    "spikes": f"Clip threshold, outlier batches at steps {OUTLIERS} and 10x rate at {LR_SPIKE[0]} to {LR_SPIKE[-1]}",
    "calm": "Warm-up, at the tuned rate",
    "brave": f"Warm-up, at {BRAVE:g} times the tuned rate",
}


LEGEND = """\
Each number is the geometric mean, over seeds, of the validation loss at the end over that of the best setting of a grid
(1.00: as good as the best; below: better than any of the grid); a failed run, one that ends no better than it began,
counts as one that learned nothing. In parentheses the mean rank among the arms, and how many runs failed. Looked at:
tasks that were used while the aids were made. Held out: tasks that were not.
1e-3 is also PyTorch's default rate of SGD, Adam and AdamW.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one run is trained."""

    lr: float
    clip: float | None = None
    warmup: int = 0
    spikes: bool = False


def train(name: str, seed: int, how: Setting, record: Path | None = None) -> float:
    """The validation loss at the end; infinite where the training broke. Perhaps recorded, without being changed."""
    target = build(name, seed, how.lr)
    guard = None
    if record is not None:
        guard = trimtab.Guard(target.model, target.optimizer, mode="observe", run_dir=record)
    batches = endless(target)
    for step in range(NUM):
        factor = min(1.0, (step + 1) / (how.warmup + 1)) * (10.0 if how.spikes and step in LR_SPIKE else 1.0)
        for group in target.optimizer.param_groups:
            group["lr"] = how.lr * factor
        x, y = next(batches)
        outlier = how.spikes and step in OUTLIERS
        loss = compute_loss(target, (x, y[torch.randperm(len(y))] if outlier else y))
        loss = loss * 100.0 if outlier else loss
        if not math.isfinite(float(loss.detach())):
            break
        target.optimizer.zero_grad()
        loss.backward()
        if how.clip is not None:
            torch.nn.utils.clip_grad_norm_(target.model.parameters(), how.clip)
        if guard is not None:
            guard.step(loss)
        else:
            target.optimizer.step()
    if guard is not None:
        guard.close()
    value = validation_loss(target)
    return value if math.isfinite(value) else math.inf


@dataclass(slots=True)
class Score:
    """Results of one comparison: task -> seed -> arm -> losses; and of the grid."""

    title: str
    start: dict[tuple[str, int], float] = field(default_factory=dict)
    arms: dict[tuple[str, int], dict[str, list[float]]] = field(default_factory=dict)
    grid: dict[tuple[str, int], float] = field(default_factory=dict)
    chosen: dict[tuple[str, int], str] = field(default_factory=dict)

    def names(self) -> list[str]:
        return list(next(iter(self.arms.values())))

    def ratios(self, arm: str, tasks: Iterable[str]) -> list[float]:
        """End loss over the best of the grid; a failed run counts as one that learned nothing."""
        out = []
        for (task, seed), found in self.arms.items():
            if task in tasks:
                start = self.start[task, seed]
                best = min(self.grid[task, seed], start)
                out += [min(loss, start) / best for loss in found[arm]]
        return out

    def failed(self, arm: str, tasks: Iterable[str]) -> list[bool]:
        some = [(key, found[arm]) for key, found in self.arms.items() if key[0] in tasks]
        return [not loss < self.start[key] for key, losses in some for loss in losses]

    def rank(self, arm: str, tasks: Iterable[str]) -> float:
        """The mean place among the arms; equal losses share it. Of several random choices each is ranked."""
        places = []
        for (task, _), found in self.arms.items():
            if task not in tasks:
                continue
            others = [np.array(found[o]) for o in found if o != arm]
            for loss in found[arm]:
                below = sum(float(np.mean(o < loss) + 0.5 * np.mean(o == loss)) for o in others)
                places.append(1.0 + below)
        return float(np.mean(places))

    def table(self) -> str:
        """Markdown: one row per task and three for all of them."""
        looked = [t for t in self.tasks() if TASKS[t][3]]
        held = [t for t in self.tasks() if not TASKS[t][3]]
        rows = [(f"{t}{'' if TASKS[t][3] else ' (held out)'}", [t]) for t in self.tasks()]
        rows += [(label, some) for label, some in (("**looked at**", looked), ("**held out**", held)) if some]
        rows.append(("**all**", [*looked, *held]))
        arms = self.names()
        lines = [
            f"### {self.title}",
            "",
            "| task | " + " | ".join(arms) + " | values suggested |",
            "|---|" + "---|" * (len(arms) + 1),
        ]
        for label, tasks in rows:
            cells = []
            for arm in arms:
                bad = self.failed(arm, tasks)
                lost = f", {sum(bad)}/{len(bad)} failed" if any(bad) else ""
                ratio = float(np.exp(np.mean(np.log(self.ratios(arm, tasks)))))
                cells.append(f"{ratio:.2f} (rank {self.rank(arm, tasks):.1f}{lost})")
            chosen = ", ".join(self.chosen[k] for k in self.arms if k[0] in tasks) if len(tasks) == 1 else ""
            lines.append(f"| {label} | " + " | ".join(cells) + f" | {chosen} |")
        num = sum(len(v) for found in self.arms.values() for v in found.values())
        return "\n".join([*lines, "", f"{num} runs, beside those of the grid and the pilots.", ""])

    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for task, _ in self.arms))


def untrained(name: str, seed: int) -> float:
    return validation_loss(build(name, seed, 1e-3))


Row = tuple[float, str, dict[str, list[float]]]  # the best of the grid, what was suggested, the losses of each arm


def compare_lr(name: str, seed: int, tuned: float | None) -> Row:
    draw = np.random.default_rng(seed)
    grid = {rate: train(name, seed, Setting(lr=rate)) for rate in RATES}
    arms = {
        "tuned": [train(name, seed, Setting(lr=tuned or 1e-3))],
        "fixed 1e-3": [grid[1e-3]],
        "fixed 0.1": [grid[1e-1]],
        "random": [train(name, seed, Setting(lr=float(10 ** draw.uniform(-5, 0)))) for _ in range(2)],
    }
    return min(grid.values()), f"{tuned:.2g}" if tuned else "none", arms


def compare_clip(name: str, seed: int, lr: float, spikes: bool) -> Row:
    draw = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        plain = train(name, seed, Setting(lr=lr, spikes=spikes), Path(folder) / "pilot")
        (advice,) = suggest_clip(read_run(Path(folder) / "pilot"))
    grid = {c: train(name, seed, Setting(lr=lr, clip=c, spikes=spikes)) for c in CLIPS}
    arms = {
        "suggested": [train(name, seed, Setting(lr=lr, clip=advice.threshold, spikes=spikes))],
        "none": [plain],
        "fixed 1.0": [grid[1.0]],
        "random": [train(name, seed, Setting(lr=lr, clip=float(10 ** draw.uniform(-2, 2)), spikes=spikes))],
    }
    return min(plain, *grid.values()), "none" if advice.threshold is None else f"{advice.threshold:.2g}", arms


def compare_warmup(name: str, seed: int, lr: float) -> Row:
    draw = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        grid = {0: train(name, seed, Setting(lr=lr), Path(folder) / "pilot")}
        (advice,) = suggest_warmup(read_run(Path(folder) / "pilot"))
    grid |= {w: train(name, seed, Setting(lr=lr, warmup=w)) for w in WARMUPS[1:]}
    num = advice.num_steps or 0
    arms = {
        "suggested": [grid[num] if num in grid else train(name, seed, Setting(lr=lr, warmup=num))],
        "fixed 0": [grid[0]],
        "fixed 50": [grid[50]],
        "random": [train(name, seed, Setting(lr=lr, warmup=round(NUM ** draw.uniform(0, 1))))],
    }
    return min(grid.values()), str(num) if advice.num_steps is not None else "?", arms


def compare(name: str, seed: int, parts: Iterable[str]) -> Iterator[tuple[str, Row]]:
    """Every part for one task and seed; the rate that is tuned first is the one of the other parts."""
    tuned = find_lr(build(name, seed, 1e-3)).suggested
    lr = tuned or 1e-3
    bodies: dict[str, Callable[[], Row]] = {
        "lr": lambda: compare_lr(name, seed, tuned),
        "clean": lambda: compare_clip(name, seed, lr, spikes=False),
        "spikes": lambda: compare_clip(name, seed, lr, spikes=True),
        "calm": lambda: compare_warmup(name, seed, lr),
        "brave": lambda: compare_warmup(name, seed, BRAVE * lr),
    }
    for part in parts:
        yield part, bodies[part]()


def main() -> None:
    """Make the runs asked for, or read their results, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(TITLES))
    parser.add_argument("--tasks", choices=["looked-at", "all"], default="all")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--raw", type=Path, help="one line per comparison, added as soon as it is done")
    parser.add_argument("--read", type=Path, nargs="*", help="train nothing: the lines of earlier runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("trimtab").setLevel(logging.ERROR)
    scores = {part: Score(title) for part, title in TITLES.items()}
    for line in (line for path in args.read or () for line in path.read_text().splitlines()):
        take(scores, json.loads(line))
    seeds = [] if args.read else [int(s) for s in args.seeds.split(",")]
    for seed in seeds:
        for name in (name for name, task in TASKS.items() if task[3] or args.tasks == "all"):
            for part, (grid, chosen, arms) in compare(name, seed, args.parts.split(",")):
                row = {"part": part, "task": name, "seed": seed, "start": untrained(name, seed)}
                row |= {"grid": grid, "chosen": chosen, "arms": arms}
                take(scores, row)
                if args.raw is not None:
                    with args.raw.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            print(f"{time.process_time():6.0f} s of CPU time  seed {seed}  {name}", file=sys.stderr)
    text = document(scores)
    print(text)
    if args.out is not None:
        args.out.write_text(text)


def take(scores: dict[str, Score], row: dict[str, Any]) -> None:
    """One comparison into the score of its part."""
    score, key = scores[row["part"]], (row["task"], row["seed"])
    score.start[key], score.grid[key] = row["start"], row["grid"]
    score.chosen[key], score.arms[key] = row["chosen"], row["arms"]


def document(scores: dict[str, Score]) -> str:
    """The results as a page."""
    where = f"torch {torch.__version__}, trimtab {trimtab.__version__}, Python {platform.python_version()}, one thread"
    tables = "\n".join(score.table() for score in scores.values() if score.arms)
    return f"# The aids of `trimtab tune`\n\nCommand: `python {' '.join(sys.argv)}`; {where}.\n\n{LEGEND}\n{tables}"


if __name__ == "__main__":
    main()
