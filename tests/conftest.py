"""Every test runs on one torch thread, in an empty directory, with no TRIMTAB_* setting around it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # two test workers on two cores: more threads only wait for each other


@pytest.fixture(autouse=True)
def clean_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("TRIMTAB_"):
            monkeypatch.delenv(name)
