from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.running import Nest, Workplace


@pytest.fixture
def workplace(tmp_path: Path, nest: Nest) -> Workplace:
    return Workplace(tmp_path / "place", nest)
