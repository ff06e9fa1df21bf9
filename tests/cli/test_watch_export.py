"""`trimtab watch` on a real terminal (tmux) and in a pipe; `compare` and `export`; and records made to do harm."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.cli.test_hostile_files import ESCAPES, is_safe
from trimtab.core.types import Closing, Finding, Kind, Layout, RunInfo, Sample, Severity, Verdict
from trimtab.record.writer import RunWriter

LAYOUT = Layout(names=("enc.0.weight", "enc.1.weight", "head.weight"), kinds=(Kind.GRAD,) * 3, numel=(4, 4, 4))
NEEDED = "tmux" in os.environ.get("TRIMTAB_REQUIRE", "")


def begin(folder: Path, *, name: str = "net") -> RunWriter:
    writer = RunWriter(folder)
    info = RunInfo(
        run_id=folder.name,
        started="2026-01-01T00:00:00+00:00",
        config={},
        versions={},
        model=name,
        num_parameters=12,
        optimizers=("",),
        rules=(),
        script="train.py",
        host=socket.gethostname(),
        pid=os.getpid(),  # it is live as long as this test, however slow the machine
    )
    writer.write(info)
    return writer


def add(writer: RunWriter, steps: range, *, name: str = "nonfinite-gradient") -> None:
    for step in steps:
        bad = step == 30
        norm = math.nan if bad else 1.0
        table = np.full((3, 7), norm, np.float32)
        scalars = {"loss": 1.0 / (1 + step), "grad_norm": norm, "rejected": float(bad), "lr/0": 0.1}
        writer.write(Sample(step=step, layout=LAYOUT, table=table, scalars=scalars))
        if bad:
            finding = Finding(
                code="GRAD001", name=name, step=step, severity=Severity.ERROR, message=name, advice=("Do this first.",)
            )
            writer.write(Verdict(step=step, seen_at=step, findings=(finding,)))
    writer.flush()


def close(writer: RunWriter, num_steps: int) -> None:
    writer.write(Closing(steps={"": num_steps}, rejected=1, findings=1, reason="closed"))
    writer.close()


def test_once_shows_curves_modules_and_what_to_do(trimtab, tmp_path):
    writer = begin(tmp_path / "r")
    add(writer, range(60))
    close(writer, 60)
    said = trimtab("watch", tmp_path / "r", "--once")
    assert said.code == 0
    for text in ("ENDED", "train.py", "loss", "enc.0", "head", "nonfinite-gradient", "→ Do this first.", "1 finding"):
        assert text in said.out
    strip = next(line for line in said.out.splitlines() if line.strip().startswith("head"))
    assert "×" in strip
    assert "─" in strip


def test_a_pipe_gets_lines_and_ends_with_the_run(trimtab, tmp_path):
    writer = begin(tmp_path / "r")
    add(writer, range(40))
    close(writer, 40)
    said = trimtab("watch", tmp_path / "r")
    first, found, advice, last = said.out.splitlines()
    assert first.startswith("step 39  loss 0.025  gradient norm 1  ")
    assert "GRAD001 nonfinite-gradient" in found
    assert advice == "  → Do this first."
    assert last.startswith("ended (closed)")


def test_a_pipe_hears_of_a_run_that_grows(tmp_path):
    writer = begin(tmp_path / "r")
    add(writer, range(10))
    words = [sys.executable, "-m", "trimtab", "watch", str(tmp_path / "r"), "--interval", "0.1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline().startswith("step 9 ")
        add(writer, range(10, 50))
        close(writer, 50)
        rest = watching.stdout.read()
    assert watching.returncode == 0
    assert "step 49 " in rest
    assert rest.count("GRAD001") == 1
    assert "ended (closed)" in rest


def test_what_the_machine_reports_has_a_line(trimtab, tmp_path):
    writer = begin(tmp_path / "r")
    scalars = {"loss": 1.0, "gpu_memory": 3.2e9, "gpu_utilisation": 0.87, "data_wait": 0.25}
    for step in range(5):
        writer.write(Sample(step=step, layout=LAYOUT, table=np.ones((3, 7), np.float32), scalars=scalars))
    close(writer, 5)
    shown = trimtab("watch", tmp_path / "r", "--once").out
    for title, value in (("GPU memory, GB", "3.2"), ("GPU busy, %", "87"), ("data wait, %", "25")):
        assert re.search(rf"{title}\s+{value}\s", shown)


def test_for_programs(trimtab, tmp_path):
    writer = begin(tmp_path / "r")
    add(writer, range(40))
    data = trimtab("watch", tmp_path / "r", "--json", "--steps", "80").json()
    assert (data["state"], data["num_steps"], data["last"]["lr"]) == ("live", 40, 0.1)
    assert data["eta_s"] > 0
    assert [f["code"] for f in data["findings"]] == ["GRAD001"]
    close(writer, 40)


def test_a_record_that_knows_its_end_shows_how_long_is_left(trimtab, tmp_path):
    writer = begin(tmp_path / "r")
    scalars = {"loss": 1.0, "total_steps": 400.0}
    writer.write(Sample(step=0, layout=LAYOUT, table=np.ones((3, 7), np.float32), scalars=scalars))
    add(writer, range(1, 30))
    data = trimtab("watch", tmp_path / "r", "--json").json()
    assert data["total_steps"] == 400
    assert data["eta_s"] > 0
    assert re.search(r"step 29 of 400 .* left ", trimtab("watch", tmp_path / "r", "--once").out)
    assert trimtab("watch", tmp_path / "r", "--json", "--steps", "900").json()["total_steps"] == 900
    close(writer, 30)
    assert trimtab("watch", tmp_path / "r", "--json").json()["eta_s"] is None


@pytest.mark.parametrize(
    "command", [("watch", "--once"), ("watch",), ("runs",), ("watch", "--json"), ("runs", "--json")]
)
def test_names_that_a_terminal_would_act_on(trimtab, tmp_path, command):
    writer = begin(tmp_path / "r", name=ESCAPES)
    add(writer, range(40), name=ESCAPES)
    close(writer, 40)
    said = trimtab(command[0], tmp_path / "r", *command[1:])
    assert said.code == 0
    assert is_safe(said.out)


@pytest.mark.parametrize("table", ["steps", "findings", "layers"])
def test_export_tables(trimtab, tmp_path, table):
    writer = begin(tmp_path / "r", name=ESCAPES)
    add(writer, range(40), name=ESCAPES)
    close(writer, 40)
    said = trimtab("export", tmp_path / "r", "--table", table, "-o", "-")
    assert said.code == 0
    assert is_safe(said.out)
    wanted = {"steps": 41, "findings": 2, "layers": 121}[table]
    assert len(list(csv.reader(io.StringIO(said.out)))) == wanted
    made = trimtab("export", tmp_path / "r", "--csv", "--table", table, "--json").json()
    assert made["num_rows"] == wanted - 1
    assert Path(made["path"]).read_text(encoding="utf-8") == said.out


def test_export_pictures(trimtab, tmp_path):
    writer = begin(tmp_path / "r", name=ESCAPES)
    add(writer, range(40))
    close(writer, 40)
    said = trimtab("export", tmp_path / "r", "--svg", "-o", tmp_path / "deep" / "c.svg")
    assert said.out.strip() == str(tmp_path / "deep" / "c.svg")
    ElementTree.parse(said.out.strip())
    if find_spec("PIL") is not None:
        said = trimtab("export", tmp_path / "r", "--png")
        assert Path(said.out.strip()).read_bytes().startswith(b"\x89PNG")
    for wrong in (["--svg", "--csv"], ["--parquet", "-o", "-"], ["--table", "x"]):
        said = trimtab("export", tmp_path / "r", *wrong)
        assert said.code == 2
        assert said.err.startswith("error: ")


def test_comparing(trimtab, tmp_path):
    for name in "ab":
        writer = begin(tmp_path / name, name=ESCAPES)
        add(writer, range(40), name=ESCAPES)
        close(writer, 40)
    for words in (("compare",), ("report",)):
        said = trimtab(*words, tmp_path / "a", tmp_path / "b")
        assert said.code == 0
        assert is_safe(said.out)
        assert "losses are the same at every step" in said.out
        made = trimtab(*words, tmp_path / "a", tmp_path / "b", "--html", "-o", tmp_path / "c.html")
        assert Path(made.out.strip()).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert trimtab("compare", tmp_path / "a", tmp_path / "b", "--json").json()["same_until"] is None
    assert "--epoch-steps" in trimtab("compare", tmp_path / "a", tmp_path / "b", "--by", "epoch").err
    assert trimtab("compare", tmp_path / "a", tmp_path / "b", "--epoch-steps", "x").code == 2


@pytest.mark.parametrize("command", [("watch", "--once"), ("runs",), ("export", "-o", "-")])
def test_torn_foreign_and_sparse_records(trimtab, tmp_path, command):
    writer = begin(tmp_path / "a" / "r")
    add(writer, range(40))
    close(writer, 40)
    lines = (tmp_path / "a" / "r" / "run.jsonl").read_bytes()
    with (tmp_path / "a" / "r" / "tables.f32").open("r+b") as file:
        file.truncate(10 * 10**9)  # sparse
    (tmp_path / "a" / "r" / "run.jsonl").write_bytes(lines[:-30] + b'\n{"t":"sample"}\n[1,2]\nnull\n' + lines[-30:])
    assert trimtab(command[0], tmp_path / "a" / "r", *command[1:]).code == 0
    first = json.loads(lines.split(b"\n")[0]) | {"version": [9, 9]}
    (tmp_path / "a" / "r" / "run.jsonl").write_text(json.dumps(first) + "\n")
    said = trimtab(command[0], tmp_path / "a" / "r", *command[1:])
    assert "upgrade trimtab" in " ".join((said.out + said.err).split())


Keys = Callable[..., str]


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Keys]:
    """Commands for a tmux server of its own."""
    if shutil.which("tmux") is None:
        if NEEDED:
            pytest.fail("TRIMTAB_REQUIRE wants tmux")
        pytest.skip("needs tmux")
    address = str(tmp_path / "tmux.sock")
    surroundings = {k: v for k, v in os.environ.items() if k not in ("TMUX", "TMUX_PANE", "NO_COLOR")}
    # As a shell that exports its size: it must not be taken for that of the terminal after a resize.
    surroundings |= {"LANG": "C.UTF-8", "COLUMNS": "100", "LINES": "30"}

    def call(*words: str) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-S", address, "-f", "/dev/null", *words], capture_output=True, text=True, env=surroundings
        )
        return done.stdout

    yield call
    call("kill-server")


def screen(tmux: Keys, *texts: str, without: str = "\0") -> str:
    """What is on the screen once it holds these texts."""
    shown = ""
    for _ in range(2000):  # a busy machine takes its time
        shown = tmux("capture-pane", "-p", "-t", "w")
        if all(text in shown for text in texts) and without not in shown:
            return shown
        time.sleep(0.1)
    raise AssertionError(f"{texts} did not appear:\n{shown}")


@pytest.mark.long
def test_on_a_terminal_start_grow_resize_quit(tmux, tmp_path):
    writer = begin(tmp_path / "r")
    add(writer, range(20))
    words = f"{sys.executable} -m trimtab watch {tmp_path / 'r'} --interval 0.2"
    tmux("new-session", "-d", "-s", "w", "-x", "100", "-y", "30", "PS1='$ ' bash --norc -i")
    tmux("send-keys", "-t", "w", f"clear; {words}; echo left $?", "Enter")
    shown = screen(tmux, "LIVE", "step 19", "no findings", "q quit")
    assert "enc.0" in shown
    add(writer, range(20, 50))
    screen(tmux, "step 49", "1 finding", "→ Do this first.")
    for width, height in ((50, 12), (30, 6), (140, 40)):
        tmux("resize-window", "-t", "w", "-x", str(width), "-y", str(height))
        # Drawn anew: nothing of the wider screen is left behind the title, and the last line is in its place.
        shown = screen(tmux, "· net\n", "step 49", "q quit", *(["enc.0"] if height > 20 else []))
        assert len(shown.rstrip("\n").splitlines()) <= height
    close(writer, 50)
    screen(tmux, "ENDED")
    tmux("send-keys", "-t", "w", "q")
    shown = screen(tmux, "left 0", without="ENDED")  # the screen of before is back
    tmux("send-keys", "-t", "w", "echo typed", "Enter")
    screen(tmux, "$ echo typed")  # and so is its echo


@pytest.mark.long
def test_on_a_terminal_ctrl_c_leaves_it_as_it_was(tmux, tmp_path):
    writer = begin(tmp_path / "r")
    add(writer, range(20))
    words = f"{sys.executable} -m trimtab watch {tmp_path / 'r'}"
    tmux("new-session", "-d", "-s", "w", "-x", "80", "-y", "24", "PS1='$ ' bash --norc -i")
    tmux("send-keys", "-t", "w", f"clear; {words}; echo left $?", "Enter")
    screen(tmux, "LIVE")
    tmux("send-keys", "-t", "w", "C-c")
    screen(tmux, "left 0")
    tmux("send-keys", "-t", "w", "echo typed", "Enter")
    screen(tmux, "$ echo typed")
    close(writer, 20)
