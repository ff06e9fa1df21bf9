"""How many mutants of sound programs trimtab finds, and how often it cries wolf over the programs as they are.

    python benchmarks/mutation.py list
    python benchmarks/mutation.py record [--half tuned|held-out|half-seen|all] [--per-operator 8] [--only TEXT]
    python benchmarks/mutation.py score [--half tuned|...] [--misses] [--jobs 1] [--only TEXT]
    python benchmarks/mutation.py page --out FILE.md

`record` runs every program of `tests/runs/shapes` with several seeds, and mutants of it made by the operators of
`tests/mutants`, under the code of `trimtab run --mode observe`, and keeps the records; it goes on where it was stopped.
`score` makes the verdicts again from the records. Whole operators and whole programs are held out: rules are made on
the tuned half, and `--misses` lists only what belongs to it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).parent.parent
sys.path.insert(0, str(REPO))

import mutation_score  # noqa: E402
from tests.mutants import runs, sets  # noqa: E402
from tests.mutants.operators import HELD_OUT, OPERATORS  # noqa: E402
from tests.mutants.runs import DONE, SCRIPT, Job  # noqa: E402
from tests.runs.shape_runs import SHAPES  # noqa: E402

TRACES = Path(tempfile.gettempdir()) / "trimtab_mutation"
FIRST_SEEDS = 4


def jobs_of(halves: list[str], *, per_operator: int, seeds: int, only: str) -> list[Job]:
    """The first clean runs, then mutants, then the other clean runs: a part of the set can be scored early."""
    found: list[Job] = []
    for half in halves:
        found += sets.clean_jobs(half, range(min(FIRST_SEEDS, seeds)))
        found += sets.mutant_jobs(half, per_operator)
        found += sets.clean_jobs(half, range(FIRST_SEEDS, seeds))
    return [job for job in found if only in job.name]


def folder_of(job: Job, root: Path) -> Path:
    return root / sets.half_of(job.program, job.operator) / job.name


def is_made(job: Job, folder: Path) -> bool:
    """Whether the run is complete, and of the program as it would be mutated now."""
    return (folder / DONE).exists() and (folder / SCRIPT).read_text(encoding="utf-8") == runs.source_of(job)


def record(args: argparse.Namespace) -> None:
    """Make all runs that are missing."""
    wanted = jobs_of(args.half, per_operator=args.per_operator, seeds=args.seeds, only=args.only)
    todo = [job for job in wanted if not is_made(job, folder_of(job, args.traces))]
    print(f"{len(todo)} runs to make under {args.traces}", flush=True)
    runs.import_all()
    began, workers = time.monotonic(), []
    for number in range(args.jobs):
        pid = os.fork()
        if pid == 0:
            _work(todo[number :: args.jobs], args.traces, began)
            os._exit(0)
        workers.append(pid)
    for pid in workers:
        os.waitpid(pid, 0)


def _work(todo: list[Job], root: Path, began: float) -> None:
    gc.freeze()  # a child's collections then leave this process's pages shared
    for num, job in enumerate(todo, 1):
        made = runs.make(job, folder_of(job, root))
        if num % 20 == 0 or (made.error and not job.operator):
            print(f"  {num} of {len(todo)}, {time.monotonic() - began:.0f} s: {job.name} {made.error}", flush=True)


def show(args: argparse.Namespace) -> None:
    """The operators, and where they apply."""
    for operator in OPERATORS:
        programs = [p for p in SHAPES if runs.applies(operator, p)]
        loud = "silent" if operator.silent else "loud"
        print(
            f"{operator.name:28} {operator.group:10} {loud:7} {'late' if operator.late else 'start':6} "
            f"{'held out' if operator.name in HELD_OUT else 'tuned':9} {len(programs)} programs"
        )
    print(f"{len(OPERATORS)} operators, {len(SHAPES)} programs")


def score(args: argparse.Namespace) -> dict[str, str]:
    """The report of every half."""
    out = {}
    for half in args.half:
        judged = mutation_score.judge_half(args.traces, half, args.jobs, args.only)
        if not judged:
            print(f"no records of the {half} half under {args.traces}; make them with: mutation.py record")
            continue
        out[half] = mutation_score.report(half, judged, by_operator=half == "tuned" and args.command == "score")
        if half == "tuned" and getattr(args, "misses", False):
            out[half] += "\n" + mutation_score.misses(judged)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    subs = {name: commands.add_parser(name) for name in ("list", "record", "score", "page")}
    for name in ("record", "score", "page"):
        subs[name].add_argument("--traces", type=Path, default=TRACES)
        subs[name].add_argument("--half", choices=(*sets.HALVES, "all"), default="all")
        subs[name].add_argument("--only", default="", help="only runs whose OPERATOR__PROGRAM__SEED contains this")
        subs[name].add_argument("--jobs", type=int, default=1)
    subs["record"].add_argument("--per-operator", type=int, default=8, help="programs of each half for an operator")
    subs["record"].add_argument("--seeds", type=int, default=sets.CLEAN_SEEDS, help="clean runs of each program")
    subs["score"].add_argument("--misses", action="store_true", help="list what was missed in the tuned half")
    subs["page"].add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if "half" in args:
        args.half = ["held-out", "tuned"] if args.half == "all" else [args.half]
    match args.command:
        case "list":
            show(args)
        case "record":
            record(args)
        case "score":
            print("\n".join(score(args).values()))
        case "page":
            command = f"python benchmarks/mutation.py {' '.join(sys.argv[1:])}"
            head = mutation_score.header(command, mutation_score.num_clean(args.traces))
            args.out.write_text("\n".join([head, *score(args).values()]), encoding="utf-8")
            print(f"written to {args.out}")


if __name__ == "__main__":
    main()
