"""Checkpoints of others are read without executing anything, or refused with the reason."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import resource
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.checkpoint.bombs import SAFE, TORCH, archive
from tests.matrix import FULL, sampled
from trimtab.checkpoint.format.foreign import load_foreign
from trimtab.checkpoint.inspect import sheet_of_foreign
from trimtab.core.errors import CheckpointError

STATE = {"model": OrderedDict(w=torch.arange(6.0).reshape(2, 3)), "epoch": 3, "best": 0.5, "args": {"lr": 1e-3}}


class Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "pytorch_model.bin", "a.ckpt", "A.PT"])
def test_b18_torch_files_are_read(name: str, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / name)
    loaded = load_foreign(tmp_path / name)
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"])  # type: ignore[index]
    assert {key: loaded[key] for key in ("epoch", "best", "args")} == {"epoch": 3, "best": 0.5, "args": {"lr": 1e-3}}


def test_old_torch_files_are_read(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    assert load_foreign(str(tmp_path / "a.pth"))["epoch"] == 3


def test_safetensors_are_read(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    assert torch.equal(load_foreign(tmp_path / "a.safetensors")["w"], torch.ones(2))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_not_run(zipped: bool, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    torch.save({"w": torch.ones(2), "evil": Payload(marker)}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    (tmp_path / "b.bin").write_bytes(pickle.dumps(Payload(marker)))
    for name in ("a.pt", "b.bin"):
        with pytest.raises(CheckpointError, match=rf"{name} .*(it is not read|cannot be read)"):
            load_foreign(tmp_path / name)
    assert not marker.exists()


def test_a_whole_module_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"more than tensors and plain data.*save the state_dict\(\)"):
        load_foreign(tmp_path / "a.pt")


def test_torn_files_are_refused(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    for name in ("a.pt", "a.safetensors"):
        data = (tmp_path / name).read_bytes()
        for length in (0, 1, 5, 9, len(data) // 2, len(data) - 1):
            (tmp_path / name).write_bytes(data[:length])
            with pytest.raises(CheckpointError, match=rf"{name} .*use another copy|more than tensors"):
                load_foreign(tmp_path / name)


def test_absurd_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for length in (2**63, 2**40, 200 << 20):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(CheckpointError, match="not a sound safetensors file"):
            load_foreign(path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(3))
    with pytest.raises(CheckpointError, match=r"no checkpoint by its name.*\.safetensors"):
        load_foreign(tmp_path / "a.pkl")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_foreign(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="is a directory"):
        load_foreign(tmp_path)


# -- the same as torch reads ----------------------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    """Equal to the bit and of the same kind, however deep."""
    if isinstance(one, torch.Tensor):
        if type(one) is not type(other) or one.layout is not other.layout or one.is_quantized != other.is_quantized:
            return False
        if one.layout is not torch.strided:
            return bool((one.to_dense() == other.to_dense()).all()) and one.dtype is other.dtype
        if one.is_quantized:
            return torch.equal(one, other)
        alike = (one.dtype, one.shape, one.stride(), one.requires_grad) == (
            other.dtype,
            other.shape,
            other.stride(),
            other.requires_grad,
        )
        values = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
        return alike and torch.equal(*values)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def everything() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    model[2].weight = torch.nn.Parameter(model[0].weight.detach().t().contiguous())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    base = torch.arange(24.0)
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8]
    dtypes += [torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64]
    dtypes += [torch.float8_e4m3fn, torch.float8_e5m2]
    return {
        "model": model.state_dict(),
        "parameters": [model[0].weight, torch.nn.Parameter(torch.ones(2), requires_grad=False)],
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "views": (base, base[3:9], base.reshape(4, 6).t(), base[::5], base.reshape(2, 12)[:, 0]),
        "wide": torch.ones(1, 3).expand(4, 3),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(1.5),
        "grad": torch.ones(2, requires_grad=True),
        "dtypes": {str(dtype): torch.arange(1, 9).to(dtype) for dtype in dtypes},
        "coo": torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 0]]), torch.tensor([3.0, 4.0]), (3, 2)).coalesce(),
        "csr": torch.eye(4).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.randn(6), 0.1, 3, torch.qint8),
        "plain": [
            None,
            True,
            -3,
            2**40,
            -(2**70),
            1.5,
            float("inf"),
            "text",
            "\u00e9\U0001f600",
            b"bytes\xff",
            (1, (2,)),
        ],
        "others": {1, 2, 3},
        "array": bytearray(b"abc"),
        "complex": 1 + 2j,
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        3: {"int keys": 1},
    }


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*quantize", "ignore:TypedStorage")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_is_read_as_torch_reads_it(zipped: bool, tmp_path: Path) -> None:
    saved = everything()
    if not zipped:  # torch itself cannot read back what the old format has no name for
        del saved["quantized"]
        saved["dtypes"] = {
            name: one for name, one in saved["dtypes"].items() if not re.search("uint[136]|float8", name)
        }
    torch.save(saved, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    wanted = torch.load(tmp_path / "a.pt", weights_only=True)
    found = load_foreign(tmp_path / "a.pt")
    for key in wanted:
        assert same(found[key], wanted[key]), key
    whole, part = found["views"][:2]
    part[0] = 77.0
    assert whole[3] == 77.0  # memory that was shared is shared
    assert same(load_foreign(tmp_path / "a.pt")["views"], wanted["views"])  # and the file stays as it is


@pytest.mark.parametrize("stride", sampled({"all": 1, "every 17th": 17}, ["every 17th"], others=FULL))
def test_every_byte_of_a_torch_file_may_be_wrong(stride: int, tmp_path: Path) -> None:
    """A changed byte gives other values, or an error of ours; never anything else."""
    path = tmp_path / "a.pt"
    for zipped in (True, False):
        state = {"w": torch.arange(4.0), "n": {"x": [1, 2.5, "y"], "z": b"q"}, "s": torch.eye(2).to_sparse()}
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        good = path.read_bytes()
        for at in range(0, len(good), stride):
            for bit in (1, 0x40, 0xFF):
                path.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
                with contextlib.suppress(CheckpointError):
                    load_foreign(path)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_pickle_ends_in_an_error_of_ours(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        archive(path, b"\x80\x02" + data + b".")
        with contextlib.suppress(CheckpointError):
            load_foreign(path)


def test_pipes_devices_and_links(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.pt")
    (tmp_path / "b.pt").symlink_to("/dev/zero")
    (tmp_path / "c.safetensors").symlink_to("/dev/zero")
    for name in ("a.pt", "b.pt", "c.safetensors"):
        with pytest.raises(CheckpointError, match="is not a regular file"):
            load_foreign(tmp_path / name)
    (tmp_path / "d.pt").symlink_to(tmp_path / "gone.pt")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_foreign(tmp_path / "d.pt")
    torch.save(STATE, tmp_path / "real.pt")
    (tmp_path / "e.pt").symlink_to(tmp_path / "real.pt")
    assert load_foreign(tmp_path / "e.pt")["epoch"] == 3


# -- what it may cost -------------------------------------------------------------------------------------------------


def peak_of(body: Callable[[], object]) -> tuple[float, str]:
    """How many MB more than before a forked process has at most, and the error; it is ended where it never ends."""
    ready, told = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        said = "nothing was raised"
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
            Path("/proc/self/clear_refs").write_text("5")
            before = memory()
            try:
                body()
            except CheckpointError as error:
                said = str(error)
            except BaseException as error:
                said = f"raw {error!r}"
            os.write(told, f"{(memory() - before) / 1000} {said}".encode())
        finally:
            os._exit(0)
    os.close(told)
    with os.fdopen(ready, "rb") as answer:
        number, _, said = answer.read().decode().partition(" ")
    _, how = os.waitpid(pid, 0)
    assert not os.WIFSIGNALED(how), f"ended by signal {os.WTERMSIG(how)}: it took a minute of work, or all memory"
    return float(number), said


def memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


BOMBS = [(name, ".pt", make) for name, make in TORCH.items()]
BOMBS += [(name, ".safetensors", make) for name, make in SAFE.items()]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize(
    ("name", "suffix", "make"),
    sampled({f"{bomb[0]}{bomb[1]}": bomb for bomb in BOMBS}, [f"{bomb[0]}{bomb[1]}" for bomb in BOMBS[::3]]),
)
def test_a_file_that_asks_for_too_much_is_refused(
    name: str, suffix: str, make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"a{suffix}"
    make(path)
    for read in (load_foreign, sheet_of_foreign):
        peak, said = peak_of(lambda read=read: read(path))
        assert said.startswith(f"{path} "), said
        assert peak < 200 + min(path.stat().st_size, 100_000_000) / 1e6
    assert not (tmp_path / "executed").exists()
