"""A checkpoint that somebody made to do harm is refused: nothing is executed, nothing outside of it is read."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.recover.lab import FILES, folder, pair, refused, reseal
from trimtab.core.errors import CheckpointError
from trimtab.recover import container

__all__ = ["folder", "pair"]


class Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("file", FILES)
def test_pickles_are_not_executed(file: str, pair: Path, folder: Path) -> None:
    marker = folder / "executed"
    payload = pickle.dumps(Payload(marker))
    (pair / file).write_bytes(payload)
    refused(pair, file)
    if file.endswith(".safetensors"):

        def claim(manifest: dict[str, Any]) -> None:
            section = manifest["sections"][file.removesuffix(".safetensors")]
            section.update(bytes=len(payload), sha256=hashlib.sha256(payload).hexdigest(), tensors={})

        reseal(pair, claim)
        for verify in (True, False):
            with pytest.raises(CheckpointError, match=file):
                container.read(pair, verify=verify)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../../x.safetensors", "/etc/passwd", "optimizer.safetensors", "", 3, ["a"]])
def test_a_section_reads_only_its_own_file(name: Any, pair: Path) -> None:
    reseal(pair, lambda manifest: manifest["sections"]["model"].update(file=name))
    refused(pair, "manifest.json", "it can only be")


@pytest.mark.parametrize("name", ["../x", "/x", "", ".", "a/b", "a\0b", "-x", "x" * 200])
def test_names_of_sections_stay_inside(name: str, pair: Path) -> None:
    def rename(manifest: dict[str, Any]) -> None:
        manifest["sections"][name] = manifest["sections"].pop("model") | {"file": f"{name}.safetensors"}

    reseal(pair, rename)
    refused(pair, "manifest.json", "begins without")


@pytest.mark.parametrize("file", FILES)
def test_links_and_pipes_are_not_followed(file: str, pair: Path, folder: Path) -> None:
    shutil.move(pair / file, folder / "elsewhere")
    (pair / file).symlink_to(folder / "elsewhere")
    refused(pair, file, r"symbolic link|regular file")
    (pair / file).unlink()
    os.mkfifo(pair / file)  # reading it would wait for ever
    refused(pair, file, "regular file")


def header(path: Path, text: bytes, length: int | None = None, data: bytes = b"") -> None:
    """A tensor file with this header, and a manifest that vouches for it."""
    content = (len(text) if length is None else length).to_bytes(8, "little") + text + data
    (path / "model.safetensors").write_bytes(content)

    def vouch(manifest: dict[str, Any]) -> None:
        section = manifest["sections"]["model"]
        section.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest(), tree={}, tensors={})

    reseal(path, vouch)


HEADERS = [
    (b"{}", 2**63),
    (b"{}", 2**40),
    (b"{}", 100),
    (b"[" * 100_000, None),
    (b'{"a":' * 100_000, None),
    (b"nonsense", None),
    (b"[]", None),
    (json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode(), None),
    (json.dumps({"w": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 0]}}).encode(), None),
    (json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}).encode(), None),
    (json.dumps({"w": 5}).encode(), None),
]


@pytest.fixture
def small_footprint() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kB"


@pytest.mark.usefixtures("small_footprint")
@pytest.mark.parametrize(("text", "length"), HEADERS, ids=lambda v: str(v)[:30])
def test_absurd_headers_are_refused(text: bytes, length: int | None, pair: Path) -> None:
    header(pair, text, length)
    for verify in (True, False):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
            container.read(pair, verify=verify)


@pytest.mark.usefixtures("small_footprint")
def test_absurd_shapes_in_the_manifest_and_the_header(pair: Path) -> None:
    for shape in ([2**40], [2**62, 8], [-1], [1.5], "x"):
        text = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
        header(pair, text, data=bytes(4))
        table = {"w": ["F32", shape, "0" * 16]}
        reseal(pair, lambda manifest, table=table: manifest["sections"]["model"].update(tensors=table))
        refused(pair, "manifest.json", r"declares more values|has dtype|makes no sense")


@pytest.mark.usefixtures("small_footprint")
@pytest.mark.parametrize("file", ["manifest.json", "COMMIT", "status.json", "model.safetensors"])
def test_huge_files_are_refused_unread(file: str, pair: Path) -> None:
    os.truncate(pair / file, 200 << 20)
    if file == "status.json":
        assert container.read(pair).status == container.get_status(pair)
        assert not container.get_status(pair).known
        assert "has 209715200 bytes" in container.get_status(pair).reason
    else:
        refused(pair, file, r"has \d+ bytes")


@pytest.mark.usefixtures("small_footprint")
def test_deep_manifests_are_refused(pair: Path) -> None:
    for data in (
        b"[" * 1_000_000,
        b'{"a":' * 1_000_000,
        b'{"format":1,"sections":{},"meta":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ):
        (pair / "manifest.json").write_bytes(data)
        (pair / "COMMIT").write_text(hashlib.sha256(data).hexdigest() + "\n")
        refused(pair, "manifest.json", r"nested too deeply|containers deep|is not JSON|too many values")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.update(format=2), "has format '2'; this version of trimtab reads 1"),
        (lambda m: m.pop("format"), "has format"),
        (lambda m: m.pop("step"), "makes no sense"),
        (lambda m: m.update(step=-1), "makes no sense"),
        (lambda m: m.update(step=True), "makes no sense"),
        (lambda m: m.update(sections=[1]), "makes no sense"),
        (lambda m: m.update(sections={"model": 1}), "makes no sense"),
        (lambda m: m.update(meta=3), "makes no sense"),
        (lambda m: m.update(meta={"$": "tensor", "key": "x"}), "makes no sense"),
        (lambda m: m["sections"]["model"].update(sha256="x"), "has no SHA-256"),
        (lambda m: m["sections"]["model"].update(bytes="x"), "is no count"),
        (lambda m: m["sections"]["model"].update(tree={"$": "tensor", "key": "absent"}), "makes no sense"),
        (lambda m: m["sections"]["loader"].update(tree={"$": "eval", "v": "1"}), "makes no sense"),
    ],
)
def test_manifests_that_make_no_sense(change: Callable[[dict[str, Any]], None], match: str, pair: Path) -> None:
    reseal(pair, change)
    for verify in (True, False):
        with pytest.raises(CheckpointError, match=rf"manifest\.json.*{match}"):
            container.read(pair, verify=verify)


def test_a_tensor_file_of_another_checkpoint_is_noticed_unverified(pair: Path) -> None:
    size = (pair / "model.safetensors").stat().st_size
    other = torch.zeros((size - 200) // 4)
    save_file({"layer.weight": other}, pair / "model.safetensors")
    header(pair, (pair / "model.safetensors").read_bytes()[8:100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        container.read(pair, verify=False)
    shutil.copy(pair.parent / container.name_of(1) / "optimizer.safetensors", pair / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: .*is not what was written"):
        container.read(pair)
