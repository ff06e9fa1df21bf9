"""Nothing is imported before the script that it might want to set up first."""

from __future__ import annotations

from tests.run.running import Workplace

LATE = ("numpy", "torch")


def test_a_script_finds_no_numerics_imported(workplace: Workplace) -> None:
    script = f"import sys\nprint([name for name in {LATE!r} if name in sys.modules])\n"
    (workplace.folder / "first.py").write_text(script)
    said = workplace.guarded("first.py", own_process=True)
    assert said.out == workplace.plain("first.py", own_process=True).out


def test_threads_set_before_the_import_count(workplace: Workplace) -> None:
    script = "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint(torch.get_num_threads())\n"
    (workplace.folder / "threads.py").write_text(script)
    assert workplace.guarded("threads.py", own_process=True, OMP_NUM_THREADS="2").out == "1\n"
