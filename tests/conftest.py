"""Every test runs on one torch thread, seeded, in an empty directory, with no TRIMTAB_* setting around it."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.run.running import Nest

# Timing never decides a test: neither a slow example nor a slow draw is a failure on a busy machine.
settings.register_profile("trimtab", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("lean", parent=settings.get_profile("trimtab"), max_examples=10)  # where lines are counted
settings.load_profile("trimtab")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is imported by now stays: no later collection need look at it, nor a fork copy it for that


@pytest.fixture(scope="session")
def nest() -> Iterator[Nest]:
    """Forks of a process that has imported PyTorch, for programs that need a process of their own."""
    found = Nest()
    yield found
    found.close()


@pytest.fixture(autouse=True, scope="session")
def usual_signals() -> Iterator[None]:
    """Started by `nohup`, in the background or by some CI systems, signals are ignored, here and in every child."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # two test workers on two cores: more threads only wait for each other


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Only a power failure would show what a sync did: `tests/checkpoint/power.py` has its own; errors stay errors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True)
def clean_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch

    log = logging.getLogger("trimtab")
    handlers = list(log.handlers)
    # A fixture that is made once for many tests, or a test, may have silenced it or led it elsewhere.
    log.setLevel(logging.NOTSET)
    log.propagate, log.disabled = True, False
    logging.disable(logging.NOTSET)

    # What a test does not seed itself must not differ from run to run. For each test the stack is not written down, as
    # `torch.manual_seed` does where CUDA may come later: that took 11 s in all.
    torch.default_generator.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("TRIMTAB_"):
            monkeypatch.delenv(name)
    yield
    log.handlers[:] = handlers
