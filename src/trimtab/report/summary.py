"""What happened in a run: one frozen object, made from its record; findings that began together are one incident."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trimtab.core.errors import RecordError
from trimtab.core.journal import GAP
from trimtab.core.types import Action, Finding, Outcome, Severity, Verdict
from trimtab.record.reader import Run, ranks_in, read_run
from trimtab.report.chart import Curve, make_curve, tail_median

QUIET = 10
"""A run whose last bad step is less than this many steps before its end has not shown that it recovered."""
LOST_FRAC = 0.1
"""A run that ends with more than this part of its progress lost has not recovered."""
BEYOND = 10.0
"""A loss that ends this many times above all it was before the first incident has not come back, whatever it is."""


SKIPPED = ("scaler_skipped", "routine_overflow")
"""Steps that a GradScaler did not let through."""
# How a record ends: as the guard closes it, else with the name of the exception that ended the run.
CLOSED, STOPPED, NOT_CLOSED = "closed", "stopped", "not closed"


class Health(StrEnum):
    """The verdict on a whole run, in a word."""

    EMPTY = "nothing recorded"
    HEALTHY = "healthy"
    RECOVERED = "recovered"
    SICK = "sick"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """The steps of one optimizer."""

    optimizer: str
    num_steps: int
    loss: Curve | None
    val_loss: Curve | None
    grad_norm: Curve | None
    clipped_frac: float | None
    rejected_steps: tuple[int, ...]
    num_applied: int
    num_bad_norms: int

    @property
    def is_sound(self) -> bool:
        """Whether updates reached the weights and every gradient was a number, but for what a scaler provokes."""
        return self.num_applied > 0 and self.num_bad_norms == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One action: when, why, and what became of it (`applied` is None where the record does not say)."""

    at: int
    about: int
    kind: str
    args: Mapping[str, float]
    because: tuple[str, ...]
    applied: bool | None
    detail: str
    optimizer: str

    @property
    def words(self) -> str:
        """What it is, for a person."""
        return str(Action(kind=self.kind, args=self.args))


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """How the run looked after its incidents; `lost` says that it ended worse than it was before them."""

    quiet_steps: int
    loss_before: float
    loss_end: float
    lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRank:
    """Another process of the same run, beside rank 0: what only one of the two found, as `CODE at step N`."""

    rank: int
    also: tuple[str, ...] = ()
    not_found: tuple[str, ...] = ()
    problem: str = ""

    @property
    def words(self) -> str:
        """What is different, for a person; empty where nothing is."""
        parts = [f"also found {_few(self.also)}"] if self.also else []
        parts += [f"did not find {_few(self.not_found)}"] if self.not_found else []
        return " and ".join([*parts, *([self.problem] if self.problem else [])])


NUM_FEW = 4


def _few(found: tuple[str, ...]) -> str:
    more = f" and {len(found) - NUM_FEW} more" if len(found) > NUM_FEW else ""
    return ", ".join(found[:NUM_FEW]) + more


def words_on(ranks: tuple[OtherRank, ...]) -> str:
    """One line about the other processes of a run; empty where there is none.

    Example:
        >>> words_on((OtherRank(rank=1), OtherRank(rank=2, also=("DIST003 at step 7",))))
        '3 ranks: rank 2 also found DIST003 at step 7; the others found what rank 0 did.'
    """
    if not ranks:
        return ""
    different = [f"rank {one.rank} {one.words}" for one in ranks if one.words]
    if not different:
        return f"{len(ranks) + 1} ranks: all found the same."
    same = "; the others found what rank 0 did" if len(different) < len(ranks) else ""
    return f"{len(ranks) + 1} ranks: {'; '.join(different)}{same}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A whole run at a glance."""

    run_id: str
    started: str
    model: str
    num_parameters: int
    mode: str
    health: Health
    headline: str
    tracks: tuple[Track, ...]
    incidents: tuple[Incident, ...]
    deeds: tuple[Deed, ...]
    num_rejected: int
    ending: str
    problems: tuple[str, ...]
    after: Aftermath
    ranks: tuple[OtherRank, ...] = ()


def summarise(run: Run) -> Summary:
    """Reduce the record of a run to what a person wants to know first."""
    names = tuple(run.optimizers) or ("",)
    tracks = tuple(_track(run, name) for name in names)
    incidents = find_incidents(run.verdicts)
    deeds = _deeds(run)
    num_rejected = run.closing.rejected if run.closing is not None else sum(len(t.rejected_steps) for t in tracks)
    ending = run.closing.reason if run.closing is not None else NOT_CLOSED
    after = _aftermath(run, tracks, incidents)
    health = _health(ending, tracks, incidents, deeds, after)
    info = run.info
    return Summary(
        run_id=info.run_id if info is not None else "unknown",
        started=info.started if info is not None else "",
        model=info.model if info is not None else "unknown model",
        num_parameters=info.num_parameters if info is not None else 0,
        mode=str(info.config.get("mode", "")) if info is not None else "",
        health=health,
        headline=_headline(health, tracks, incidents, num_rejected, after, ending),
        tracks=tracks,
        incidents=incidents,
        deeds=deeds,
        num_rejected=num_rejected,
        ending=ending,
        problems=tuple(run.problems),
        after=after,
        ranks=tuple(_other(rank, folder, run) for rank, folder in ranks_in(run.folder).items()),
    )


def _other(rank: int, folder: Path, first: Run) -> OtherRank:
    """Compare the findings of another process with those of the first."""
    try:
        run = read_run(folder)
    except RecordError as error:
        return OtherRank(rank=rank, problem=f"has no record that could be read ({error})")
    here, there = ({f"{f.code} at step {f.step}": None for f in one.findings} for one in (first, run))
    return OtherRank(
        rank=rank,
        also=tuple(name for name in there if name not in here),
        not_found=tuple(name for name in here if name not in there),
        problem=_ended_otherwise(first, run),
    )


def _ended_otherwise(first: Run, run: Run) -> str:
    ends = [NOT_CLOSED if one.closing is None else one.closing.reason for one in (first, run)]
    if ends[0] == ends[1]:
        return ""
    return "did not close its record" if ends[1] == NOT_CLOSED else f"ended with {ends[1]}"


def _track(run: Run, name: str) -> Track:
    steps, losses = run.series("loss", optimizer=name)
    coef = run.series("clip_coef", optimizer=name)[1]
    coef = coef[np.isfinite(coef)]
    at, rejected = run.series("rejected", optimizer=name)
    kept_out = at[rejected > 0]
    all_steps, norms = run.series("grad_norm", optimizer=name)
    skips = [run.series(why, optimizer=name) for why in SKIPPED]
    skipped = np.concatenate([s[v > 0] for s, v in skips])
    tried = _distinct(all_steps if all_steps.size else steps)
    num = run.closing.steps.get(name, 0) if run.closing is not None else 0
    return Track(
        optimizer=name,
        num_steps=max(num, len(_distinct(run.steps(name)))),
        loss=make_curve(steps, losses),
        val_loss=make_curve(*run.series("val_loss", optimizer=name, phase="val")),
        grad_norm=make_curve(all_steps, norms),
        clipped_frac=float(np.mean(coef < 1.0)) if coef.size else None,
        rejected_steps=tuple(kept_out.tolist()),
        num_applied=int((~np.isin(tried, np.concatenate([skipped, kept_out]))).sum()),
        num_bad_norms=int((~np.isin(all_steps[~np.isfinite(norms)], skipped)).sum()),
    )


def _distinct(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each step once, in order; steps mostly come sorted, which makes this far faster than hashing them."""
    steps = np.sort(steps, kind="stable")
    return steps[np.append(True, np.diff(steps) > 0)] if steps.size else steps


def _deeds(run: Run) -> tuple[Deed, ...]:
    became: dict[tuple[int, str, str], list[Outcome]] = {}
    for o in run.outcomes:  # what was done, and later what came of it
        became.setdefault((o.at, o.action.kind, o.optimizer), []).append(o)
    deeds = []
    for decision in run.decisions:
        for action in decision.actions:
            known = became.get((decision.at, action.kind, decision.optimizer), [])
            if action.kind == "skip_data" and not known:
                continue  # it is not known which samples they were: there was nothing to do
            deeds.append(
                Deed(
                    at=decision.at,
                    about=decision.about,
                    kind=action.kind,
                    args=dict(action.args),
                    because=decision.because,
                    applied=known[0].applied if known else None,
                    detail="; ".join(o.detail for o in known if o.detail),
                    optimizer=decision.optimizer,
                )
            )
    return tuple(deeds)


def _aftermath(run: Run, tracks: tuple[Track, ...], incidents: tuple[Incident, ...]) -> Aftermath:
    """Compare the end with the time before the first incident, for the optimizer that was hit first."""
    if not incidents:
        return Aftermath(quiet_steps=tracks[0].num_steps, loss_before=math.nan, loss_end=math.nan, lost=False)
    first = incidents[0]
    track = next((t for t in tracks if t.optimizer == first.optimizer), tracks[0])
    last_bad = max(i.last_step for i in incidents if i.optimizer == first.optimizer)
    steps, losses = run.series("loss", optimizer=first.optimizer)
    at, values = np.asarray(steps), np.asarray(losses, dtype=np.float64)
    # The best level before any incident: a later incident is measured against what had been reached by then.
    levels = [tail_median(values[at < i.onset], QUIET) for i in incidents if i.optimizer == first.optimizer]
    before = min((v for v in levels if math.isfinite(v)), default=math.nan)
    end = tail_median(values, QUIET) if values.size and math.isfinite(values[-1]) else math.nan
    lost = bool(values.size) and not math.isfinite(end)
    if math.isfinite(before) and math.isfinite(end):
        early = values[at < first.onset]
        early = early[np.isfinite(early)]
        noise = (
            3 * float(np.median(np.abs(early[-2 * QUIET :] - np.median(early[-2 * QUIET :])))) if early.size else 0.0
        )
        progress = float(early[0]) - before if early.size else 0.0
        rose = end - before > max(LOST_FRAC * progress, noise, 1e-12)
        beyond = bool(early.size) and float(early.min()) > 0 and end > BEYOND * float(early.max())
        lost = beyond or (rose and _objective_is_fixed(run, first.optimizer))
    return Aftermath(quiet_steps=max(track.num_steps - 1 - last_bad, 0), loss_before=before, loss_end=end, lost=lost)


def _objective_is_fixed(run: Run, optimizer: str) -> bool:
    """Whether the loss measures something that stays the same, so that it should be lower at the end.

    Returns that grow raise the loss of a value, and in a game of two models one wins what the other loses.
    """
    known = ("fixed", "bounded")  # the second alone stands in older records
    known_here = any(len(run.series(name, optimizer=optimizer)[0]) for name in known)
    return known_here and not optimizer and not len(run.series("moving", optimizer=optimizer)[0])


def _health(
    ending: str, tracks: tuple[Track, ...], incidents: tuple[Incident, ...], deeds: Iterable[Deed], after: Aftermath
) -> Health:
    if ending == STOPPED or any(d.kind == "stop" and d.applied for d in deeds):
        return Health.STOPPED
    if ending == CLOSED and not incidents and not any(t.num_steps for t in tracks):
        return Health.EMPTY
    if ending != CLOSED:
        return Health.UNFINISHED if ending == NOT_CLOSED else Health.INTERRUPTED
    if not incidents:
        # Whatever the rules said, or were configured not to say: such a run has not been seen to learn.
        return Health.HEALTHY if all(t.is_sound for t in tracks if t.num_steps) else Health.SICK
    idle = any(t.num_steps and not t.num_applied for t in tracks)
    return Health.SICK if after.lost or after.quiet_steps < QUIET or idle else Health.RECOVERED


def _headline(
    health: Health,
    tracks: tuple[Track, ...],
    incidents: tuple[Incident, ...],
    num_rejected: int,
    after: Aftermath,
    ending: str,
) -> str:
    steps = sum(t.num_steps for t in tracks)
    loss = tracks[0].loss
    went = f"loss {loss.first:.3g} → {loss.last:.3g}" if loss is not None else "no loss was recorded"
    kept = f", {count(num_rejected, 'update')} kept out of the weights" if num_rejected else ""
    counts = f"{count(len(incidents), 'incident')} in {count(steps, 'step')}{kept}"
    if health is Health.HEALTHY:
        return f"{count(steps, 'step')}, no findings; {went}."
    if health is Health.RECOVERED:
        back = (
            f"; the loss was {after.loss_before:.3g} before and is {after.loss_end:.3g} at the end"
            if math.isfinite(after.loss_before) and math.isfinite(after.loss_end)
            else ""
        )
        return f"{counts}; the last {after.quiet_steps} steps were quiet{back}."
    if health is Health.EMPTY:
        return "No training step was recorded."
    if health is Health.SICK and not incidents:
        return f"{count(steps, 'step')}, no findings, and yet {_unsound(tracks)}."
    if health is Health.SICK:
        why = (
            "the loss is not finite at the end"
            if math.isnan(after.loss_end) and after.lost
            else f"the loss has not come back ({after.loss_before:.3g} before, {after.loss_end:.3g} at the end)"
            if after.lost
            else "the trouble lasted to the end"
            if after.quiet_steps < QUIET
            else _unsound(tracks)
        )
        return f"{counts}; {why}."
    if health is Health.STOPPED:
        return f"{counts}; the run was stopped for its health."
    seen = counts if incidents else f"{count(steps, 'step')}, no findings so far; {went}"
    if ending == NOT_CLOSED:
        return f"{seen}; the record was not closed: the run was killed, or is still going."
    return f"{seen}; the run ended with {ending}."


def _unsound(tracks: tuple[Track, ...]) -> str:
    """What speaks against a run that no rule spoke about."""
    for track in tracks:
        of = f" of optimizer {track.optimizer}" if track.optimizer else ""
        if track.num_steps and not track.num_applied:
            return f"not one update{of} reached the weights"
        if track.num_bad_norms:
            return f"{count(track.num_bad_norms, 'gradient norm')}{of} were NaN or Inf"
    return "nothing is known of its gradients"


def count(num: int, what: str) -> str:
    """A number and its noun.

    Example:
        >>> count(1, "tensor"), count(2000, "tensor")
        ('1 tensor', '2,000 tensors')
    """
    return f"{num:,} {what}" if num == 1 else f"{num:,} {what}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One rule firing at a step and the steps after it: its first finding, and how long it lasted."""

    finding: Finding
    last_step: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Troubles of one optimizer that overlap in time, in the order in which they began."""

    onset: int
    last_step: int
    optimizer: str
    troubles: tuple[Trouble, ...]

    @property
    def cause(self) -> Finding:
        """What began first: of findings at the same step, the one the rules put first."""
        return self.troubles[0].finding

    @property
    def severity(self) -> Severity:
        """The gravest severity in it."""
        return max(t.finding.severity for t in self.troubles)


def find_incidents(verdicts: Iterable[Verdict]) -> tuple[Incident, ...]:
    """Group all findings of a run into incidents, in the order of their onset."""
    by_optimizer: dict[str, list[Trouble]] = {}
    for trouble in find_troubles(verdicts):
        by_optimizer.setdefault(trouble.finding.optimizer, []).append(trouble)
    found: list[Incident] = []
    for optimizer, troubles in by_optimizer.items():
        groups: list[list[Trouble]] = []
        reach = -1
        for trouble in sorted(troubles, key=lambda t: t.finding.step):  # stable: the rules' order stays
            if not groups or _began(trouble.finding) > reach + GAP:
                groups.append([])
                reach = trouble.last_step
            groups[-1].append(trouble)
            reach = max(reach, trouble.last_step)
        found += [
            Incident(
                onset=g[0].finding.step,
                last_step=max(t.last_step for t in g),
                optimizer=optimizer,
                troubles=tuple(g),
            )
            for g in groups
        ]
    return tuple(sorted(found, key=lambda i: i.onset))


def _began(finding: Finding) -> float:
    """The step at which it began: a climb is seen only after a while, and its finding says since when."""
    since = finding.evidence.get("onset", math.nan)
    return since if 0 <= since < finding.step else finding.step


def find_troubles(verdicts: Iterable[Verdict]) -> tuple[Trouble, ...]:
    """Join the findings of one rule that continue each other (their `streak` goes on counting)."""
    troubles: list[Trouble] = []
    newest: dict[tuple[str, str, str], int] = {}
    for verdict in verdicts:
        for finding in verdict.findings:
            key = (verdict.phase, finding.optimizer, finding.code)
            if finding.streak > 1 and key in newest:
                at = newest[key]
                old = troubles[at]
                troubles[at] = replace(old, last_step=finding.step, num_steps=old.num_steps + 1)
            else:
                newest[key] = len(troubles)
                troubles.append(Trouble(finding=finding, last_step=finding.step, num_steps=finding.streak))
    return tuple(troubles)
