import os
import subprocess
import sys
from pathlib import Path

import pytest

import trimtab as trimtab_package

SOURCE = str(Path(trimtab_package.__file__).parents[1])


def shell(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, from any directory, installed or not."""
    surroundings = {**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "80", **env}
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=surroundings, check=False)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return shell(sys.executable, "-c", code)


def test_help_imports_neither_torch_nor_numpy():
    done = python(
        "import sys\n"
        "from trimtab.cli.app import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "bad = {'torch', 'numpy'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    assert done.returncode == 0, done.stderr
    for name in ("demo", "report", "replay", "rules", "explain"):
        assert name in done.stdout


@pytest.mark.parametrize("command", ["rules", "explain", "report", "replay"])
def test_commands_about_records_do_not_import_torch(command, run_dir):
    words = {"rules": [], "explain": ["GRAD001"]}.get(command, [str(run_dir)])
    done = python(
        "import sys\n"
        "from trimtab.cli.app import main\n"
        f"try: main([{command!r}, *{words!r}])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr


def test_python_dash_m_and_version():
    done = shell(sys.executable, "-m", "trimtab", "--version")
    assert done.stdout.strip() == f"trimtab {trimtab_package.__version__}"


def test_short_help(trimtab):
    said = trimtab("rules", "-h")
    assert said.code == 0
    assert "--select" in said.out


@pytest.mark.parametrize("words", [["nonsense"], ["rules", "--nonsense"], ["explain"], ["report", "--json=maybe"]])
def test_usage_errors_exit_2(trimtab, words):
    said = trimtab(*words)
    assert said.code == 2
    assert said.err
    assert "Traceback" not in said.err


def test_an_unknown_command_is_answered_with_a_near_one(trimtab):
    assert "rules" in trimtab("ruls").err


def test_errors_are_one_clean_line(trimtab):
    said = trimtab("explain", "GRAD01")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert "GRAD001" in said.err
    assert said.err.count("\n") == 1


def test_ctrl_c_exits_130(trimtab, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("trimtab.core.registry.find_rule", interrupt)
    said = trimtab("explain", "GRAD001")
    assert (said.code, said.err) == (130, "interrupted\n")


def test_a_bug_is_not_hidden(monkeypatch):
    from trimtab.cli.app import main

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("trimtab.core.registry.find_rule", fail)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ZeroDivisionError):
        main(["explain", "GRAD001"])


def test_a_closed_pipe_is_no_error():
    done = shell("bash", "-c", f"{sys.executable} -m trimtab rules | head -1")
    assert (done.returncode, done.stderr) == (0, "")


def test_no_color_and_pipes_get_no_escape_codes(run_dir):
    for env in ({}, {"NO_COLOR": "1"}):
        done = shell(sys.executable, "-m", "trimtab", "report", str(run_dir), **env)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        assert max(len(line) for line in done.stdout.splitlines()[:-1]) <= 80


def test_json_holds_what_json_cannot():
    import numpy as np

    from trimtab.cli._shell import plain

    found = plain({"a": np.float32(1.5), "b": np.array([1, 2]), "c": -np.inf, "d": Path("x"), 5: {1}})
    assert found == {"a": 1.5, "b": [1, 2], "c": "-Infinity", "d": "x", "5": [1]}


def test_version_in_process(trimtab):
    assert trimtab("--version").out == f"trimtab {trimtab_package.__version__}\n"
