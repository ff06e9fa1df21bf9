"""The five systems on real data: every number that must be shown of `trimtab train`, and whether it is good enough.

    python benchmarks/recipes.py [--only NAME ...] [--seeds 42 1000 1001] [--quick] [--out FILE.md]
                                 [--readme docs/tutorials/recipes.md] [--cache DIR] [--again | --assemble]

Each expectation is one line, `ok` or `MISS`, with what was measured and what was expected; exit code 1 if one is
missed. Whatever was measured is kept in the cache at once, and is not measured again while the sources stay the same
(`--again`: it is): a run that was killed goes on where it was, and the page can be made of several runs. `--assemble`
runs nothing and takes what is there, from whichever state of the sources; each section says its own. The first seed is
the default one; the others were not used to choose any setting. Two workers with one thread each; what is timed runs
alone, first.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import recipes_general
from recipes_claims import Found, Judged
from recipes_jobs import Job, do, known_recipes
from recipes_page import Cache, page, put_between_marks, state, summary

SEEDS = (42, 1000, 1001)
RECIPES = ("clip6", "segment", "charlm", "tabular", "pairs")
SECTIONS = ("times", "overhead", *RECIPES)
LONGEST_FIRST = ("segment", "clip6", "pairs", "charlm", "tabular")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What a part of the page needs to have run, and what it says about it."""

    jobs: list[Job]
    judge: Callable[[Found], Judged]


def sections(names: Sequence[str], seeds: Sequence[int], *, quick: bool) -> dict[str, Section]:
    """The sections asked for, as far as their recipes exist."""
    known = known_recipes()
    present = [name for name in RECIPES if name in known]
    made = {
        "times": Section(
            jobs=list(recipes_general.times_jobs(present, quick=quick)),
            judge=partial(recipes_general.judge_times, names=present, quick=quick),
        ),
        "overhead": Section(
            jobs=list(recipes_general.overhead_jobs(present, quick=quick)),
            judge=partial(recipes_general.judge_overhead, names=present),
        ),
    }
    for name in present:
        if (Path(__file__).parent / f"recipes_{name}.py").exists():
            module = importlib.import_module(f"recipes_{name}")
            made[name] = Section(
                jobs=list(module.jobs(seeds, quick=quick)), judge=partial(module.judge, seeds=seeds, quick=quick)
            )
    return {name: made[name] for name in SECTIONS if name in names and name in made}


def run(todo: Sequence[Job], cache: Cache, workers: int) -> None:
    """Run what is missing: first what must be alone, then the rest side by side."""
    began, now = time.monotonic(), state()
    done = 0

    def keep(job: Job, value: Any) -> None:
        nonlocal done
        done += 1
        cache.put(job.section, job.name, dict(job.spec), value, now)
        failed = f" FAILED: {value['error'].splitlines()[-1]}" if "error" in value else ""
        print(
            f"[{time.monotonic() - began:5.0f} s] {done}/{len(todo)} {job.section}: {job.name}{failed}",
            file=sys.stderr,
            flush=True,
        )

    # Spawned, not forked: torch's threads do not survive a fork.
    fresh = multiprocessing.get_context("spawn")
    alone = [job for job in todo if job.alone]
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        for job in alone:
            keep(job, pool.submit(safely, job).result())
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    rest = sorted((job for job in todo if not job.alone), key=lambda job: order.get(job.section, len(order)))
    with ProcessPoolExecutor(workers, mp_context=fresh) as pool:
        waiting = {pool.submit(safely, job): job for job in rest}
        for future in as_completed(waiting):
            error = future.exception()  # a worker that died takes its pool along: what is left is told as not done
            keep(waiting[future], future.result() if error is None else {"error": repr(error)})


def safely(job: Job) -> Any:
    """One broken job costs one line, not the page."""
    try:
        return do(job)
    except Exception:
        return {"error": traceback.format_exc()[-2000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=SECTIONS, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--quick", action="store_true", help="the quick size of every recipe: tries the script out")
    parser.add_argument(
        "--out", type=Path, help="the page; without it a whole run goes to results/recipes_cpu2_<day>.md"
    )
    parser.add_argument("--cache", type=Path, help="where measurements are kept; trimtab-recipes among temporary files")
    parser.add_argument("--again", action="store_true", help="measure again what is in the cache")
    parser.add_argument("--assemble", action="store_true", help="measure nothing")
    parser.add_argument("--readme", type=Path, help="put the short table between the marks of this page")
    parser.add_argument("--match", default="", help="run only jobs with this in their names")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    folder = args.cache or Path(tempfile.gettempdir()) / f"trimtab-recipes{'-quick' if args.quick else ''}"
    cache, chosen = Cache(folder), sections(args.only, args.seeds, quick=args.quick)
    if not args.assemble:
        every = [job for section in chosen.values() for job in section.jobs if args.match in job.name]
        now = state()
        todo = [job for job in every if args.again or not cache.has(job.section, job.name, dict(job.spec), now)]
        print(f"{len(todo)} of {len(every)} jobs to run; kept in {folder}", file=sys.stderr, flush=True)
        run(todo, cache, args.workers)
    judged = {name: section.judge(Found(cache.values(name))) for name, section in chosen.items()}
    for name, one in judged.items():
        for claim in one.claims:
            print(claim.line(name))
    text = page(judged, cache, args.seeds, f"python benchmarks/recipes.py{' --quick' if args.quick else ''}")
    out = args.out
    if out is None and not args.quick and set(judged) == set(SECTIONS):
        day = time.strftime("%Y-%m-%d", time.gmtime())
        out = Path(__file__).parent / "results" / f"recipes_cpu{os.cpu_count()}_{day}.md"
    if out is not None:
        out.write_text(text, encoding="utf-8")
        print(f"written to {out}", file=sys.stderr)
    if args.readme is not None:
        put_between_marks(args.readme, summary(judged, out or Path("benchmarks/results"), args.readme))
    return 0 if all(claim.holds for one in judged.values() for claim in one.claims) else 1


if __name__ == "__main__":
    sys.exit(main())
