"""A checkpoint that somebody made to do harm is refused: nothing is executed, nothing outside of it is read."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.lab import FILES, folder, pair, refused, reseal
from tests.checkpoint.test_foreign import peak_of
from tests.matrix import sampled
from trimtab.checkpoint import directory
from trimtab.checkpoint.format import container
from trimtab.checkpoint.inspect import sheet_of, snapshot_of
from trimtab.core.errors import CheckpointError

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
    shutil.copy(pair.parent / directory.name_of(1) / "optimizer.safetensors", pair / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: .*is not what was written"):
        container.read(pair)


def named(number: int) -> dict[str, Any]:
    return {f"{i:x}": ["F32", [0], "0123456789abcdef"] for i in range(number)}


TOO_MANY: dict[str, Callable[[dict[str, Any]], None]] = {
    "tensors": lambda m: m["sections"]["model"].update(tensors=named(190_000)),
    "tensors that the file has room for": lambda m: m["sections"]["model"].update(tensors=named(250_000), bytes=10**8),
    "values": lambda m: m.update(meta={"x": [[]] * 2_000_000}),
    "sections": lambda m: m.update(sections={f"s{i}": m["sections"]["loader"] for i in range(2000)}),
    "metrics": lambda m: m["meta"].update(metrics={str(i): 1.0 for i in range(20_000)}),
    "history": lambda m: m.update(history=list(range(200_000))),
    "dimensions": lambda m: m["sections"]["model"].update(tensors={"w": ["F32", [10**18] * 50_000, "0" * 16]}),
    "digits": lambda m: m.update(step=10**4000),
}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("what", sampled(list(TOO_MANY), [w for w in TOO_MANY if not w.startswith("tensors")]))
def test_a_manifest_with_too_much_of_anything_is_refused(what: str, pair: Path) -> None:
    reseal(pair, TOO_MANY[what])
    for look in (lambda: container.read(pair), lambda: sheet_of(pair), lambda: snapshot_of(pair)):
        peak, said = peak_of(look)
        assert "manifest.json" in said or (look() == snapshot_of(pair) and snapshot_of(pair).state == "bad"), said
        assert peak < 200


IMPOSSIBLE: list[dict[str, Any]] = [
    {"created": value} for value in (-1, 1e300, 10**20, "yesterday", None, True, [], 253_402_300_800)
]
IMPOSSIBLE += [{"step": value} for value in (-1, 1.5, "7", 10**15, None)]
IMPOSSIBLE += [{"writer": value} for value in (3, None, [])]
IMPOSSIBLE += [{"sequence": -1}, {"sequence": "1"}, {"history": "abc"}, {"history": [-1]}, {"history": {"a": 1}}]
IMPOSSIBLE += [{"meta": {"metrics": value}} for value in (3, [1], {"a": "b"}, {"a": None}, {"a": True}, {"a": [1]})]
IMPOSSIBLE += [{"meta": {"metrics": {"a": {"$": "int", "v": "f" * 400}}}}, {"meta": {"repaired": 1}}]


@pytest.mark.parametrize("fields", IMPOSSIBLE, ids=lambda fields: str(fields)[:60])
def test_dates_steps_and_metrics_that_cannot_be(fields: dict[str, Any], pair: Path) -> None:
    reseal(pair, lambda manifest: manifest.update(fields))
    refused(pair, "manifest.json", "makes no sense")
    assert snapshot_of(pair).state == "bad"


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_dates_that_are_no_numbers(token: str, pair: Path) -> None:
    text = (pair / "manifest.json").read_text()
    text = re.sub(r'"created": ?[0-9.]+', f'"created":{token}', text)
    (pair / "manifest.json").write_text(text)
    (pair / "COMMIT").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
    refused(pair, "manifest.json", "is no time of writing")
