"""Scores doctor: `python -m tests.doctor.score [--only TEXT] [--held] [--verbose]`.

Recall is counted over pairs of a mutation and a project. "First": the first failure, or else the first warning, names
the cause; "best": it has the best of its names; "anywhere": some failure or warning does. A false alarm is any failure
or warning about a sound project.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass

import torch

from tests.doctor.bench import PROJECTS, Mutation, Verdict, examined
from tests.doctor.lookalikes import LOOKALIKES
from tests.doctor.mutations import MUTATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One run of doctor on a broken project."""

    mutation: Mutation
    project: str
    verdict: Verdict

    @property
    def first(self) -> bool:
        """Whether the first alarm names the cause."""
        return self.verdict.first in self.mutation.causes

    @property
    def best(self) -> bool:
        """Whether it has the best name."""
        return self.verdict.first == self.mutation.causes[0]

    @property
    def anywhere(self) -> bool:
        """Whether any alarm does."""
        return any(name in self.mutation.causes for name in self.verdict.fails + self.verdict.warns)


def run_all(only: str = "", *, held: bool | None = None, verbose: bool = False) -> list[Entry]:
    """Every mutation on every project it applies to."""
    entries = []
    for mutation in MUTATIONS:
        if only not in mutation.name or (held is not None and mutation.held is not held):
            continue
        for project in mutation.projects:
            entry = Entry(mutation=mutation, project=project, verdict=examined(project, mutation))
            entries.append(entry)
            if verbose or not entry.first:
                _tell(entry)
    return entries


def false_alarms(only: str = "") -> tuple[int, list[float]]:
    """How many sound projects were accused, and the time of each run."""
    accused, seconds = 0, []
    sound: list[tuple[str, Mutation | None]] = [(p, None) for p in PROJECTS]
    sound += [(p, one) for one in LOOKALIKES for p in one.projects]
    for project, mutation in sound:
        label = project if mutation is None else f"{mutation.name} @ {project}"
        if only not in label:
            continue
        verdict = examined(project, mutation)
        seconds.append(verdict.seconds)
        if verdict.fails or verdict.warns:
            accused += 1
            print(f"FALSE   {label}: fail {list(verdict.fails)} warn {list(verdict.warns)}")
            _evidence(verdict)
    return accused, seconds


def _tell(entry: Entry) -> None:
    kind = "ok" if entry.first else "LATE" if entry.anywhere else "MISS" if not entry.verdict.first else "WRONG"
    said = f"fail {list(entry.verdict.fails)} warn {list(entry.verdict.warns)}"
    print(f"{kind:7} {entry.mutation.name} @ {entry.project}: wanted {'/'.join(entry.mutation.causes)}; {said}")
    if kind != "ok":
        _evidence(entry.verdict)
    sys.stdout.flush()


def _evidence(verdict: Verdict) -> None:
    for line in verdict.report.lines:
        if not line.ok or "the check itself ended" in line.evidence:
            print(f"          {line.status.value} {line.name}: {line.cause} {line.evidence}"[:240])


def main(argv: list[str] | None = None) -> int:
    """Print the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutations and projects with this in their name")
    parser.add_argument("--held", action="store_true", help="only those that no check was made for")
    parser.add_argument("--seen", action="store_true", help="only the others")
    parser.add_argument("--healthy", action="store_true", help="only the sound projects")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not given.held:
        accused, times = false_alarms(given.only)
        print(f"false alarms: {accused} of {len(times)} sound projects")
        _times(times)
    if given.healthy:
        return 0
    held = True if given.held else False if given.seen else None
    entries = run_all(given.only, held=held, verbose=given.verbose)
    for title, part in (
        ("seen", [e for e in entries if not e.mutation.held]),
        ("unseen", [e for e in entries if e.mutation.held]),
    ):
        if part:
            named = {e.mutation.name for e in part}
            print(
                f"{title}: {len(named)} mutations, {len(part)} runs; cause first {sum(e.first for e in part)} "
                f"(best name {sum(e.best for e in part)}), anywhere {sum(e.anywhere for e in part)}, "
                f"no alarm at all {sum(not e.verdict.first for e in part)}"
            )
    _times([e.verdict.seconds for e in entries])
    return 0


def _times(seconds: list[float]) -> None:
    if seconds:
        print(f"seconds per run: median {statistics.median(seconds):.2f}, longest {max(seconds):.2f}")


if __name__ == "__main__":
    raise SystemExit(main())
