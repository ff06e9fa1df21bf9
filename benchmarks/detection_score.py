"""What a recorded run is judged to be: the verdicts made again from its samples, the peers' alarms, and the score."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detection_signals import SIGNALS, first_jump
from peers import PEERS

from trimtab.advice.recommendations import adviser_for
from trimtab.core.config import Config
from trimtab.core.pipeline import Brain
from trimtab.core.types import Finding, Sample
from trimtab.record.reader import Run, read_run

META = "meta.json"
OURS = "trimtab"
NAMED_WITHIN = 10
RISE = 3.0
NUM_USUAL = 5
KINDS = ("nonfinite", "abrupt", "wiring", "drift")
GROUPS = ("numerics", "dynamics", "wiring", "amp", "data", "state")


@dataclass(frozen=True)
class Meta:
    """What was run, and whether it did harm."""

    case: str
    family: str
    seed: int
    half: str
    healthy: bool
    group: str
    names: tuple[str, ...] = ()
    kind: str = ""
    onset: int = 0
    harmful: bool = False
    error: str = ""

    def __str__(self) -> str:
        return f"{self.case}, {self.family}, seed {self.seed}"


@dataclass
class Alarms:
    """When one detector alarmed in one run: ever, and from the onset on."""

    first: int | None = None
    since_onset: int | None = None

    def add(self, step: int, onset: int) -> None:
        self.first = step if self.first is None else self.first
        if step >= onset and self.since_onset is None:
            self.since_onset = step

    def early(self, onset: int) -> bool:
        """Whether it alarmed while all was well."""
        return self.first is not None and self.first < onset

    def detected(self, onset: int) -> bool:
        """Whether it alarmed from the onset on, and not before."""
        return self.since_onset is not None and not self.early(onset)


@dataclass
class Judged:
    """One run as trimtab and its peers see it."""

    meta: Meta
    findings: list[tuple[int, str, str]] = field(default_factory=list)  # step, name, text; of all steps
    alarms: dict[str, Alarms] = field(default_factory=dict)
    blow_up: int | None = None
    jumps: dict[str, int | None] = field(default_factory=dict)  # of the signals that may warn early
    num_steps: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ours(self) -> Alarms:
        return self.alarms[OURS]

    @property
    def since_onset(self) -> list[tuple[int, str, str]]:
        return [f for f in self.findings if f[0] >= self.meta.onset]

    def named(self, within: int = 0) -> bool:
        """Whether a finding within so many steps of the first one (from the onset on) has an accepted name."""
        first = self.ours.since_onset
        return first is not None and any(n in self.meta.names for s, n, _ in self.since_onset if s <= first + within)


def load_meta(folder: Path) -> Meta:
    data: dict[str, Any] = json.loads((folder / META).read_text())
    return Meta(**{**data, "names": tuple(data["names"])})


def judge(folder: Path) -> Judged:
    """Make the verdicts of one trace again under the rules as they are now, and ask the peers."""
    meta = load_meta(folder)
    judged = Judged(meta, alarms={name: Alarms() for name in (OURS, *PEERS)})
    run = read_run(folder)
    judged.problems += run.problems
    samples = list(run.samples())
    for finding in sorted(findings_again(run, samples, judged.problems), key=lambda f: f.step):
        judged.findings.append((finding.step, finding.name, f"{finding.code} {finding.name}: {finding.message}"))
        judged.ours.add(finding.step, meta.onset)
    trained = [s for s in samples if s.phase == "train" and s.optimizer == samples[0].optimizer]
    judged.num_steps = len(trained)
    for name, make in PEERS.items():
        peer = make()
        for s in trained:
            if peer.update(s.step, s.scalars.get("loss"), s.scalars.get("grad_norm")):
                judged.alarms[name].add(s.step, meta.onset)
    judged.blow_up = _blow_up(trained, meta.onset)
    judged.jumps = {signal: first_jump(signal, trained, 0 if meta.healthy else meta.onset) for signal in SIGNALS}
    return judged


def findings_again(run: Run, samples: list[Sample], problems: list[str]) -> Iterator[Finding]:
    """What the rules as they are now find in a recorded run."""
    config = Config.from_dict(run.info.config) if run.info is not None else Config(mode="observe")
    brains: dict[str, Brain] = {}
    for sample in samples:
        if sample.optimizer not in brains:
            brains[sample.optimizer] = Brain.from_config(config, adviser_for(config))
        yield from brains[sample.optimizer].advance(sample, seen_at=sample.step)[0].findings
    # A step that raised an exception leaves no sample: what was said about it is only in the record.
    yield from (f for verdict in run.verdicts for f in verdict.findings if f.code.startswith("STEP"))
    problems += [f"rule {code} failed" for brain in brains.values() for code in sorted(brain._broken)]


def _blow_up(trained: list[Sample], onset: int) -> int | None:
    """The first step from the onset on whose loss is not finite or far above what it was before."""
    losses = [(s.step, s.scalars["loss"]) for s in trained if "loss" in s.scalars]
    before = [loss for step, loss in losses if step < onset and math.isfinite(loss)]
    if len(before) < NUM_USUAL:  # a fault from the first step on: the level the run started from
        before = [loss for _, loss in losses[:NUM_USUAL] if math.isfinite(loss)]
    limit = RISE * statistics.median(before) if before else math.inf
    return next((step for step, loss in losses if step >= onset and not loss <= limit), None)


def judge_safely(folder: Path) -> Judged:
    """Judge a trace; one that cannot be judged is a problem to be reported, not the end of the others."""
    logging.getLogger("trimtab").setLevel(logging.CRITICAL)
    try:
        return judge(folder)
    except Exception as error:
        problem = f"cannot be judged: {type(error).__name__}: {error}"
        return Judged(load_meta(folder), alarms={name: Alarms() for name in (OURS, *PEERS)}, problems=[problem])


def traces(root: Path, half: str, only: str = "") -> list[Path]:
    """The complete traces of one half."""
    return sorted(p.parent for p in (root / half).glob(f"*/{META}") if only in p.parent.name)


def judge_all(folders: list[Path], jobs: int) -> list[Judged]:
    """Judge many traces, several at a time."""
    if jobs <= 1 or len(folders) < 8:
        return [judge_safely(folder) for folder in folders]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(judge_safely, folders, chunksize=8))


def wilson(hits: int, num: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share by Wilson's score method."""
    if num == 0:
        return 0.0, 1.0
    share, extra = hits / num, z * z / num
    centre = (share + extra / 2) / (1 + extra)
    half = z * math.sqrt(share * (1 - share) / num + extra / (4 * num)) / (1 + extra)
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class Share:
    """So many of so many."""

    hits: int
    num: int

    @classmethod
    def of(cls, flags: Iterable[bool]) -> Share:
        known = list(flags)
        return cls(sum(known), len(known))

    def __str__(self) -> str:
        if not self.num:
            return "–"
        low, high = wilson(self.hits, self.num)
        return f"{self.hits / self.num:.3f} ({low:.3f} to {high:.3f}; {self.hits}/{self.num})"


@dataclass(frozen=True)
class Row:
    """One detector over one half."""

    harmful: Share
    harmful_lenient: Share
    everything: Share
    false_alarms: Share
    early: Share
    latency: float | None


def score(runs: list[Judged], detector: str) -> Row:
    """How one detector did."""
    faults = [r for r in runs if not r.meta.healthy]
    harmful = [r for r in faults if r.meta.harmful]
    found = [r for r in faults if r.alarms[detector].detected(r.meta.onset)]
    return Row(
        harmful=Share.of(r.alarms[detector].detected(r.meta.onset) for r in harmful),
        harmful_lenient=Share.of(r.alarms[detector].since_onset is not None for r in harmful),
        everything=Share(len(found), len(faults)),
        false_alarms=Share.of(r.alarms[detector].first is not None for r in runs if r.meta.healthy),
        early=Share.of(r.alarms[detector].early(r.meta.onset) for r in faults if r.meta.onset > 0),
        latency=median(latency(r, detector) for r in found),
    )


def latency(run: Judged, detector: str = OURS) -> int:
    """Steps from the onset to the first alarm, of a run in which there is one."""
    return (run.alarms[detector].since_onset or 0) - run.meta.onset


def median(values: Iterable[float]) -> float | None:
    """The median, None of nothing."""
    known = list(values)
    return statistics.median(known) if known else None
