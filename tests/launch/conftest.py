from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.running import Nest, Workplace


@pytest.fixture(scope="session")
def nest() -> Iterator[Nest]:
    found = Nest()
    yield found
    found.close()


@pytest.fixture
def workplace(tmp_path: Path, nest: Nest) -> Workplace:
    return Workplace(tmp_path / "place", nest)
