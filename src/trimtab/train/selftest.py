"""Whether trimtab does what it promises on this very machine: every part is tried, and what breaks is told."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from trimtab import __version__
from trimtab.train.selftest_guard import GUARD
from trimtab.train.selftest_kit import Facts, Group, Part, SelfTestError
from trimtab.train.selftest_losses import LOSSES
from trimtab.train.selftest_monitor import MONITOR

GROUPS: tuple[Group, ...] = (MONITOR, GUARD, LOSSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one part on one device; `problem` is empty where it passed."""

    heading: str
    name: str
    device: str
    passed: bool
    problem: str = ""
    facts: Facts = field(default_factory=dict)


def run_selftest(groups: Sequence[Group] | None = None, devices: Sequence[str] | None = None) -> Iterator[Result]:
    """Try every part on the CPU, and on the accelerator where there is one. A part that breaks is a failed part.

    Example:
        >>> all(result.passed for result in run_selftest(devices=["cpu"]))
        True
    """
    for group in GROUPS if groups is None else groups:
        for device in map(torch.device, devices or available()):
            for part in group.parts:
                yield _try(group, part, device)


def available() -> list[str]:
    """The CPU, and the accelerator where there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def versions() -> dict[str, str]:
    """What is tested, and on what."""
    return {"trimtab": __version__, "torch": torch.__version__, "Python": platform.python_version()}


def _try(group: Group, part: Part, device: torch.device) -> Result:
    facts: Facts = {}
    problem = ""
    try:
        with torch.random.fork_rng(), _quiet():
            torch.manual_seed(0)
            facts = part.body(device)
    except SelfTestError as error:
        problem = str(error)
    except Exception as error:  # whatever it is, it is told, and the other parts are tried
        problem = f"{type(error).__name__}: {error}"
    return Result(
        heading=group.heading, name=part.name, device=str(device), passed=not problem, problem=problem, facts=facts
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """The findings that are provoked here are no news for a log."""
    logger = logging.getLogger("trimtab")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
