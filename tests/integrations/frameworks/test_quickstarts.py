"""The quickstarts of the documentation: few added lines, and each one runs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from trimtab.record.reader import read_run

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from docs_blocks import DOCS, blocks  # noqa: E402

PAGE = DOCS / "how-to" / "frameworks.md"
FILES = {block.argument: block.text for block in blocks(PAGE) if block.kind == "file"}
NEEDS = {
    "quickstart_pytorch.py": "torch",
    "quickstart_lightning.py": "lightning",
    "quickstart_fabric.py": "lightning",
    "quickstart_hf.py": "transformers",
    "quickstart_accelerate.py": "accelerate",
}


def test_every_quickstart_is_tried() -> None:
    assert set(FILES) == set(NEEDS)


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_at_most_four_lines_are_added(name: str) -> None:
    added = [line for line in FILES[name].splitlines() if "# added" in line]
    assert 1 < len(added) <= 4
    assert all("trimtab" in line or "guard" in line for line in added)
    rest = "\n".join(line for line in FILES[name].splitlines() if "# added" not in line)
    assert "trimtab" not in rest
    assert "guard" not in rest


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_it_runs_and_leaves_a_record(name: str, tmp_path: Path) -> None:
    if find_spec(NEEDS[name]) is None and "frameworks" not in os.environ.get("TRIMTAB_REQUIRE", ""):
        pytest.skip(f"{NEEDS[name]} is not installed")
    script = tmp_path / name
    script.write_text(FILES[name])
    where = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **where}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "trimtab_runs").iterdir()
    steps, losses = read_run(folder).series("loss")
    assert len(steps) >= 20
    assert losses[-5:].mean() < losses[:5].mean()
