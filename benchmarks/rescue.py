"""Whether a guard in mode act brings a run that something went wrong in to where it would have been without it.

    python benchmarks/rescue.py [--half tune|report|both] [--only SUBSTR] [--jobs 2] [--raw FILE.json] [--out FILE.md]

Each fault happens to each family in three arms with the same seed and data: clean (no fault), unguarded, guarded (mode
act, everything else at its default). What counts is the loss on held-out data at the end: the median over states of the
last 100 steps, since even a clean run under momentum SGD jumps threefold from one state to another. How
near two sound runs come is measured, too: eight clean runs of each family that differ in nothing but the order of their
data. Three measures, each 5 % and a tolerance above a clean loss:

- strict: the clean run with the same seed and the same order of data; one standard deviation of those eight.
- fair: the median of three clean runs of that seed, each in its own order, and the same tolerance. After going back
  other batches come at other steps: which of the clean runs is met is chance, and one lucky twin is no measure.
- range: as strict, but with the range in which 95 of 100 differences of two clean runs lie (1.64 x sqrt(2) deviations).

Worse than doing nothing is a guarded run that ends above the unguarded one by 5 % and that range (strictly: and one
deviation). The mechanism was made on the tune half and on seeds reported before; the others were run once.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import rescue_report
import torch
from tests.faults.base import Case, Run
from tests.faults.harness import make_run
from tests.faults.inject import REAL, alter_once, body, inputs, weight

from trimtab import Guard

STEPS = dict.fromkeys(("mlp", "cnn", "rnn", "lm", "contrastive", "segment"), 600)
ONSET = 150
LAST, EVERY = 100, 5  # of the last steps, which states are measured on held-out data
SEEDS = {"tune": (0, 1, 2), "report": (8000, 8001, 8002)}
SEEN = (0, 1, 2, 3000, 3001, 3002, 5000, 5001, 5002, 7000)  # looked at while the mechanism was made
NUM_CLEAN = 8
NUM_TWINS = 3


def rates(run: Run, factor: float) -> None:
    """Set every rate to a multiple of what it was at first."""
    first = run.extra.setdefault("rates", [g["lr"] for g in run.optimizer.param_groups])
    for group, lr in zip(run.optimizer.param_groups, first, strict=True):
        group["lr"] = lr * factor


def rate_300_for_5_steps(run: Run) -> None:
    """The rate is 300 times too high for 5 steps."""
    rates(run, 300.0 if ONSET <= run.step < ONSET + 5 else 1.0)


def inputs_1000_for_3_steps(run: Run) -> None:
    """The inputs of 3 batches are a thousand times too large (tokens are drawn at random instead)."""
    if ONSET <= run.step < ONSET + 3:
        if run.task.family in REAL:
            alter_once(run, "draw", inputs(lambda x: x * 1000))
        else:
            chance = torch.Generator().manual_seed(run.step)
            alter_once(run, "draw", lambda b: (b[0][torch.randperm(len(b[0]), generator=chance)].flip(1), *b[1:]))
            alter_once(run, "forward", lambda loss: loss * 100)


def targets_of_wrong_scale(run: Run) -> None:
    """The targets of 3 batches are of another scale, and so is the loss: a thousand times as large."""
    if ONSET <= run.step < ONSET + 3:
        alter_once(run, "forward", lambda loss: loss * 1000)


def layer_scaled_1000(run: Run) -> None:
    """A layer's weights are a thousand times too large, once."""
    if run.step == ONSET:
        with torch.no_grad():
            weight(run).mul_(1e3)


def bits_flipped(run: Run) -> None:
    """The highest bit of the exponent of 1 % of a layer's weights is flipped."""
    if run.step == ONSET:
        with torch.no_grad():
            bits = weight(run).view(torch.int32).view(-1)
            hit = torch.randperm(len(bits), generator=torch.Generator().manual_seed(0))[: max(len(bits) // 100, 1)]
            bits[hit] ^= 1 << 30


def stage_2_rate_30(run: Run) -> None:
    """A frozen part is let go, and from then on every rate is 30 times too high."""
    if run.step == 0:
        body(run).requires_grad_(False)
    if run.step >= ONSET:
        body(run).requires_grad_(True)
        rates(run, 30.0)


def stage_2_clean(run: Run) -> None:
    """What the clean arm of the fault above does: the same at the right rate."""
    if run.step in (0, ONSET):
        body(run).requires_grad_(run.step == ONSET)


def rate_grows_slowly(run: Run) -> None:
    """The rate grows by 5 % in every step, without end."""
    rates(run, min(1.05 ** max(run.step - ONSET, 0), 1e6))


FAULTS: dict[str, Callable[[Run], None]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        rate_300_for_5_steps, inputs_1000_for_3_steps, targets_of_wrong_scale, layer_scaled_1000, bits_flipped,
        stage_2_rate_30, rate_grows_slowly,
    )
}  # fmt: skip
CLEAN: dict[str, Callable[[Run], None]] = {"stage-2-rate-30": stage_2_clean}


@dataclass(frozen=True)
class Job:
    """One run."""

    family: str
    fault: str
    seed: int
    arm: str  # clean, unguarded, guarded
    order: int = 0  # which order of the data: 0 is the run's own

    @property
    def name(self) -> str:
        return f"{self.fault}__{self.family}__{self.seed}"


@dataclass(frozen=True)
class Ended:
    """How it ended."""

    loss: float
    deeds: tuple[str, ...] = ()
    error: str = ""
    story: tuple[str, ...] = field(default=(), compare=False)


class Listen:
    """Keeps what was found and done."""

    def __init__(self) -> None:
        self.deeds: list[str] = []
        self.story: list[str] = []
        self._done: set[tuple[int, str]] = set()

    def write(self, record: Any) -> None:
        kind = type(record).__name__
        if kind == "Verdict":
            self.story.append(f"step {record.step}: {', '.join(f.name for f in record.findings)}")
        elif kind == "Outcome":
            self.story.append(f"  before {record.at}: {record.action.kind} {dict(record.action.args)} {record.detail}")
            if record.applied and (record.at, record.action.kind) not in self._done:
                self._done.add((record.at, record.action.kind))
                self.deeds.append(record.action.kind)

    def close(self) -> None:
        pass


def held_out(run: Run) -> float:
    """The loss on held-out data, in evaluation mode."""
    modes = [(m, m.training) for m in run.model.modules()]
    run.model.eval()
    with torch.no_grad():
        loss = float(run.task.loss(run.model, run.task.val_batch))
    for module, mode in modes:
        module.training = mode
    return loss


def one(job: Job) -> Ended:
    """Train it."""
    torch.set_num_threads(1)
    logging.getLogger("trimtab").setLevel(logging.CRITICAL)
    fault = CLEAN.get(job.fault, lambda run: None) if job.arm == "clean" else FAULTS[job.fault]
    case = Case(job.fault, "rescue", at=fault, steps=STEPS[job.family])
    run = make_run(case, job.family, job.seed)
    if job.order:
        original = run.task.batch
        run.task.batch = lambda step, micro: original(step, micro + 7 * job.order)
    listen, last = Listen(), []
    after = run.after_update

    def also() -> None:
        after()
        if run.step >= case.steps - LAST and run.step % EVERY == 0:
            last.append(held_out(run))

    run.after_update = also  # type: ignore[method-assign]

    def attach(run: Run) -> Guard | None:
        if job.arm != "guarded":
            return None
        return Guard.attach(run.model, run.optimizer, {"mode": "act"}, run_dir=False, sinks=[listen])

    run.train(attach)
    whole = len(last) == LAST // EVERY and all(map(math.isfinite, last))
    loss = statistics.median(last) if whole else math.inf
    error = run.extra.get("error")
    told = f"{type(error).__name__}: {str(error).splitlines()[0]}" if error is not None else ""
    return Ended(loss, tuple(listen.deeds), told, tuple(listen.story))


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Every run that is needed."""
    for half in args.half:
        for family in STEPS:
            for fault in FAULTS:
                for seed in SEEDS[half]:
                    for arm in ("clean", "unguarded", "guarded"):
                        job = Job(family, fault, seed, arm)
                        if args.only in job.name:
                            yield job


def canonical(job: Job) -> Job:
    """Clean runs are the same for most faults: they are made once."""
    return replace(job, fault="clean") if job.arm == "clean" and job.fault not in CLEAN else job


def twins(job: Job) -> list[Job]:
    """The clean runs that a run is measured by: its own, and those with the data in another order."""
    own = Job(job.family, job.fault, job.seed, "clean")
    return [canonical(replace(own, order=order)) for order in range(NUM_TWINS)]


def read(raw: Path | None) -> dict[Job, Ended]:
    """The runs that were made before."""
    if raw is None or not raw.exists():
        return {}
    known = ((Job(**job), end) for job, end in json.loads(raw.read_text()))
    return {job: Ended(end["loss"], tuple(end["deeds"]), end["error"], tuple(end["story"])) for job, end in known}


def row_of(job: Job, ended: dict[Job, Ended]) -> rescue_report.Row:
    """A guarded run beside its clean and its unguarded twin."""
    cleans = [ended[twin].loss for twin in twins(job)]
    bare, mine = ended[Job(job.family, job.fault, job.seed, "unguarded")], ended[job]
    deeds = ", ".join(f"{d} x{mine.deeds.count(d)}" for d in dict.fromkeys(mine.deeds)) or "nothing"
    group = "fresh seeds" if job.seed not in SEEN else "seen seeds"
    said = f"{deeds}; {mine.error}" if mine.error else deeds
    middle = statistics.median(cleans)
    return rescue_report.Row(job.fault, job.family, job.seed, group, cleans[0], middle, bare.loss, mine.loss, said)


def main() -> int:
    """Make all runs and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("tune", "report", "both"), default="tune")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--raw", type=Path, help="runs that are in this file are not made again; new ones are added")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    args.half = ("tune", "report") if args.half == "both" else (args.half,)
    todo = list(jobs(args))
    families = sorted({job.family for job in todo})
    spread_jobs = [Job(f, "clean", SEEDS["tune"][0], "clean", order) for f in families for order in range(NUM_CLEAN)]
    ended = read(args.raw)
    needed = [*map(canonical, todo), *(twin for job in todo for twin in twins(job)), *spread_jobs]
    wanted = [j for j in dict.fromkeys(needed) if j not in ended]
    # Spawned, not forked: torch's threads do not survive a fork.
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for job, end in zip(wanted, pool.map(one, wanted, chunksize=2), strict=True):
            ended[job] = end
            if args.raw is not None and (len(ended) % 20 == 0 or job is wanted[-1]):
                args.raw.write_text(json.dumps([[asdict(job), asdict(end)] for job, end in ended.items()]))
    sound = {f: [ended[job].loss for job in spread_jobs if job.family == f] for f in families}
    rows = [row_of(job, ended) for job in todo if job.arm == "guarded"]
    command = f"python benchmarks/rescue.py --half {args.half[0] if len(args.half) == 1 else 'both'}"
    about = rescue_report.About(STEPS["mlp"], ONSET, NUM_TWINS, command, SEEN, SEEDS["report"])
    text = rescue_report.table(rows, sound, about)
    print(text)
    if args.verbose:
        for job in todo:
            if job.arm == "guarded":
                print(f"\n{job.name}: {ended[job].loss:.4g} {ended[job].error}", *ended[job].story, sep="\n    ")
    if args.out is not None:
        args.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
