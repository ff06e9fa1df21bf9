"""Files that somebody made to cost far more than their size, and what it costs to be told so."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save

GIGABYTE = 10**9
Maker = Callable[[Path], None]


def pickled(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    if 0 <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes((value.bit_length() // 8) + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def call(module: str, name: str, *args: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(args) + b"tR"


def storage(count: int, key: str = "0", kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(count) + b"tQ"


def tensor(count: int, size: list[int], stride: list[int], key: str = "0") -> bytes:
    shape = [b"(" + b"".join(map(number, values)) + b"t" for values in (size, stride)]
    return call(
        "torch._utils",
        "_rebuild_tensor_v2",
        storage(count, key),
        number(0),
        *shape,
        b"\x89",
        call("collections", "OrderedDict"),
    )


def entry(name: str, value: bytes) -> bytes:
    return b"}" + text(name) + value + b"s"


def archive(path: Path, data: bytes, members: dict[str, bytes] | None = None, *, packed: bool = False) -> None:
    """A file as torch.save would write it, around any pickle."""
    how = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as file:
        file.writestr("archive/data.pkl", data)
        for name, content in (members or {}).items():
            file.writestr(f"archive/{name}", content)


def of_pickle(data: bytes, members: dict[str, bytes] | None = None) -> Maker:
    return lambda path: archive(path, data, members)


def zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickled(entry("w", tensor(10**9, [10**9], [1]))))
        with file.open("archive/data/0", "w", force_zip64=True) as member:
            for _ in range(100):
                member.write(bytes(10**7))


def packed_pickle(path: Path) -> None:
    archive(path, pickled(text("a" * 300_000_000)), packed=True)


def overlapping(path: Path) -> None:
    """Many members that are the same bytes: each is honest, all together are not."""
    names = 40_000
    body = b"".join(text(str(i)) + tensor(250_000, [250_000], [1], str(i)) for i in range(names))
    data = pickled(b"}(", body, b"u")
    out = io.BytesIO()

    def local(name: bytes, size: int) -> bytes:
        return struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, size, size, len(name), 0) + name

    places = {}
    for name, content in ((b"archive/data.pkl", data), (b"archive/data/0", bytes(1_000_000))):
        places[name] = (out.tell(), len(content))
        out.write(local(name, len(content)) + content)
    for i in range(1, names):
        places[f"archive/data/{i}".encode()] = places[b"archive/data/0"]
    start = out.tell()
    for name, (at, size) in places.items():
        out.write(
            struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, size, size, len(name), 0, 0, 0, 0, 0, at)
            + name
        )
    length, count = out.tell() - start, min(len(places), 0xFFFF)
    out.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, length, start, 0))
    path.write_bytes(out.getvalue())


def many_members(path: Path) -> None:
    row = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0)
    rows = b"".join(row + b"%05x" % i for i in range(1_000_000))
    path.write_bytes(b"PK\x03\x04" + rows + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, len(rows), 4, 0))


def legacy(path: Path, data: bytes) -> None:
    head = b"".join(pickle.dumps(one, protocol=2) for one in (0x1950A86A20F9469CFC6C, 1001, {}))
    path.write_bytes(head + data + pickle.dumps([], protocol=2))


def legacy_storage(count: int) -> bytes:
    kind = b"ctorch\nFloatStorage\n"
    return b"(" + text("storage") + kind + text("0") + text("cpu") + number(count) + b"NtQ"


def legacy_tensor(path: Path) -> None:
    shape = b"(" + number(10**9) + b"t(" + number(1) + b"t"
    made = call("torch._utils", "_rebuild_tensor_v2", legacy_storage(10**9), number(0), shape, b"\x89N")
    legacy(path, pickled(entry("w", made)))


def laughs(path: Path) -> None:
    """Lists of two times the same list, forty times: a walk through it visits 10**12."""
    data = b"]q\x00" + b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(40))
    archive(path, pickled(data))


def itself(path: Path) -> None:
    archive(path, pickled(b"]q\x00h\x00a"))


def colliding(path: Path) -> None:
    """Keys that a dict can only tell apart one by one."""
    prime = 2**61 - 1
    archive(path, pickled(b"}(", b"".join(number(prime * (i + 1)) + b"N" for i in range(100_000)), b"u"))


def sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * GIGABYTE)


def sparse_tail(path: Path) -> None:
    """A safetensors file that declares ten gigabytes, of which nothing was ever written."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [10**9 * 2], "data_offsets": [0, 8 * 10**9]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 8 * 10**9)


def safe_names(path: Path) -> None:
    """A million tensors without values."""
    row = '"%06x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(row % i for i in range(1_000_000)) + "}").encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def safe_values(path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[' + b"[]," * 8_000_000 + b'[]],"data_offsets":[0,0]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def safe_metadata(path: Path) -> None:
    header = json.dumps({"__metadata__": {f"{i}": "x" for i in range(600_000)}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def safe_depth(path: Path) -> None:
    header = b'{"w":' * 200_000
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def grown(path: Path) -> None:
    """Texts that are converted again and again, each time to twice their length."""
    data = text("a" * 1000)
    for _ in range(30):
        data = call("_codecs", "encode", data, text("hex"))
    archive(path, pickled(data))


TORCH: dict[str, Maker] = {
    "compressed storage": zip_bomb,
    "compressed pickle": packed_pickle,
    "overlapping members": overlapping,
    "many members": many_members,
    "byte array of a size": of_pickle(pickled(call("__builtin__", "bytearray", number(3 * GIGABYTE)))),
    "byte arrays": of_pickle(
        pickled(
            b"](",
            call("__builtin__", "bytearray", call("_codecs", "encode", text("a" * 10**6), text("latin1"))),
            b"q\x01",
        )[:-1]
        + b"".join(b"c__builtin__\nbytearray\n(h\x01tR" for _ in range(2000))
        + b"e."
    ),
    "growing bytes": grown,
    "tensor of a size": of_pickle(pickled(call("torch", "FloatTensor", number(10**9)))),
    "storage of a size": of_pickle(pickled(call("torch.storage", "UntypedStorage", number(4 * GIGABYTE)))),
    "stride 0": of_pickle(pickled(entry("w", tensor(1, [10**12], [0]))), {"data/0": bytes(4)}),
    "many of stride 0": of_pickle(
        pickled(b"}(", b"".join(text(str(i)) + tensor(1, [10**7 + i], [0]) for i in range(1000)), b"u"),
        {"data/0": bytes(4)},
    ),
    "beyond its storage": of_pickle(pickled(entry("w", tensor(1, [10**9], [1]))), {"data/0": bytes(4)}),
    "storage that lies": of_pickle(pickled(entry("w", tensor(10**9, [10**9], [1]))), {"data/0": bytes(4)}),
    "quantized of a size": of_pickle(
        pickled(
            call(
                "torch._utils",
                "_rebuild_qtensor",
                storage(1, kind="QInt8Storage"),
                number(0),
                b"(" + number(3 * GIGABYTE) + b"t",
                b"(" + number(0) + b"t",
                b"(ctorch\nper_tensor_affine\nG\x3f\xf0\0\0\0\0\0\0K\x00t",
                b"\x89",
                call("collections", "OrderedDict"),
            )
        ),
        {"data/0": bytes(4)},
    ),
    "laughs": laughs,
    "itself": itself,
    "deep": of_pickle(pickled(b"]" * 100_000 + b"a" * 99_999)),
    "many lists": of_pickle(pickled(b"](" + b"]" * 20_000_000 + b"e")),
    "many sets": of_pickle(pickled(b"](" + b"\x8f" * 5_000_000 + b"e")),
    "many marks": of_pickle(pickled(b"(" * 20_000_000)),
    "many nothings": of_pickle(pickled(b"](" + b"N" * 50_000_000 + b"e")),
    "memo": of_pickle(pickled(b"N" + b"".join(b"r" + struct.pack("<I", 2**32 - 1 - i) for i in range(2_000_000)))),
    "copied sets": of_pickle(
        pickled(
            b"](",
            b"](",
            b"".join(number(i) for i in range(100_000)),
            b"eq\x00",
            b"c__builtin__\nset\n(h\x00tR" * 10_000,
            b"e",
        )
    ),
    "colliding keys": colliding,
    "long text": of_pickle(b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b"a."),
    "wide text": of_pickle(pickled(text("a" * 60_000_000 + "\U0001f600"))),
    "legacy tensor": legacy_tensor,
    "legacy byte array": lambda path: legacy(path, pickled(call("__builtin__", "bytearray", number(3 * GIGABYTE)))),
    "sparse": sparse_file,
    "zeros": lambda path: path.write_bytes(bytes(10_000_000)),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 40_000),
    "code": of_pickle(pickled(call("os", "system", text("touch executed")))),
}
SAFE: dict[str, Maker] = {
    "sparse": sparse_file,
    "sparse data": sparse_tail,
    "names": safe_names,
    "values": safe_values,
    "depth": safe_depth,
    "a trailing tail": lambda path: path.write_bytes(save({"w": torch.ones(2)}) + bytes(100)),
}
