"""The command itself: its options, what it leaves behind, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.running import Workplace
from trimtab.checkpoint.lock import FolderLock

BAD = {"NAN_AT": "20"}


def runs_of(workplace: Workplace, folder: str = "trimtab_runs") -> list[Path]:
    return sorted(path.parent for path in (workplace.folder / folder).glob("*/run.jsonl"))


def test_help_names_every_option(workplace: Workplace) -> None:
    said = workplace.guarded("--help", COLUMNS="100")
    assert said.code == 0
    for option in (
        "--mode",
        "--clip",
        "--config",
        "--run-dir",
        "--checkpoint-dir",
        "--quiet",
        "--json",
        "--module",
        "exit code 70",
    ):
        assert option in said.out, option


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nowhere.py",), "nowhere.py"),
        (("-m", "no.such.module"), "no.such"),
        (("bundle/parts",), "__main__"),
        (("--mode", "careless", "plain.py"), "careless"),
        (("--clip", "sometimes", "plain.py"), "sometimes"),
        (("--clip", "-1", "plain.py"), "clip"),
        (("--config", "nowhere.toml", "plain.py"), "nowhere.toml"),
        (("--no-such-option", "plain.py"), "--no-such-option"),
        ((), "SCRIPT"),
    ],
    ids=lambda words: "-".join(words) if isinstance(words, tuple) else "",
)
def test_what_cannot_be_done_is_said_before_anything_runs(
    workplace: Workplace, words: tuple[str, ...], told: str
) -> None:
    said = workplace.guarded(*words)
    assert said.code == 2
    assert told in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
    assert not (workplace.folder / "trimtab_runs").exists()


def test_a_syntax_error_is_told_as_python_tells_it(workplace: Workplace) -> None:
    (workplace.folder / "broken.py").write_text("import os\nmodel = print(2, 1\nx = 3\n")
    plain, guarded = (f("broken.py", own_process=True) for f in (workplace.plain, workplace.guarded))
    assert guarded.code == plain.code == 1
    assert guarded.own_err == plain.own_err
    assert "SyntaxError" in guarded.err


def test_mode_raise_stops_with_its_own_exit_code(workplace: Workplace) -> None:
    said = workplace.guarded("--mode", "raise", "plain.py", **BAD)
    assert said.code == 70
    assert said.own_err == []
    assert any("stopped for its health" in line for line in said.our_err)
    assert "sha256" not in said.out
    assert "step 10" in said.out  # what the script said before


def test_a_script_may_catch_the_stop(workplace: Workplace) -> None:
    source = (workplace.folder / "plain.py").read_text()
    wrapped = "import task\ntry:\n" + "".join(f"    {line}\n" for line in source.splitlines())
    (workplace.folder / "catching.py").write_text(wrapped + "except Exception as stop:\n    print('caught')\n")
    said = workplace.guarded("--mode", "raise", "catching.py", **BAD)
    assert said.code == 0
    assert "caught" in said.out


def test_mode_observe_changes_nothing_even_then(workplace: Workplace) -> None:
    plain = workplace.plain("plain.py", **BAD)
    said = workplace.guarded("--mode=observe", "plain.py", **BAD)
    assert said.out == plain.out
    assert said.finite is False
    assert any("GRAD001" in line for line in said.findings)


def test_clipping_is_asked_for_by_a_number(workplace: Workplace) -> None:
    clipped = workplace.guarded("--clip", "1.0", "plain.py")
    (workplace.folder / "by_hand.py").write_text(
        (workplace.folder / "plain.py")
        .read_text()
        .replace("    optimizer.step()", "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()")
    )
    assert clipped.code == 0
    assert clipped.out != workplace.plain("plain.py").out
    assert clipped.out == workplace.plain("by_hand.py").out


def test_quiet_says_nothing(workplace: Workplace) -> None:
    said = workplace.guarded("--quiet", "plain.py", **BAD)
    assert (said.code, said.err, said.finite) == (0, "", True)
    assert len(runs_of(workplace)) == 1


def test_json_ends_with_one_object(workplace: Workplace) -> None:
    said = workplace.guarded("--json", "gan.py", **BAD)
    told = json.loads(said.err.splitlines()[-1])
    assert told["schema_version"] == 1
    assert sum(sum(run["steps"].values()) for run in told["runs"]) == 60
    assert sum(run["rejected"] for run in told["runs"]) >= 1
    assert {Path(run["run_dir"]) for run in told["runs"]} == set(runs_of(workplace))
    assert "schema_version" not in said.out


def test_disabled_is_the_plain_script(workplace: Workplace) -> None:
    said = workplace.guarded("plain.py", TRIMTAB_DISABLE="1", **BAD)
    assert (said.code, said.err, said.finite) == (0, "", False)
    assert not (workplace.folder / "trimtab_runs").exists()


def test_the_record_left_behind_can_be_read(workplace: Workplace) -> None:
    from trimtab.record.reader import read_run
    from trimtab.report.summary import summarise

    said = workplace.guarded("--dir", "elsewhere", "with_argparse.py", "--epochs", "1", **BAD)
    (folder,) = runs_of(workplace, "elsewhere")
    assert any(f"trimtab report elsewhere/{folder.name}" in line for line in said.our_err)
    run = read_run(folder)
    assert summarise(run) is not None
    assert run.info is not None
    assert run.info.model == "Sequential"
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    assert lines[-1] == lines[-1] | {"rejected": 1, "reason": "closed"}


def test_report_reads_it_too(workplace: Workplace) -> None:
    import subprocess
    import sys

    workplace.guarded("plain.py", **BAD)
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "report"],
        cwd=workplace.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "GRAD001" in done.stdout


def test_options_after_the_script_are_the_scripts(workplace: Workplace) -> None:
    words = (
        "no_torch.py",
        "--mode",
        "raise",
        "--clip",
        "x",
        "--json",
        "--some_flag",
        "true",
        "-m",
        "y",
        "--help",
        "--",
    )
    said = workplace.guarded("--mode", "observe", *words, stdin="")
    assert said.code == 0
    assert repr([*words]) in said.out


def test_words_before_the_script_in_any_spelling(workplace: Workplace) -> None:
    said = workplace.guarded("-q", "--dir=here", "--mode=act", "plain.py", "--quiet", "false")
    assert (said.code, said.err) == (0, "")
    assert len(runs_of(workplace, "here")) == 1


def test_a_double_dash_ends_our_options(workplace: Workplace) -> None:
    said = workplace.guarded("--quiet", "--", "no_torch.py", "--", "x")
    assert said.code == 0
    assert "['no_torch.py', '--', 'x']" in said.out


def test_a_setting_file_is_read(workplace: Workplace) -> None:
    (workplace.folder / "ours.toml").write_text('mode = "observe"\n')
    assert workplace.guarded("--config", "ours.toml", "plain.py", **BAD).finite is False


def test_a_folder_that_cannot_be_written_costs_only_the_record(workplace: Workplace) -> None:
    (workplace.folder / "trimtab_runs").write_text("a file is in the way")
    said = workplace.guarded("plain.py", **BAD)
    assert (said.code, said.finite) == (0, True)
    assert said.own_err == []
    assert any("cannot record" in line for line in said.our_err)


def test_a_script_that_ends_by_itself_leaves_a_complete_record(tmp_path: Path) -> None:
    """Also with verdicts that lag behind: the last one is still under way when the script ends."""
    (tmp_path / "lag.toml").write_text("[tool.trimtab]\nlag = 3\n")
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "torch.manual_seed(0); m = torch.nn.Linear(4, 1); o = torch.optim.SGD(m.parameters(), lr=0.01)\n"
        "for _ in range(12):\n"
        "    o.zero_grad(); m(torch.randn(3, 4)).square().mean().backward(); o.step()\n"
        "sys.exit(4)\n"
    )
    command = [sys.executable, "-m", "trimtab", "run", "--config", "lag.toml", "--dir", "runs", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4
    assert "12 steps, no findings" in done.stderr
    (record,) = (tmp_path / "runs").glob("*/run.jsonl")
    assert record.read_text().splitlines()[-1].startswith('{"t":"close"')


def test_a_folder_that_another_run_saves_to_is_told_before_the_script_is_started(workplace: Workplace) -> None:
    folder = workplace.folder / "kept"
    lock = FolderLock(folder)
    folder.mkdir()
    lock.take("20260101-000000-abcdef")
    try:
        said = workplace.guarded("--checkpoint", "kept", "plain.py")
        assert said.code == 2
        assert f"pid {os.getpid()} " in said.err
        assert "run 20260101-000000-abcdef" in said.err
        assert said.out == ""
    finally:
        lock.release()
    assert workplace.guarded("--checkpoint", "kept", "plain.py").code == 0


def test_of_several_processes_each_has_a_folder_for_its_checkpoints(workplace: Workplace) -> None:
    for rank in ("0", "1"):
        assert workplace.guarded("--checkpoint", "kept", "plain.py", RANK=rank).code == 0
    assert sorted(path.parent.name for path in (workplace.folder / "kept").rglob(".writer")) == ["kept", "rank1"]
