"""Healthy training programs of every shape, run without trimtab and under `trimtab run`, and what differs.

`python -m tests.runs.shape_runs --steps 3000 --mode act` prints a table and ends with 1 if the output, the exit code or
stderr of any program differs, if any action was applied to it, or if a program did not learn without a guard.

Thresholds are tuned on one half of the programs only. Of the other half, `HELD_OUT`, the table says how much was found
but not what, unless `--show-held-out` asks for it. A program that breaks under trimtab is shown in full in either half.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tests.run.running import SOURCE, Ran
from trimtab.record.reader import Run, read_run

FOLDER = Path(__file__).parent / "shapes"
SHAPES = tuple(sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "shapes_common"))
HELD_OUT = frozenset(SHAPES[1::2])
HALVES = {"all": SHAPES, "held-out": tuple(sorted(HELD_OUT)), "tuned": tuple(sorted(set(SHAPES) - HELD_OUT))}
MODES = ("observe", "advise", "act", "raise")
COLUMNS = (
    "program",
    "steps",
    "seen",
    "identical",
    "learned",
    "findings",
    "actions",
    "rejected",
    "plain s",
    "guarded s",
)
"""`seen` is the number of recorded steps of all optimizers; the seconds are processor time, imports included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One program with one seed: what it did without trimtab, and what differed, was found and was done with it."""

    shape: str
    seed: int
    differs: tuple[str, ...]
    learned: bool | None
    steps: int
    findings: tuple[str, ...]
    actions: tuple[str, ...]
    rejected: int
    plain_s: float
    guarded_s: float
    guarded: Ran

    @property
    def name(self) -> str:
        return self.shape if not self.seed else f"{self.shape} (seed {self.seed})"

    @property
    def harmless(self) -> bool:
        return not self.differs and not self.actions and not self.rejected


def differences(plain: Ran, guarded: Ran) -> tuple[str, ...]:
    """What can be told apart from outside, in words."""
    found = []
    if guarded.code != plain.code:
        found.append(f"exit code {guarded.code}, {plain.code} without trimtab")
    if guarded.out != plain.out:
        pairs = zip(plain.out.splitlines(), guarded.out.splitlines(), strict=False)
        first = next((f"{b!r} instead of {a!r}" for a, b in pairs if a != b), "one of them has more lines")
        found.append(f"stdout: {first}")
    if guarded.own_err != plain.own_err:
        added = Counter(guarded.own_err) - Counter(plain.own_err)
        first_line = next(iter(added), "a line is missing, or in another place")
        found.append(f"stderr: {first_line.rstrip()}")
    return tuple(found)


def compare(shape: str, seed: int, steps: int, mode: str | None) -> Compared:
    """Run one program without trimtab and under it."""
    words = [str(FOLDER / f"{shape}.py"), str(steps), str(seed)]
    with tempfile.TemporaryDirectory(prefix=f"{shape}-") as folder:
        place = Path(folder)
        plain, plain_s = started([sys.executable, *words], place / "plain")
        options = ["--dir", str(place / "records"), *(["--mode", mode] if mode else [])]
        guarded, guarded_s = started([sys.executable, "-m", "trimtab", "run", *options, *words], place / "guarded")
        runs = [read_run(path.parent) for path in sorted((place / "records").glob("*/run.jsonl"))]
    said = re.search(r"^learned (True|False)$", plain.out, re.MULTILINE)
    broken = () if plain.code == 0 and plain.finite else (f"does not work without trimtab either: {plain.err[-500:]}",)
    return Compared(
        shape=shape,
        seed=seed,
        differs=broken + differences(plain, guarded),
        learned=None if said is None else said[1] == "True",
        steps=sum(len(run) for run in runs),
        findings=tuple(str(finding) for run in runs for finding in run.findings),
        actions=tuple(action for run in runs for action in actions_of(run)),
        rejected=sum(sample.scalars.get("rejected", 0.0) > 0 for run in runs for sample in run.samples()),
        plain_s=plain_s,
        guarded_s=guarded_s,
        guarded=guarded,
    )


def actions_of(run: Run) -> list[str]:
    """Every action that was applied, once: what came of it is a second outcome of the same action."""
    told: dict[str, list[str]] = {}
    for outcome in run.outcomes:
        if outcome.applied:
            whose = f" ({outcome.optimizer})" if outcome.optimizer else ""
            name = f"step {outcome.at}{whose}: {outcome.action.kind} {dict(outcome.action.args)}"
            told.setdefault(name, []).append(outcome.detail)
    return [f"{name}: {'; '.join(details)}" for name, details in told.items()]


def started(words: Sequence[str], cwd: Path) -> tuple[Ran, float]:
    """Run a program to its end; the seconds are processor time, children included."""
    cwd.mkdir()
    around = {k: v for k, v in os.environ.items() if not k.startswith("TRIMTAB_")}
    around |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    out, err = cwd / ".out", cwd / ".err"
    with out.open("wb") as a, err.open("wb") as b:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=a, stderr=b, env=around, cwd=cwd)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    texts = [path.read_bytes().decode("utf-8", "replace") for path in (out, err)]
    return Ran(code=process.returncode, out=texts[0], err=texts[1]), usage.ru_utime + usage.ru_stime


def table(results: Iterable[Compared], steps: int, hidden: frozenset[str]) -> list[str]:
    """One line per program, then what was found and done, step by step; of hidden ones only the counts."""
    rows = [list(COLUMNS)]
    details = []
    for one in results:
        show = one.shape not in hidden
        counts = [str(len(one.findings)), str(len(one.actions)), str(one.rejected)]
        learned = "-" if one.learned is None else "yes" if one.learned else "NO"
        same = "yes" if not one.differs else "NO"
        timing = [f"{one.plain_s:.1f}", f"{one.guarded_s:.1f}"]
        rows.append([one.name, str(steps), str(one.steps), same, learned, *counts, *timing])
        told = [*one.findings, *(f"DONE {action}" for action in one.actions)] if show else []
        if one.guarded.code not in (0, 70):  # whatever half it is in: a crash is no matter of thresholds
            told += ["it ended with an error under trimtab:", *one.guarded.err.splitlines()[-40:]]
        told = [*(f"DIFFERS {what}" for what in one.differs), *told]
        details += [f"{one.name}:", *(f"  {line}" for line in told)] if told else []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, "", *details]


def totals(results: Sequence[Compared]) -> str:
    differ, found = sum(bool(one.differs) for one in results), sum(bool(one.findings) for one in results)
    findings, actions = sum(len(one.findings) for one in results), sum(len(one.actions) for one in results)
    rejected = sum(one.rejected for one in results)
    return (
        f"{len(results)} runs, {differ} differ, {findings} findings in {found} of them, {actions} actions, "
        f"{rejected} updates rejected"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runs.shape_runs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps of each program")
    parser.add_argument("--mode", choices=MODES, default=None, help="of trimtab run; its own default unless set")
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--half", choices=sorted(HALVES), default="all")
    parser.add_argument("--seeds", type=int, default=1, help="run every program with seeds 0, 1, ...")
    parser.add_argument("--jobs", type=int, default=2, help="programs at the same time")
    parser.add_argument("--show-held-out", action="store_true", help="also what was found in the held-out half")
    args = parser.parse_args(argv)
    wanted = [name for name in args.only.split(",") if name]
    unknown = sorted(set(wanted) - set(SHAPES))
    if unknown:
        parser.error(f"there is no program {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    names = [name for name in HALVES[args.half] if not wanted or name in wanted]
    began = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [
            pool.submit(compare, name, seed, args.steps, args.mode) for name, seed in product(names, range(args.seeds))
        ]
        results = []
        for job in jobs:
            results.append(job.result())
            print(f"{results[-1].name}: {'as without' if results[-1].harmless else 'CHANGED'}", file=sys.stderr)
    print("\n".join(table(results, args.steps, frozenset() if args.show_held_out else HELD_OUT)))
    for half in ("tuned", "held-out"):
        those = [one for one in results if (one.shape in HELD_OUT) is (half == "held-out")]
        if those:
            print(f"{half}: {totals(those)}")
    print(f"mode {args.mode or 'of the default'}, {args.steps} steps, {time.monotonic() - began:.0f} s in all")
    return int(any(not one.harmless or one.learned is False for one in results))


if __name__ == "__main__":
    sys.exit(main())
