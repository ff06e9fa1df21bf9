from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def paths_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A target's folder becomes importable when it is loaded: not for the tests after this one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("targets", None)
