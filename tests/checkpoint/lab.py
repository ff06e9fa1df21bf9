"""A crash lab: the disk kills, fails, shortens or slows the Nth operation, or loses what was not synced."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.checkpoint import directory
from trimtab.checkpoint.directory import Disk
from trimtab.checkpoint.format import container
from trimtab.core.errors import CheckpointError

Scenario = Callable[[Path, Disk], None]
FILES = ["model.safetensors", "optimizer.safetensors", "manifest.json", "COMMIT"]
"""Without which a checkpoint is not one."""
GROWS = ("mkdir", "create", "write", "fsync", "rename", "replace", "sync_dir")
"""What needs space; deleting and reading work on a full disk."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in memory where there is one: a lab syncs thousands of files."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="trimtab-lab-", dir=base) as name:
        yield Path(name)


@dataclass
class Gate:
    """Counts operations; `act(operation, path, number)` says what happens to each."""

    act: Callable[[str, Path, int], int | None] = lambda operation, path, number: None
    log: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, operation: str, path: Path) -> int | None:
        self.log.append((operation, path.name))
        return self.act(operation, path, len(self.log) - 1)


def fail_at(number: int, code: int, *, onwards: bool = False, only: tuple[str, ...] | None = None) -> Gate:
    def act(operation: str, path: Path, at: int) -> None:
        if (at == number or (onwards and at > number)) and (only is None or operation in only):
            raise OSError(code, os.strerror(code), str(path))

    return Gate(act)


def count_operations(scenario: Scenario, folder: Path) -> int:
    gate = Gate()
    scenario(folder, Disk(gate))
    return len(gate.log)


def killed_at(number: int, scenario: Scenario, folder: Path, *, torn: bool = False) -> bool:
    """Run `scenario` in a child that is killed before operation `number`; False if it ended before that.

    `torn`: the write before it took only a part.
    """

    def act(operation: str, path: Path, at: int) -> int | None:
        if at >= number:
            os.kill(os.getpid(), signal.SIGKILL)
        return 7 if torn and at == number - 1 else None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks; the child only writes files
        pid = os.fork()
    if pid == 0:
        try:
            scenario(folder, Disk(Gate(act)))
        finally:
            os._exit(0)
    _, how = os.waitpid(pid, 0)
    return os.WIFSIGNALED(how)


def sections_of(step: int, scale: int = 1) -> dict[str, object]:
    """A small state that differs at each step: two sections with tensors and one without."""
    w = torch.arange(24.0 * scale).reshape(6, -1) + step
    return {
        "model": {"layer.weight": w, "layer.bias": torch.full((3,), float(step), dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": w * 2}}, "lr": 0.1},
        "loader": {"position": step},
    }


def save(folder: Path, step: int, disk: Disk | None = None, *, scale: int = 1, status: str = "candidate") -> Path:
    name = directory.name_of(step)
    given = {"disk": disk} if disk is not None else {}
    written = container.write(folder, name, sections_of(step, scale), step=step, meta={}, status=status, **given)
    return written.path


def healthy_steps(folder: Path, scale: int = 1) -> dict[int, str]:
    """Every listed checkpoint read in full and compared with what was saved: step -> status."""
    found = {}
    for step, _, path in directory.entries(folder):
        contents = container.read(path)
        expected = sections_of(step, scale)
        assert contents.manifest.step == step
        assert contents.sections["loader"] == expected["loader"]
        assert torch.equal(contents.sections["model"]["layer.weight"], expected["model"]["layer.weight"])
        assert torch.equal(contents.sections["model"]["layer.bias"], expected["model"]["layer.bias"])
        moments = contents.sections["optimizer"]["state"][0]
        assert torch.equal(moments["exp_avg"], expected["optimizer"]["state"][0]["exp_avg"])
        found[step] = contents.status.state
    return found


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith(".tmp-")) if folder.is_dir() else []


@pytest.fixture
def pair(folder: Path) -> Path:
    """The newer of two checkpoints."""
    save(folder, 1, status="good")
    return save(folder, 2, status="good")


def reseal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and make it valid again, as somebody would who means harm."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    data = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "COMMIT").write_text(hashlib.sha256(data).hexdigest() + "\n")


def refused(path: Path, file: str, match: str | None = None) -> None:
    """Neither way of reading takes it, both name the file; the older checkpoint is still there."""
    for verify in (True, False):
        with pytest.raises(CheckpointError, match=match) as told:
            container.read(path, verify=verify)
        assert file in str(told.value)
    found = container.damage_of(path)
    assert file in {damage.file for damage in found}
    older = path.parent / directory.name_of(1)
    assert container.read(older).status.state == "good"
