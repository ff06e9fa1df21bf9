"""Commands on files that somebody made to do harm: a clear message, and nothing that a terminal would act on."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import FULL, sampled

ESCAPES = "\x1b[31m\x1b]0;title\x07\x9b2J\u202egnp\u2066\r\x08\u200b\x00"
VALUES: list[Any] = [
    None,
    True,
    -1,
    0.5,
    10**40,
    math.nan,
    math.inf,
    1e308,
    ESCAPES,
    "",
    "x" * 5000,
    "../../etc/passwd",
    [],
    {},
    [[]],
    {"$": "tensor", "key": "absent"},
    {"$": "int", "v": "f" * 5000},
    {"$": "eval", "v": "1"},
    {ESCAPES: ESCAPES},
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from trimtab import Checkpointer

    folder = tmp_path_factory.mktemp("whole") / "checkpoints"
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with Checkpointer(folder) as ckpt:
        for step in (1, 2):
            ckpt.save(step, model=model, optimizer=optimizer, metrics={"loss": 0.5}, extra={"note": "a", "n": step})
    return folder


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document, containers included; one of each kind of tensor is enough."""
    yield at
    if isinstance(value, dict):
        for key, one in value.items():
            yield from places(one, (*at, key))
    elif isinstance(value, list):
        for index, one in enumerate(value[:2]):
            yield from places(one, (*at, index))


def changed(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    made = copy.deepcopy(document)
    inside = made
    for step in at[:-1]:
        inside = inside[step]
    inside[at[-1]] = value
    return made


def is_safe(text: str) -> bool:
    return all(c in "\n\t" or c.isprintable() or unicodedata.category(c) == "Zs" for c in text)


def reseal(path: Path, text: str) -> None:
    import hashlib

    data = text.encode("utf-8", "surrogatepass")
    (path / "manifest.json").write_bytes(data)
    (path / "COMMIT").write_text(hashlib.sha256(data).hexdigest() + "\n")


def commands(folder: Path) -> list[tuple[Any, ...]]:
    return [
        ("list", folder),
        ("show", folder, "--step", "2", "--all"),
        ("verify", folder),
        ("diff", folder, "1", "2"),
        ("prune", folder, "--dry-run"),
    ]


@pytest.mark.parametrize("stride", sampled({"every 31st": 31, "every 401st": 401}, ["every 401st"], others=FULL))
def test_manifests_with_anything_anywhere(trimtab, whole, tmp_path, stride):
    """Each place of a manifest takes each value, with a checksum that vouches for it."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(whole, folder)
    path = folder / "step-00000002"
    original = json.loads((path / "manifest.json").read_text())
    spots = [at for at in places(original) if "rng" not in at]
    assert len(spots) > 100
    number = 0
    for spot in spots:
        for value in VALUES:
            number += 1
            if number % stride:  # all of them would take minutes, and differ little
                continue
            reseal(path, json.dumps(changed(original, spot, value)))
            for command in commands(folder)[number % 5 :: 2]:
                for flags in ((), ("--json",)):
                    said = trimtab("checkpoint", *command, *flags)
                    told = (spot, value, command, said)
                    assert said.code in (0, 1, 2), told
                    assert is_safe(said.out), told
                    assert is_safe(said.err), told
                    assert len(said.out) < 200_000, told


def test_escape_codes_everywhere_they_can_be(trimtab, tmp_path, capsys):
    """In the names of tensors, sections of others, metrics, reasons, versions, settings and labels."""
    import torch

    from trimtab import Checkpointer
    from trimtab.checkpoint.format import container

    model = torch.nn.Linear(1, 1)
    torch.nn.Module.register_buffer(model, "w" + ESCAPES.replace(".", ""), torch.ones(1))
    ugly = {"extra": {ESCAPES: ESCAPES, "list": [ESCAPES]}, "metrics": {ESCAPES: 1.0}}
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, model=model, verdict={ESCAPES: ESCAPES}, **ugly)
            model.weight.data += 1
        ckpt.condemn(2, ESCAPES)
    torch.save({ESCAPES: {"w" + ESCAPES: torch.ones(1)}, "model": {"a": torch.tensor(float("nan"))}}, tmp_path / "a.pt")
    (tmp_path / "code.pt").write_bytes(b"\x80\x02c" + ESCAPES.encode() + b"\nx\n.")
    before = capsys.readouterr()
    assert is_safe(before.err)
    runs = [*commands(tmp_path), ("show", tmp_path / "a.pt"), ("show", tmp_path / "code.pt")]
    runs += [("diff", tmp_path / "a.pt", tmp_path / "a.pt"), ("list", tmp_path / "quarantine")]
    for command in runs:
        for flags in ((), ("--json",)):
            said = trimtab("checkpoint", *command, *flags)
            assert is_safe(said.out), said.out
            assert is_safe(said.err), said.err
            if flags and said.out:
                json.loads(said.out)
    file = tmp_path / "step-00000001" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    said = trimtab("checkpoint", "verify", tmp_path)
    assert "\\x1b[31m" in said.out  # it is shown, so that nobody is misled, and does nothing
    assert is_safe(said.out)
    assert container.damage_of(tmp_path / "step-00000001")


@pytest.mark.parametrize("markup", ["[red]", "[/]", "[link=file:///etc/passwd]x[/link]", "[bold", ":smile:"])
def test_what_looks_like_styles_is_text(trimtab, tmp_path, markup):
    import torch

    torch.save({"model": {markup: torch.ones(1)}}, tmp_path / "a.pt")
    said = trimtab("checkpoint", "show", tmp_path / "a.pt")
    assert said.code == 0
    assert markup in said.out


def test_files_that_are_none(trimtab, whole, tmp_path):
    for name in ("manifest.json", "COMMIT", "status.json", "model.safetensors"):
        folder = tmp_path / name / "checkpoints"
        shutil.copytree(whole, folder)
        file = folder / "step-00000002" / name
        file.unlink()
        os.mkfifo(file)
        for command in commands(folder):
            assert trimtab("checkpoint", *command).code in (0, 1, 2)
        file.unlink()
        file.symlink_to("/dev/zero")
        assert trimtab("checkpoint", "verify", folder).code == 1
        file.unlink()
        with file.open("wb") as made:
            made.truncate(10 * 10**9)
        assert trimtab("checkpoint", "verify", folder).code == 1
    os.mkfifo(tmp_path / "a.pt")
    said = trimtab("checkpoint", "show", tmp_path / "a.pt")
    assert said.code == 2
