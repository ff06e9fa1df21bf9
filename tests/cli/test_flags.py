"""The same flags everywhere, errors for machines, settings that `trimtab init` writes, completion."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from trimtab.cli.app import app
from trimtab.cli.init import EXAMPLES, MEANINGS, add_settings, settings_file, settings_template
from trimtab.core.config import Config, discover
from trimtab.core.errors import ConfigError


def leaves(command: object, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], object]]:
    subs = getattr(command, "commands", {})
    return [leaf for name, sub in subs.items() for leaf in leaves(sub, (*path, name))] if subs else [(path, command)]


LEAVES = leaves(typer.main.get_command(app))


@pytest.mark.parametrize(("path", "command"), LEAVES, ids=[" ".join(p) for p, _ in LEAVES])
def test_every_command_has_the_same_flags(trimtab, path, command):
    for word in ("-h", "--help"):
        said = trimtab(*path, word)
        assert (said.code, said.err) == (0, "")
    by_name = {name: param for param in command.params for name in param.opts}
    if path != ("train",):  # whose options are those of a recipe
        assert "--json" in by_name
    if "--html" in by_name:
        assert by_name["--html"].is_flag
        assert by_name["-o"] is by_name["--output"]
    for old, new in (("--dir", "--run-dir"), ("--checkpoint", "--checkpoint-dir")):
        if old in by_name:
            assert by_name[old].hidden
            assert new in by_name


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("report", "nowhere"), "RecordError"),
        (("watch", "nowhere"), "RecordError"),
        (("runs", "nowhere"), "RecordError"),
        (("compare", "nowhere", "elsewhere"), "RecordError"),
        (("explain", "NOTHING"), "ConfigError"),
        (("export", "nowhere", "--table", "x"), "InputError"),
        (("ui", "nowhere"), "InputError"),
        (("report", "--nonsense"), "UsageError"),
        (("nonsense",), "UsageError"),
        (("compare",), "UsageError"),
        (("run",), "UsageError"),
        (("watch", "--interval", "x"), "UsageError"),
    ],
)
def test_an_error_is_json_where_json_was_asked_for(trimtab, words, kind):
    said = trimtab(*words, "--json")
    assert said.code == 2
    error = said.json()["error"]
    assert error["kind"] == kind
    assert error["message"]
    assert said.err.startswith("error: ")
    silent = trimtab(*words)
    assert (silent.code, silent.out) == (2, "")


def test_exit_codes_stay_with_json(trimtab):
    assert trimtab("rules", "--json").code == 0
    assert trimtab("runs", "--json").json()["runs"] == []


def uncommented(text: str) -> str:
    """The template with every setting in force; lines in words stay comments."""
    return re.sub(r"^# (?=[a-z_]+ = )", "", text, flags=re.MULTILINE)


def test_the_template_holds_every_setting_with_its_default() -> None:
    assert set(MEANINGS) == set(Config().to_dict())
    assert tomllib.loads(settings_template()) == {"tool": {"trimtab": {}}}
    settings = tomllib.loads(uncommented(settings_template()))["tool"]["trimtab"]
    assert set(settings) == set(MEANINGS)
    default = Config().to_dict()
    assert {k: v for k, v in settings.items() if k not in EXAMPLES} == {
        k: v for k, v in default.items() if k not in EXAMPLES
    }
    Config.from_dict(settings)


def test_init_adds_to_a_project_and_never_twice(trimtab, tmp_path):
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "x"  # mine\n')
    assert "added" in trimtab("init").out
    text = project.read_text()
    assert text.startswith('[project]\nname = "x"  # mine\n')
    assert discover(tmp_path) == {}
    said = trimtab("init")
    assert said.code == 2
    assert "already has settings" in said.err
    assert project.read_text() == text
    project.write_text(text.replace('# mode = "advise"', 'mode = "act"'))
    assert discover(tmp_path) == {"mode": "act"}


def test_init_where_there_is_no_project(trimtab, tmp_path):
    assert trimtab("init", "--json").json() == {"schema_version": 1, "path": "trimtab.toml", "created": True}
    assert tomllib.loads(Path("trimtab.toml").read_text()) == {}
    assert trimtab("init", "--json").code == 2
    assert trimtab("init", "--print").out == settings_template()
    Path("broken").mkdir()
    Path("broken/pyproject.toml").write_text("[[[")
    said = trimtab("init", "broken")
    assert said.code == 2
    assert "not valid TOML" in said.err
    assert Path("broken/pyproject.toml").read_text() == "[[["


@given(
    body=st.sampled_from(
        [
            "",
            "\n\n",
            "a = 1",
            '[tool]\nx = "[tool.trimtab]"\n',
            "[tool.ruff]\nline-length = 3",
            "tool = 3",
            "[x]\r\ny=1\r\n",
        ]
    )
)
def test_whatever_is_in_a_file_stays(tmp_path_factory: pytest.TempPathFactory, body: str) -> None:
    file = tmp_path_factory.mktemp("p") / "pyproject.toml"
    file.write_text(body, newline="")
    before = tomllib.loads(body)
    try:
        done = add_settings(file)
    except ConfigError:
        done = None
    assert file.read_bytes().startswith(body.rstrip().encode())
    after = tomllib.loads(file.read_text())
    if done is None:
        assert after == before
    else:
        assert after.pop("tool") == {**before.pop("tool", {}), "trimtab": {}}
        assert after == before


def test_which_file(tmp_path: Path) -> None:
    assert settings_file(tmp_path).name == "trimtab.toml"
    (tmp_path / "pyproject.toml").touch()
    assert settings_file(tmp_path).name == "pyproject.toml"
    assert settings_file(tmp_path / "own.toml").name == "own.toml"


def test_completion_knows_commands_and_installs(tmp_path):
    surroundings = os.environ | {"HOME": str(tmp_path), "COMP_WORDS": "trimtab co", "COMP_CWORD": "1"}
    words = [sys.executable, "-c", "from trimtab.cli.app import main; main()"]
    done = subprocess.run(
        words, env=surroundings | {"_TRIMTAB_COMPLETE": "complete_bash"}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["compare"]
    done = subprocess.run([*words, "--install-completion", "bash"], env=surroundings, capture_output=True, text=True)
    assert done.returncode == 0
    assert "trimtab" in (tmp_path / ".bash_completions" / "trimtab.sh").read_text()


def test_ui_says_where_it_is_and_ends_with_ctrl_c(trimtab, tmp_path):
    words = [sys.executable, "-m", "trimtab", "ui", str(tmp_path), "--port", "0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        url = json.loads(serving.stdout.readline())["url"]
        with urllib.request.urlopen(f"{url}api/runs", timeout=60) as answer:
            assert json.load(answer)["runs"] == []
        port = url.rsplit(":", 1)[1].strip("/")
        taken = trimtab("ui", tmp_path, "--port", port)
        assert taken.code == 2
        assert "--port 0" in taken.err
        serving.send_signal(signal.SIGINT)
        assert serving.wait(60) == 0
