"""What recorded mutants and clean programs are judged to be, and the score as Markdown."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from detection_report import by, comparison, number, table
from detection_score import NAMED_WITHIN, OURS, Alarms, Judged, Meta, Share, findings_again, latency, median, score
from peers import PEERS
from tests.mutants import runs, sets
from tests.mutants.operators import BY_NAME, GROUPS, OPERATORS
from tests.mutants.runs import DONE, Made
from tests.mutants.sets import Spread
from tests.runs.shape_runs import SHAPES

from trimtab import __version__
from trimtab.core.types import Sample
from trimtab.record.reader import Run, read_run

LEFT_OUT = ("ended by an exception", "had no effect", "no spread known")


@dataclass
class JudgedProgram(Judged):
    """One run of a program. Steps of each optimizer are shifted so that the fault begins at the same one in all."""

    made: Made | None = None
    num_alarms: int = 0  # incidents, each counted once
    left_out: str = ""
    recorded: list[str] = field(default_factory=list)


def judge(folder: Path) -> JudgedProgram:
    """Make the verdicts again from the records of one run of a program, and ask the peers."""
    made = runs.load(folder)
    operator = BY_NAME.get(made.operator)
    meta = Meta(
        case=made.operator or "clean",
        family=made.program,
        seed=made.seed,
        half=folder.parent.name,
        healthy=operator is None,
        group=operator.group if operator else "healthy",
        names=tuple(sorted(operator.names)) if operator else (),
        kind=("silent" if operator.silent else "loud") if operator else "",
        onset=made.steps // 3 if operator and operator.late else 0,
        error=made.error,
    )
    judged = JudgedProgram(meta, alarms={name: Alarms() for name in (OURS, *PEERS)}, made=made)
    effect = operator is not None and re.search(r"mutant\.\w+\('\w", (folder / runs.SCRIPT).read_text())
    if operator is not None and made.error:
        judged.left_out = LEFT_OUT[0]
    elif effect and not made.had:
        judged.left_out = LEFT_OUT[1]
    records = [read_run(path.parent) for path in (folder / runs.RECORDS).glob("*/run.jsonl")]
    onsets = list(made.onsets)
    for run in sorted(records, key=lambda run: run.info.started if run.info else ""):
        _judge_run(run, judged, onsets)
    judged.findings.sort(key=lambda finding: finding[0])
    for step, _, _ in judged.findings:
        judged.ours.add(step, judged.meta.onset)
    return judged


def _judge_run(run: Run, judged: JudgedProgram, onsets: list[int]) -> None:
    """One record: every optimizer has its own steps, and takes the next of the onsets."""
    judged.problems += run.problems
    samples = list(run.samples())
    trained: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.phase == "train":
            trained.setdefault(sample.optimizer, []).append(sample)
    onset = judged.meta.onset
    since = {name: (onsets.pop(0) if onsets else 0) - onset for name in trained}
    for finding in findings_again(run, samples, judged.problems):
        text = f"{finding.code} {finding.name}: {finding.message}"
        judged.findings.append((finding.step - since.get(finding.optimizer, -onset), finding.name, text))
        judged.num_alarms += finding.streak == 1
    judged.recorded += [f"{f.step} {f.name}" for f in run.findings]
    for optimizer, steps in trained.items():
        judged.num_steps += len(steps)
        for name, make in PEERS.items():
            peer = make()
            for s in steps:
                if peer.update(s.step, s.scalars.get("loss"), s.scalars.get("grad_norm")):
                    judged.alarms[name].add(s.step - since[optimizer], onset)


def judge_safely(folder: Path) -> JudgedProgram:
    logging.getLogger("trimtab").setLevel(logging.CRITICAL)
    return judge(folder)


def judge_half(root: Path, half: str, jobs: int, only: str = "") -> list[JudgedProgram]:
    """All runs of one half; which mutants did harm is said by the clean runs of the same programs in any half."""
    folders = sorted(p.parent for p in (root / half).glob(f"*/{DONE}") if only in p.parent.name)
    known = sets.spreads(runs.load(p.parent) for p in root.glob(f"*/clean__*/{DONE}"))
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            judged = list(pool.map(judge_safely, folders, chunksize=8))
    else:
        judged = [judge_safely(folder) for folder in folders]
    for one in judged:
        _say_harm(one, known)
    return judged


def _say_harm(one: JudgedProgram, known: dict[str, Spread]) -> None:
    if one.meta.healthy or one.left_out or one.made is None:
        return
    spread = known.get(one.meta.family)
    if spread is None:
        one.left_out = LEFT_OUT[2]
    else:
        one.meta = replace(one.meta, harmful=spread.harmed(one.made.final))


def report(half: str, judged: Sequence[JudgedProgram], *, by_operator: bool = False) -> str:
    """The totals of one half."""
    kept: list[Judged] = [one for one in judged if not one.left_out]
    left = Counter(one.left_out for one in judged if one.left_out)
    healthy = [one for one in judged if one.meta.healthy]
    mutants = [one for one in kept if not one.meta.healthy]
    harmful = [one for one in mutants if one.meta.harmful]
    found = [one for one in harmful if one.ours.detected(one.meta.onset)]
    steps = sum(one.num_steps for one in healthy)
    alarms = sum(one.num_alarms for one in healthy)
    ours = score(kept, OURS)

    def recall(kind: str) -> str:
        return str(Share.of(one.ours.detected(one.meta.onset) for one in harmful if one.meta.kind == kind))

    rows = [
        ("recall over harmful mutants", str(ours.harmful)),
        ("of these silent", recall("silent")),
        ("of these loud", recall("loud")),
        ("recall over all mutants, harmless ones included", str(ours.everything)),
        ("harmful and found, first finding rightly named", str(Share.of(one.named() for one in found))),
        (f"harmful and found, rightly named within {NAMED_WITHIN} steps",
         str(Share.of(one.named(NAMED_WITHIN) for one in found))),
        ("median latency of the harmful ones, in steps", number(median(map(latency, found)))),
        ("mutants of a later onset with a finding before it", str(ours.early)),
        ("healthy runs with a finding", str(ours.false_alarms)),
        ("alarms per 10,000 healthy steps", f"{1e4 * alarms / steps:.2f} ({alarms} in {steps:,})" if steps else "–"),
    ]  # fmt: skip
    parts = [
        f"## Mutants, {half} half",
        f"{len(mutants)} mutants of {len({m.meta.family for m in mutants})} programs by "
        f"{len({m.meta.case for m in mutants})} operators, {len(harmful)} of them harmful; "
        f"{len(healthy)} healthy runs. "
        f"Left out: {', '.join(f'{num} {why}' for why, num in sorted(left.items())) or 'none'}.",
        table(("trimtab", "share (95 % interval; count)"), rows),
        by("group", GROUPS, mutants),
        "### Beside the peers, on the same records\n\n" + comparison(kept),
    ]
    if by_operator:
        parts.append("### By operator\n\n" + by("case", (), mutants))
    return "\n\n".join(parts) + "\n"


def header(command: str, num_clean: int) -> str:
    """How the runs were made, and what counts as harm."""
    return (
        f"{time.strftime('%Y-%m-%d')}, trimtab {__version__}, torch {torch.__version__}, CPU, one torch thread; "
        f"`{command}`. {len(OPERATORS)} mutation operators and {len(SHAPES)} sound programs. A mutant is one program "
        "changed at one kind of place, run under the code of `trimtab run --mode observe` with default settings and "
        "recorded; the verdicts are made again from the record. Every second operator of each group and every second "
        "program is held out: the held-out half has only operators and programs on which no rule was made. A mutant is "
        "harmful if the program's own evaluation ends worse than with every clean seed, and worse than their mean by "
        f"{sets.MARGIN_SD:g} standard deviations and {100 * sets.MARGIN_FRAC:g} %; the clean spread of a program comes "
        f"from at least {num_clean} seeds. Mutants that end by an exception are left out: you see those anyway. Found: "
        "a finding from the onset on and none before it. Intervals are Wilson 95 %.\n"
    )


def num_clean(root: Path) -> int:
    """Clean runs of the program that has fewest."""
    made = Counter(runs.load(path.parent).program for path in root.glob(f"*/clean__*/{DONE}"))
    return min(made.values(), default=0)  # of those that were run at all: a half has half of the programs


def misses(judged: Sequence[JudgedProgram]) -> str:
    """Harmful mutants that were missed or wrongly named, and healthy runs with a finding."""
    kept = [one for one in judged if not one.left_out]
    harmful = [one for one in kept if one.meta.harmful]
    missed = [one for one in harmful if one.ours.first is None]
    early = [one for one in harmful if one.ours.early(one.meta.onset)]
    wrong = [one for one in harmful if one.ours.detected(one.meta.onset) and not one.named()]
    alarmed = [one for one in judged if one.meta.healthy and one.findings]
    ended = [one for one in judged if one.meta.error]
    lists = {
        "Missed": missed,
        "A finding before the onset": early,
        "Wrong name first": wrong,
        "False alarms": alarmed,
        "Ended by an exception": ended,
    }
    parts = []
    for title, some in lists.items():
        lines = [f"- {_about(one)}" for one in sorted(some, key=lambda o: (o.meta.case, o.meta.family))]
        parts.append("\n".join([f"### {title}: {len(some)}", "", *lines]))
    return "\n\n".join(parts) + "\n"


def _about(one: JudgedProgram) -> str:
    names = list(dict.fromkeys(name for _, name, _ in one.findings))
    first = f"; first at step {one.findings[0][0]}: {one.findings[0][2][:140]}" if one.findings else ""
    final = one.made.final if one.made is not None else None
    return (
        f"{one.meta.case} in {one.meta.family} ({one.meta.kind or 'healthy'}, final {final}): "
        f"found {', '.join(names) or 'nothing'}{first}{f'; {one.meta.error}' if one.meta.error else ''}"
    )
