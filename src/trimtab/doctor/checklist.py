"""What a check says: one line of the checklist, with its evidence, its cause and its cure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from trimtab.doctor.probe import Probe


class Status(StrEnum):
    """How a check ended."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    NA = "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the checklist.

    `evidence` says what was seen, with numbers; `cause` in one sentence what is wrong, `fix` is a line of code.
    `follows` names the trouble that this one is a mere consequence of.

    Example:
        >>> Line(code="WIRE001", name="device-placement", title="one device", status=Status.PASS, evidence="cpu").ok
        True
    """

    code: str
    name: str
    title: str
    status: Status
    evidence: str = ""
    cause: str = ""
    fix: str = ""
    subject: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    follows: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong here."""
        return self.status in (Status.PASS, Status.NA)


class Check(Protocol):
    """One entry of the checklist. `causes` names the troubles that this one brings about."""

    code: ClassVar[str]
    name: ClassVar[str]
    title: ClassVar[str]
    causes: ClassVar[tuple[str, ...]]

    def run(self, probe: Probe) -> Iterator[Line]:
        """Look, and say what was seen."""
        ...


def passed(check: Check, evidence: str, **numbers: float) -> Line:
    """Nothing is wrong, and this is why we think so."""
    return _line(check, Status.PASS, evidence=evidence, numbers=numbers)


def not_applicable(check: Check, reason: str) -> Line:
    """It could not be looked at, or there is nothing to look at: never the same as having passed."""
    return _line(check, Status.NA, evidence=reason, numbers={})


def warned(check: Check, cause: str, evidence: str, fix: str, subject: tuple[str, ...] = (), **numbers: float) -> Line:
    """Something that may be meant so, but costs if it is not."""
    return _line(check, Status.WARN, cause=cause, evidence=evidence, fix=fix, subject=subject, numbers=numbers)


def failed(check: Check, cause: str, evidence: str, fix: str, subject: tuple[str, ...] = (), **numbers: float) -> Line:
    """Something that no training is meant to have."""
    return _line(check, Status.FAIL, cause=cause, evidence=evidence, fix=fix, subject=subject, numbers=numbers)


def _line(
    check: Check,
    status: Status,
    *,
    evidence: str,
    cause: str = "",
    fix: str = "",
    subject: tuple[str, ...] = (),
    numbers: Mapping[str, float],
) -> Line:
    return Line(
        code=check.code,
        name=check.name,
        title=check.title,
        status=status,
        evidence=evidence,
        cause=cause,
        fix=fix,
        subject=subject,
        numbers=dict(numbers),
    )
