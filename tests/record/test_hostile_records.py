"""Records that somebody made to do harm, or that a disk has damaged: what is left of them is shown."""

from __future__ import annotations

import base64
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trimtab.guard.guard
from tests.checkpoint.test_foreign import peak_of
from tests.cli.conftest import trimtab as trimtab_command
from tests.cli.test_hostile_files import ESCAPES, VALUES, changed, is_safe, places
from tests.matrix import FULL, sampled
from trimtab import Guard
from trimtab.core.errors import RecordError
from trimtab.core.stats.trail import Trail
from trimtab.record.reader import find_run, read_run
from trimtab.record.sinks import ConsoleSink
from trimtab.report.replay import replay
from trimtab.report.summary import summarise
from trimtab.report.text import to_text

trimtab_ = trimtab_command


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run with findings, actions and states of its detectors."""
    every, trimtab.guard.guard.STATE_EVERY = trimtab.guard.guard.STATE_EVERY, 25
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            x = torch.randn(16, 4)
            folder = tmp_path_factory.mktemp("record") / "run"
            with Guard(model, optimizer, clip=1.0, mode="act", run_dir=folder) as guard:
                for step in range(60):
                    batch = x * math.nan if step == 30 else x
                    loss = (model(batch) - x.sum(1, keepdim=True)).square().mean()
                    loss.backward()
                    guard.step(loss)
                    optimizer.zero_grad()
        return folder
    finally:
        trimtab.guard.guard.STATE_EVERY = every


@pytest.fixture
def copied(record: Path, tmp_path: Path) -> Path:
    shutil.copytree(record, tmp_path / "run")
    return tmp_path / "run"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


def write(folder: Path, lines: list[Any]) -> None:
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("stride", sampled({"every 43rd": 43, "every 587th": 587}, ["every 587th"], others=FULL))
def test_lines_with_anything_anywhere(trimtab_, copied: Path, stride: int) -> None:
    lines = lines_of(copied)
    assert {line["t"] for line in lines} >= {"run", "layout", "sample", "state", "verdict", "decision", "close"}
    kinds: dict[str, int] = {}
    for at, line in enumerate(lines):
        kinds[line["t"]] = at
    number = 0
    for at in kinds.values():
        for spot in places(lines[at]):
            for value in VALUES:
                number += 1
                if number % stride:
                    continue
                write(copied, [*lines[:at], changed(lines[at], spot, value), *lines[at + 1 :]])
                for command in (("report",), ("report", "--json"), ("report", "--html"), ("replay",))[number % 4 :: 2]:
                    said = trimtab_(command[0], copied, *command[1:])
                    told = (lines[at]["t"], spot, value, command, said)
                    assert said.code in (0, 1, 2), told
                    assert is_safe(said.out), told
                    assert is_safe(said.err), told


def test_texts_do_nothing_to_the_terminal(trimtab_, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(copied)
    for line in lines:
        if line["t"] == "run":
            line |= {"model": ESCAPES, "started": ESCAPES, "run_id": ESCAPES}
        if line["t"] == "verdict":
            line["findings"] = [
                f | {"message": ESCAPES, "advice": [ESCAPES], "subject": [ESCAPES]} for f in line["findings"]
            ]
        if line["t"] == "outcome":
            line["detail"] = ESCAPES
        if line["t"] == "close":
            line["reason"] = ESCAPES
    write(copied, lines)
    assert is_safe(to_text(summarise(read_run(copied))))
    for command in (("report",), ("report", "--json"), ("replay",)):
        said = trimtab_(command[0], copied, *command[1:])
        assert is_safe(said.out + said.err)
    sink = ConsoleSink()
    for verdict in read_run(copied).verdicts:
        sink.write(verdict)
    told = capsys.readouterr().err
    assert "\\x1b[31m" in told
    assert is_safe(told)


def first_line(folder: Path) -> bytes:
    return (folder / "run.jsonl").read_bytes().partition(b"\n")[0] + b"\n"


def only_breaks(folder: Path) -> None:
    (folder / "run.jsonl").write_bytes(first_line(folder) + b"\n" * 50_000_000)


def one_long_line(folder: Path) -> None:
    (folder / "run.jsonl").write_bytes(first_line(folder) + b"x" * 200_000_000)


def never_written(folder: Path) -> None:
    os.truncate(folder / "run.jsonl", 10 * 10**9)


def many_values(folder: Path) -> None:
    (folder / "run.jsonl").write_bytes(
        first_line(folder) + b'{"t":"run","seq":1,"x":[' + b"[]," * 9_000_000 + b"[]]}\n"
    )


def deep(folder: Path) -> None:
    (folder / "run.jsonl").write_bytes(first_line(folder) + b'{"t":"state","seq":' + b"[" * 1_000_000 + b"\n")


def hollow_tables(folder: Path) -> None:
    os.truncate(folder / "tables.f32", 10 * 10**9)


def false_tables(folder: Path) -> None:
    (folder / "tables.f32").write_bytes(b"TTb1" * 20_000_000)


BOMBS = [only_breaks, one_long_line, never_written, many_values, deep, hollow_tables, false_tables]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.__name__)
def test_a_record_that_asks_for_too_much_is_cut_short(bomb: Callable[[Path], None], copied: Path) -> None:
    bomb(copied)
    peak, said = peak_of(lambda: _show(copied))
    assert said == "nothing was raised", said
    assert peak < 200
    assert read_run(copied).problems


def _show(folder: Path) -> None:
    read_run(folder)
    find_run(folder.parent)


@pytest.mark.parametrize("name", ["run.jsonl", "tables.f32"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_files_that_are_none(name: str, kind: str, copied: Path) -> None:
    (copied / name).unlink()
    if kind == "pipe":
        os.mkfifo(copied / name)
    else:
        (copied / name).symlink_to("/dev/zero")
    if name == "run.jsonl":
        with pytest.raises(RecordError, match=r"is not a regular file|holds no run\.jsonl"):
            read_run(copied)
    else:
        assert "is not a regular file" in read_run(copied).problems[0]


def test_steps_that_never_were_and_numbers_that_are_none(copied: Path) -> None:
    lines = lines_of(copied)
    odd = [line for line in lines if line["t"] == "sample"][-1]
    verdict = next(line for line in lines if line["t"] == "verdict")
    close = lines.pop()
    finding = verdict["findings"][0]
    bad = [
        odd | {"step": -5},
        odd | {"step": 10**30},
        verdict | {"step": -1},
        verdict | {"findings": [finding | {"evidence": {"loss": "high"}}]},
        verdict | {"findings": [finding | {"evidence": {"loss": 10**400}}]},
        close | {"steps": {"": "many"}},
        close | {"dropped": {"samples": None}},
    ]
    write(copied, [*lines, *bad, close])
    run = read_run(copied)
    assert len([problem for problem in run.problems if "is damaged and was skipped" in problem]) == len(bad)
    assert run.closing is not None
    assert summarise(run).num_rejected == close["rejected"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("values", [{"num": 10**9}, {"num": -1}, {"from": [[-(10**12), 0]]}, {"num_names": -1}, {}])
def test_a_state_that_would_fill_the_memory_is_refused(values: dict[str, Any], copied: Path) -> None:
    """The record lost its first samples, so that a replay begins with a state: one that unpacks to gigabytes."""
    bomb = base64.b85encode(zlib.compress(bytes(3 * 10**9 // 1000)) if values else _zeros()).decode()

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            if {"num", "from", "values"} <= set(value):
                return value | {"values": bomb} | values
            return {key: spoil(one) for key, one in value.items()}
        return [spoil(one) for one in value] if isinstance(value, list) else value

    lines = lines_of(copied)
    assert any(spoil(line) != line for line in lines if line["t"] == "state")
    kept = [spoil(line) for line in lines if line["t"] != "sample" or line["step"] >= 20]
    write(copied, [line for line in kept if line["t"] != "sample" or line["step"] != 22])
    peak, said = peak_of(lambda: _replayed(copied))
    assert "cannot be read" in said, said
    assert peak < 200


def _zeros() -> bytes:
    """A gigabyte of zeros, in a few megabytes."""
    packer, out = zlib.compressobj(1), []
    for _ in range(100):
        out.append(packer.compress(bytes(10**7)))
    return b"".join([*out, packer.flush()])


def _replayed(folder: Path) -> None:
    try:
        replay(folder)
    except RecordError as error:
        from trimtab.core.errors import CheckpointError

        raise CheckpointError(str(error)) from error


def test_a_trail_is_what_it_was() -> None:
    trail = Trail()
    again = Trail.from_state(trail.state_dict())
    assert again.state_dict() == trail.state_dict()
