"""Verdicts and decisions made again from a record: proof that they follow from it, and a way to try other settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.advice.recommendations import adviser_for
from trimtab.core.config import Config
from trimtab.core.errors import RecordError, TrimtabError
from trimtab.core.pipeline import Brain
from trimtab.core.types import Decision, Finding, Verdict
from trimtab.record.reader import Run, find_run, read_run

NUM_DIFFERENCES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay made, and where it differs from the record.

    `exact_from` says for each optimizer from which step on the replay saw everything the run saw (0: all of it;
    None: nowhere, the record is too thin).
    """

    identical: bool
    verdicts: tuple[Verdict, ...]
    decisions: tuple[Decision, ...]
    differences: tuple[str, ...]
    num_differences: int
    exact_from: Mapping[str, int | None]
    num_samples: int
    other_config: bool


def replay(folder: Path | str, config: Config | None = None) -> Replay:
    """Make the verdicts and decisions of a run again, with its own settings or with others.

    RecordError where there is no record, or too little of it to start from.
    """
    run = read_run(find_run(folder))
    settings = config if config is not None else _settings(run)
    starts = {name: _start(run, name) for name in run.optimizers}
    brains: dict[str, Brain] = {}
    seen_at = {_key(v.optimizer, v.phase, v.step): v.seen_at for v in run.verdicts}
    verdicts: list[Verdict] = []
    decisions: list[Decision] = []
    num_samples = 0
    for sample in run.samples():
        name = sample.optimizer
        if name not in brains:
            if sample.step != starts[name] or sample.phase != "train":
                continue  # before the first step from which nothing is missing
            brains[name] = _brain(run, settings, name, sample.step)
        num_samples += 1
        at = seen_at.get(_key(sample.optimizer, sample.phase, sample.step), sample.step)
        with _explaining(f"step {sample.step} of {run.folder} cannot be judged again"):
            verdict, decision = brains[name].advance(sample, seen_at=at)
        if verdict:
            verdicts.append(verdict)
        if decision.actions:
            decisions.append(decision)
    if not num_samples:
        raise RecordError(
            f"no step of {run.folder} can be judged again: {len(run)} samples are left, and none of them follows a "
            "saved state without a gap; `trimtab report` shows what was recorded"
        )
    differences = [
        *_compare_verdicts(run, verdicts, starts),
        *_compare_decisions(run, decisions, starts),
    ]
    return Replay(
        identical=not differences,
        verdicts=tuple(verdicts),
        decisions=tuple(decisions),
        differences=tuple(differences[:NUM_DIFFERENCES]),
        num_differences=len(differences),
        exact_from=starts,
        num_samples=num_samples,
        other_config=config is not None,
    )


def _settings(run: Run) -> Config:
    if run.info is None:
        raise RecordError(
            "the record has lost its first line, so its settings are unknown; give them with --config FILE"
        )
    return Config.from_dict(run.info.config)


def _start(run: Run, optimizer: str) -> int | None:
    """Where a replay can start: with the record, or at the first state from which on no sample is missing."""
    exact = run.exact_from(optimizer)
    if exact is None:
        return None
    first = next(s for s in run.samples() if s.optimizer == optimizer and s.phase == "train")
    if first.step == exact and run.thinned is None:
        return exact
    return min((s.step for s in run.states if s.optimizer == optimizer and s.step >= exact), default=None)


def _brain(run: Run, config: Config, optimizer: str, start: int) -> Brain:
    """A brain as it was before step `start`: as the record has it, or fresh."""
    brain = Brain.from_config(config, adviser_for(config))
    state = next((s for s in run.states if s.optimizer == optimizer and s.step == start), None)
    if state is not None:
        with _explaining(f"the state before step {start} of {run.folder} cannot be read"):
            brain.load_state_dict(state.state)
    return brain


@contextmanager
def _explaining(what: str) -> Iterator[None]:
    """A record may be damaged, or made by somebody else, in ways that only show when it is used."""
    try:
        yield
    except TrimtabError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise RecordError(f"{what} ({why}): the record is damaged there") from error


Key = tuple[str, str, int]


def _key(optimizer: str, phase: str, step: int) -> Key:
    return optimizer, phase, step


def _inside(starts: Mapping[str, int | None], optimizer: str, step: int) -> bool:
    start = starts.get(optimizer)
    return start is not None and step >= start


def _compare_verdicts(run: Run, made: list[Verdict], starts: Mapping[str, int | None]) -> list[str]:
    old = {_key(v.optimizer, v.phase, v.step): v for v in run.verdicts if v and _inside(starts, v.optimizer, v.step)}
    new = {_key(v.optimizer, v.phase, v.step): v for v in made}
    return [
        line
        for key in sorted(old.keys() | new.keys(), key=lambda k: (k[2], k[0], k[1]))
        for line in _compare(key, old.get(key), new.get(key))
    ]


def _compare(key: Key, old: Verdict | None, new: Verdict | None) -> list[str]:
    was = {f.code: f for f in old.findings} if old is not None else {}
    now = {f.code: f for f in new.findings} if new is not None else {}
    where = _where(key[0], key[2])
    lines = [f"{where}: {c} {was[c].name} was recorded, the replay does not find it" for c in was if c not in now]
    lines += [f"{where}: {c} {now[c].name} is found by the replay only: {now[c].message}" for c in now if c not in was]
    for code in was:
        if code in now and (parts := _differing(was[code], now[code])):
            lines.append(f"{where}: {code} {was[code].name} differs in its {', '.join(parts)}")
    return lines


def _differing(old: Finding, new: Finding) -> list[str]:
    """In which parts two findings differ, with both where a line has room for them; NaN is equal to NaN."""
    parts = []
    if old.message != new.message:
        parts.append(f"message: {old.message!r} → {new.message!r}")
    changed = [f"{k} {a} → {b}" for k, (a, b) in _numbers(old, new).items() if a != b]
    if changed and not parts:
        parts.append(f"evidence ({'; '.join(changed)})")
    parts += [name for name in ("severity", "subject", "streak", "advice") if getattr(old, name) != getattr(new, name)]
    return parts


def _numbers(old: Finding, new: Finding) -> dict[str, tuple[str, str]]:
    names = sorted({*old.evidence, *new.evidence})
    return {name: (_number(old.evidence.get(name)), _number(new.evidence.get(name))) for name in names}


def _number(value: float | None) -> str:
    return "nothing" if value is None else repr(float(value))


def _compare_decisions(run: Run, made: list[Decision], starts: Mapping[str, int | None]) -> list[str]:
    old = _by_step(d for d in run.decisions if _inside(starts, d.optimizer, d.about))
    new = _by_step(made)
    return [
        f"{_where(*key)}: decided {_deeds(old.get(key))}, the replay {_deeds(new.get(key))}"
        for key in sorted(old.keys() | new.keys(), key=lambda k: (k[1], k[0]))
        if old.get(key) != new.get(key)
    ]


def _by_step(decisions: Iterable[Decision]) -> dict[tuple[str, int], list[Decision]]:
    """Decisions by what they are about; without `at`, which depends on the lag and not on what was decided."""
    found: dict[tuple[str, int], list[Decision]] = {}
    for decision in decisions:
        if decision.actions:
            found.setdefault((decision.optimizer, decision.about), []).append(replace(decision, at=0))
    return found


def _where(optimizer: str, step: int) -> str:
    return f"step {step} ({optimizer})" if optimizer else f"step {step}"


def _deeds(decisions: Iterable[Decision] | None) -> str:
    actions = [a for d in decisions or () for a in d.actions]
    return "; ".join(map(str, actions)) or "nothing"
