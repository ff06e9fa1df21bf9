"""How many faults trimtab finds, how soon and by which name, and how often it cries wolf, beside its peers.

    python benchmarks/detection.py record [--half tune|report|both] [--seeds 2] [--only SUBSTR] [--jobs 2] [--fresh]
    python benchmarks/detection.py score [--half ...] [--only SUBSTR] [--misses] [--out FILE.md]
    python benchmarks/detection.py all --out benchmarks/results/detection_cpu_2026-11-15.md
    python benchmarks/detection.py act
    python benchmarks/detection.py rules-cost [--steps 2000]

`record` trains every fault and every healthy oddity of `tests/faults` once and keeps the record; `score` makes the
verdicts again from the records, so that a rule can be changed and judged in seconds. Rules are made on the tune half
(its own families and seeds); the report half is held back for the figures that are published.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import detection_cost
import detection_report
import torch
from detection_score import META, Judged, Meta, judge_all, traces

from trimtab.core.types import Decision

if TYPE_CHECKING:
    from tests.faults.base import Case

REPO = Path(__file__).parent.parent
HALVES = {"tune": (("mlp", "cnn", "contrastive"), 0), "report": (("rnn", "lm", "segment"), 3000)}
HEALTHY_RUNS = 300
TRACES = Path(tempfile.gettempdir()) / "trimtab_detection"
JUDGED_ANEW = ("rules", "core", "report", "cli", "data")  # packages that a trace does not depend on


@dataclass(frozen=True)
class Job:
    """One run to be made."""

    half: str
    healthy: bool
    case: str
    family: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.case}__{self.family}__{self.seed}"


def cases(healthy: bool) -> dict[str, Case]:
    """The faults, or the healthy oddities."""
    if healthy:
        from tests.faults.healthy import HEALTHY

        return HEALTHY
    from tests.faults.faults import FAULTS

    return FAULTS


def pairs(half: str, *, healthy: bool) -> list[tuple[str, str]]:
    """Every case with every family of the half that it is made for."""
    families = HALVES[half][0]
    return [(name, f) for name, case in cases(healthy).items() for f in families if f in (case.families or families)]


def jobs_of(half: str, *, seeds: int, healthy_runs: int, only: str) -> Iterator[Job]:
    """The runs of one half: faults with `seeds` seeds, healthy ones with as many as make `healthy_runs` runs."""
    first = HALVES[half][1]
    for healthy in (False, True):
        known = pairs(half, healthy=healthy)
        num = max(1, math.ceil(healthy_runs / max(len(known), 1))) if healthy else seeds
        for seed in range(first, first + num):
            for case, family in known:
                job = Job(half, healthy, case, family, seed)
                if only in job.name:
                    yield job


def record_one(job: Job, root: Path, fresh: bool) -> str:
    """Make one run and its meta data; returns what went wrong with the benchmark itself, if anything."""
    folder = root / job.half / job.name
    if (folder / META).exists() and not fresh:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    _quiet()
    from tests.faults import harness

    case = cases(job.healthy)[job.case]
    try:
        run = harness.run_case(case, job.family, job.seed, mode="observe", run_dir=folder)
        error = run.extra.get("error")
        meta = Meta(
            case=job.case,
            family=job.family,
            seed=job.seed,
            half=job.half,
            healthy=job.healthy,
            group=case.group,
            names=tuple(case.names),
            kind=case.kind,
            onset=case.onset,
            harmful=not job.healthy and bool(harness.harmful(run)),
            error=f"{type(error).__name__}: {error}"[:300] if error is not None else "",
        )
    except Exception:
        return f"{job.half}/{job.name}: {traceback.format_exc(limit=-4)}"
    # Written last, and in one go: a trace with meta data is a complete one.
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.part").write_text(json.dumps(asdict(meta)))
    (folder / "meta.part").rename(folder / META)
    return ""


def _quiet() -> None:
    torch.set_num_threads(1)
    logging.getLogger("trimtab").setLevel(logging.CRITICAL)


def record(args: argparse.Namespace) -> int:
    """Make all runs that are missing; returns how many could not be made."""
    todo = [
        job
        for half in args.half
        for job in jobs_of(half, seeds=args.seeds, healthy_runs=args.healthy_runs, only=args.only)
        if args.fresh or not (args.traces / job.half / job.name / META).exists()
    ]
    print(f"{len(todo)} runs to make under {args.traces}", flush=True)
    began, failed = time.perf_counter(), []
    # Spawned, not forked: torch's threads do not survive a fork.
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet) as pool:
        futures = [pool.submit(record_one, job, args.traces, args.fresh) for job in todo]
        for num, future in enumerate(as_completed(futures), 1):
            if problem := future.result():
                failed.append(problem)
                print(f"FAILED {problem}", flush=True)
            if num % 50 == 0 or num == len(todo):
                print(f"  {num} of {len(todo)}, {time.perf_counter() - began:.0f} s", flush=True)
    if failed:
        print(f"{len(failed)} runs could not be made")
    return len(failed)


def num_stale(folders: list[Path]) -> int:
    """How many traces are older than what made them: the cases, or the code that measures and records."""
    package = REPO / "src" / "trimtab"
    sources = [p for p in package.rglob("*.py") if p.relative_to(package).parts[0] not in JUDGED_ANEW]
    newest = max(p.stat().st_mtime for p in [*sources, *(REPO / "tests" / "faults").glob("*.py")])
    return sum((folder / META).stat().st_mtime < newest for folder in folders)


def score(args: argparse.Namespace) -> dict[str, list[Judged]]:
    """Judge all traces of the halves, print the outcome, and write it where it was asked for."""
    _quiet()
    halves: dict[str, list[Judged]] = {}
    stale = 0
    for half in sorted(args.half):  # the report half first
        folders = traces(args.traces, half, args.only)
        if not folders:
            print(f"no traces of the {half} half under {args.traces}; make them with: detection.py record")
            continue
        halves[half] = judge_all(folders, args.jobs)
        stale += num_stale(folders)
    command = f"python benchmarks/detection.py {' '.join(sys.argv[1:])}"
    parts = [detection_report.header(halves, command, stale)] if halves else []
    lists = args.misses or args.out is not None
    parts += [detection_report.half_report(half, runs, lists=lists) for half, runs in halves.items()]
    text = "\n\n".join(parts)
    if args.out is not None and halves:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
        print(f"written to {args.out}")
    shown = [detection_report.half_report(half, runs, lists=args.misses) for half, runs in halves.items()]
    print("\n\n".join([*parts[:1], *shown]))
    return halves


def everything(args: argparse.Namespace) -> int:
    """Record and score both halves, and put the report half into its page of the documentation."""
    failed = record(args)
    halves = score(args)
    if "report" in halves and not args.only:
        pages = {
            "docs/explanation/detection.md": detection_report.half_report("report", halves["report"], lists=True),
        }
        for page, text in pages.items():
            written = detection_report.write_page(text, REPO / page)
            print(f"{page}: written" if written else f"{page} has no detection markers: left alone")
    return failed


class Decisions:
    """A sink that keeps the decisions to do something."""

    def __init__(self) -> None:
        self.taken: list[Decision] = []

    def write(self, record: Any) -> None:
        if isinstance(record, Decision) and record.actions:
            self.taken.append(record)

    def close(self) -> None:
        pass


def act_one(job: Job) -> tuple[Job, int, list[str], str]:
    """One healthy run in mode act: rejected updates, decisions in words, and the exception that ended it."""
    _quiet()
    from tests.faults import harness

    sink = Decisions()
    try:
        run = harness.run_case(cases(True)[job.case], job.family, job.seed, mode="act", run_dir=False, sinks=[sink])
    except Exception as error:
        return job, 0, [], f"could not be run: {error!r}"
    decided = [f"about step {d.about}: {', '.join(a.kind for a in d.actions)}" for d in sink.taken]
    error = run.extra.get("error")
    rejected = run.guard.rejected if run.guard is not None else 0
    return job, rejected, decided, f"ended by {error!r}"[:200] if error is not None else ""


def act(args: argparse.Namespace) -> int:
    """Healthy runs of the report half in mode act: whatever is done to them is harm."""
    first = HALVES["report"][1]
    todo = [Job("report", True, case, family, first) for case, family in pairs("report", healthy=True)]
    todo = [job for job in todo if args.only in job.name]
    rejected = decided = harmed = ended = 0
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet) as pool:
        for job, num, decisions, error in pool.map(act_one, todo):
            rejected, decided = rejected + num, decided + len(decisions)
            harmed, ended = harmed + bool(num or decisions), ended + bool(error)
            if num or decisions or error:
                words = [f"{num} updates rejected"] * bool(num) + decisions[:5] + [error] * bool(error)
                print(f"{job.case}, {job.family}, seed {job.seed}: {'; '.join(words)}", flush=True)
    print(
        f"{len(todo)} healthy runs in mode act: {harmed} with an action, {rejected} updates rejected, "
        f"{decided} decisions to act, {ended} ended by an exception"
    )
    return harmed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    subs = {name: commands.add_parser(name) for name in ("record", "score", "all", "act", "rules-cost")}
    for name in ("record", "score", "all", "act"):
        subs[name].add_argument("--only", default="", help="only runs whose CASE__FAMILY__SEED contains this")
        subs[name].add_argument("--jobs", type=int, default=2)
    for name in ("record", "score", "all"):
        subs[name].add_argument("--traces", type=Path, default=TRACES)
        subs[name].add_argument("--half", choices=("tune", "report", "both"), default="both")
    for name in ("record", "all"):
        subs[name].add_argument("--seeds", type=int, default=2, help="seeds of every fault")
        subs[name].add_argument(
            "--healthy-runs", type=int, default=HEALTHY_RUNS, help="healthy runs per half, at least"
        )
        subs[name].add_argument("--fresh", action="store_true", help="make traces again that are there already")
    for name in ("score", "all"):
        subs[name].add_argument("--out", type=Path)
        subs[name].add_argument("--misses", action="store_true", help="also print every miss and every false alarm")
    subs["rules-cost"].add_argument("--steps", type=int, default=2_000)
    args = parser.parse_args()
    if "half" in args:
        args.half = ("tune", "report") if args.half == "both" else (args.half,)
    match args.command:
        case "record":
            sys.exit(min(record(args), 1))
        case "score":
            score(args)
        case "all":
            sys.exit(min(everything(args), 1))
        case "act":
            act(args)
        case "rules-cost":
            print(detection_cost.report(args.steps))


if __name__ == "__main__":
    main()
