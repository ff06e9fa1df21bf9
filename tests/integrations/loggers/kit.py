"""A small training under a guard, and runs of the real packages read back."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import trimtab

BLOCK, HEAD = 32768, 7
NAN_AT = 7


def needs(package: str, word: str = "") -> pytest.MarkDecorator:
    """Skips where a package is missing, unless TRIMTAB_REQUIRE wants it."""
    wanted = (word or package) in os.environ.get("TRIMTAB_REQUIRE", "").split(",")
    return pytest.mark.skipif(find_spec(package) is None and not wanted, reason=f"needs {package}")


def train(
    sinks: Sequence[object],
    num: int = 40,
    each: Callable[[int], object] = lambda step: None,
    nan_at: int | None = NAN_AT,
    run_dir: Path | bool = False,
    flush_every: int = 0,
) -> trimtab.Guard:
    """A guarded loop that logs something of its own, `each(step)`, after every step. The guard is closed."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with trimtab.Guard(model, optimizer, clip=1.0, sinks=sinks, run_dir=run_dir) as guard:
        for step in range(num):
            loss = model(torch.randn(8, 4)).square().mean() * (float("nan") if step == nan_at else 1.0)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
            each(step)
            if flush_every and step % flush_every == 0:
                guard.flush()
    return guard


def records(raw: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: parts of up to a block, each with checksum, size, and whether it is the last."""
    at, part = HEAD, b""
    while at + HEAD <= len(raw):
        left = BLOCK - at % BLOCK
        _, size, kind = struct.unpack("<IHB", raw[at : at + HEAD]) if left >= HEAD else (0, 0, 0)
        if kind == 0:  # the rest of a block is empty
            at += left
            continue
        part += raw[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in (1, 4):
            yield part
            part = b""


class WandbFile:
    """What an offline run wrote: one dict per row of history, and every other record by its kind."""

    def __init__(self, folder: Path) -> None:
        import wandb
        from wandb.proto import wandb_internal_pb2

        wandb.teardown()  # waits for the process that writes the file
        (path,) = folder.rglob("*.wandb")
        self.rows: list[dict[str, Any]] = []
        self.others: dict[str, list[Any]] = {}
        for raw in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(raw)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                self.rows.append({name: json.loads(value) for name, value in items.items()})
            else:
                self.others.setdefault(str(kind), []).append(getattr(record, str(kind)))

    def series(self, name: str, axis: str = "trimtab/step") -> dict[int, Any]:
        """Values by the steps of an axis."""
        return {row[axis]: row[name] for row in self.rows if name in row}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for an offline run of wandb."""
    import wandb

    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WANDB_DIR": tmp_path, "WANDB_SILENT": "true", "WANDB_DATA_DIR": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    wandb.teardown()  # it reads the environment once
    yield tmp_path
    wandb.teardown()
