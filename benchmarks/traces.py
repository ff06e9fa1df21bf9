"""Recorded traces of small trainings: rate faults, label faults, spikes, slow growth, and healthy ones beside them.

    python benchmarks/traces.py record [--only TEXT] [--jobs 1]
    python benchmarks/traces.py score [--half tuned|held-out] [--misses] [--jobs 1]
    python benchmarks/traces.py page --out benchmarks/results/traces_cpu_2026-11-16.md

`record` trains everything once under a guard with default settings (mode observe, told the loss) and keeps the records.
`score` makes the verdicts again from the records. A fault is harmful if the loss on held-out data, without the fault,
ends worse than with every healthy seed, and worse than their mean by 3 standard deviations and 5 %. Rules are made on
the tuned half of the trainings; `--misses` lists only what belongs to it.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import detection_report as text
from detection_score import META, OURS, Judged, Meta, Share, judge_all, latency, score
from tests.faults.base import Case, Run
from traces_cases import FAULTS, GROWTH, HEALTHY, HELD_OUT, PLAIN, STEPS, TRAININGS

from trimtab import Guard

TRACES = Path(tempfile.gettempdir()) / "trimtab_traces"
END = "end.json"
HALVES = ("tuned", "held-out")
PLAIN_SEEDS, OTHER_SEEDS = 10, 1
BAR_STEPS = 100


@dataclass(frozen=True)
class Job:
    """One training to be recorded."""

    case: Case
    training: str
    seed: int

    @property
    def half(self) -> str:
        return "held-out" if self.training in HELD_OUT else "tuned"

    @property
    def name(self) -> str:
        return f"{self.training}, {self.case.name}, {self.seed}".replace("/", " ")


def jobs() -> Iterator[Job]:
    """Every training: healthy with several seeds, and each fault once."""
    for training in TRAININGS:
        for case in HEALTHY:
            yield from (Job(case, training, s) for s in range(PLAIN_SEEDS if case.name == PLAIN else OTHER_SEEDS))
        yield from (Job(case, training, number % PLAIN_SEEDS) for number, case in enumerate(FAULTS))


def record_one(job: Job, root: Path) -> None:
    """Train, and keep the record and how it ended."""
    folder = root / job.half / job.name
    if (folder / META).exists():
        return
    torch.set_num_threads(1)
    logging.getLogger("trimtab").setLevel(logging.CRITICAL)
    run = Run(TRAININGS[job.training](job.seed), job.case, job.seed)
    torch.manual_seed(job.seed)

    def tell(loss: torch.Tensor, batch: object) -> None:
        if run.guard is not None:
            run.guard.observe(loss=loss)

    run.tell = tell  # type: ignore[method-assign]
    run.train(lambda run: Guard.attach(run.model, run.optimizer, mode="observe", run_dir=folder))
    torch.manual_seed(0)  # a VAE samples
    run.model.eval()
    with torch.no_grad():
        end = float(run.task.loss(run.model, run.task.val_batch))
    error = run.extra.get("error")
    meta = Meta(
        case=job.case.name,
        family=job.training,
        seed=job.seed,
        half=job.half,
        healthy=job.case.healthy,
        group=job.case.group,
        names=job.case.names,
        kind=job.case.kind,
        onset=job.case.onset,
        error=repr(error)[:200] if error is not None else "",
    )
    (folder / END).write_text(json.dumps(end if math.isfinite(end) else None))
    (folder / "meta.part").write_text(json.dumps(asdict(meta)))
    (folder / "meta.part").rename(folder / META)  # last: a trace with meta data is complete


def record(args: argparse.Namespace) -> None:
    """Make all traces that are missing."""
    todo = [job for job in jobs() if args.only in job.name and not (args.traces / job.half / job.name / META).exists()]
    print(f"{len(todo)} traces to make under {args.traces}", flush=True)
    began = time.monotonic()
    numbers = {job: number for number, job in enumerate(jobs_by_name())}
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        made = [pool.submit(record_numbered, numbers[job.name], args.traces) for job in todo]
        for num, one in enumerate(made, 1):
            one.result()
            if num % 50 == 0 or num == len(todo):
                print(f"  {num} of {len(todo)}, {time.monotonic() - began:.0f} s", flush=True)


def jobs_by_name() -> dict[str, Job]:
    return {job.name: job for job in jobs()}


def record_numbered(number: int, root: Path) -> None:
    """A case holds functions that cannot be sent to another process: its number can."""
    record_one(list(jobs_by_name().values())[number], root)


def judged(root: Path, half: str, num_jobs: int) -> list[Judged]:
    """Every trace of a half as the rules see it now, with whether it did harm."""
    folders = sorted(p.parent for p in (root / half).glob(f"*/{META}"))
    runs = judge_all(folders, num_jobs)
    ends = [json.loads((folder / END).read_text()) for folder in folders]
    spread: dict[str, list[float]] = {}
    for run, end in zip(runs, ends, strict=True):
        if run.meta.case == PLAIN:
            spread.setdefault(run.meta.family, []).append(end)
    for run, end in zip(runs, ends, strict=True):
        if not run.meta.healthy:
            run.meta = replace(run.meta, harmful=is_worse(end, spread[run.meta.family]) or bool(run.meta.error))
    return runs


def is_worse(end: float | None, clean: list[float]) -> bool:
    """Whether a run ended worse than the spread of clean ones."""
    if end is None:
        return True
    mean = statistics.fmean(clean)
    return end > max(*clean, mean + 3 * statistics.stdev(clean), mean + 0.05 * abs(mean))


def half_page(half: str, runs: list[Judged]) -> str:
    """The figures of one half."""
    ours = score(runs, OURS)
    faults = [r for r in runs if not r.meta.healthy]
    growth = [r for r in faults if r.meta.group == GROWTH and r.meta.harmful]
    soon = Share.of(r.ours.detected(r.meta.onset) and latency(r) <= BAR_STEPS for r in growth)
    rows = [
        ("recall over harmful faults", str(ours.harmful)),
        ("recall over all faults, harmless ones included", str(ours.everything)),
        ("healthy runs with a finding", str(ours.false_alarms)),
        ("faults with a finding before their onset", str(ours.early)),
        (f"harmful growth of the rate found within {BAR_STEPS} steps of its onset", str(soon)),
        ("median latency, in steps", text.number(ours.latency)),
    ]
    healthy = len(runs) - len(faults)
    return "\n\n".join(
        [
            f"## Trainings of the {half} half",
            f"{', '.join(sorted({r.meta.family for r in runs}))}: {len(runs)} traces, {healthy} healthy, {len(faults)} "
            f"with a fault, {sum(r.meta.harmful for r in faults)} of them harmful.",
            text.table(("trimtab", "share (95 % interval; count)"), rows),
            text.by("group", ("rate", GROWTH, "labels", "spike", "slow growth"), faults),
            "### Beside the peers, on the same traces\n\n" + text.comparison(runs),
        ]
    )


def listed(runs: list[Judged]) -> str:
    """Harmful faults that were missed or found before their onset, late growth, and false alarms."""
    lines = []
    for run in runs:
        meta = run.meta
        found = next((f"step {s}: {t}" for s, _, t in run.findings), "nothing")
        late = meta.group == GROWTH and meta.harmful and (run.ours.since_onset or 0) - meta.onset > BAR_STEPS
        if (meta.healthy and run.findings) or late:
            lines.append(f"{'FALSE' if meta.healthy else 'LATE '} {meta}: {found}")
        elif meta.harmful and not run.ours.detected(meta.onset):
            lines.append(f"{'EARLY' if run.ours.early(meta.onset) else 'MISS '} {meta}: {found}")
        lines += [f"BROKEN {meta}: {problem}" for problem in run.problems]
    return "\n".join(lines)


def page(halves: dict[str, list[Judged]]) -> str:
    """The results file."""
    total = sum(map(len, halves.values()))
    everything = [run for runs in halves.values() for run in runs]
    ours = score(everything, OURS)
    head = text.header({}, f"python benchmarks/traces.py {' '.join(sys.argv[1:])}").split("\n\n")[1]
    return "\n\n".join(
        [
            "# Recorded traces: rates, labels, spikes, slow growth",
            f"{head}\n\n{total} traces of {STEPS} steps; `python benchmarks/traces.py record`, then `page`. "
            "Each training is recorded once under a guard with default settings (mode observe) that is told the loss; "
            "verdicts are made again from the record. A fault is harmful if the loss on held-out data, without the "
            "fault, ends worse than with every healthy seed, and worse than their mean by 3 standard deviations and "
            "5 %. Found: a finding from the onset on and none before it. Intervals are Wilson 95 %. Four of seven "
            "trainings are held out: no rule was made on them.",
            f"All halves: recall over harmful faults {ours.harmful}; healthy runs with a finding {ours.false_alarms}.",
            *(half_page(half, runs) for half, runs in halves.items()),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "score", "page"))
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--only", default="", help="only traces whose name contains this")
    parser.add_argument("--half", choices=HALVES)
    parser.add_argument("--misses", action="store_true", help="list misses and false alarms of the tuned half")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.command == "record":
        record(args)
        return
    halves = {h: judged(args.traces, h, args.jobs) for h in ((args.half,) if args.half else reversed(HALVES))}
    if args.command == "page":
        args.out.write_text(page(halves) + "\n", encoding="utf-8")
        print(f"written to {args.out}")
        return
    for half, runs in halves.items():
        print(half_page(half, runs).split("### Beside")[0])
        if args.misses and half == "tuned":
            print(listed(runs))


if __name__ == "__main__":
    main()
