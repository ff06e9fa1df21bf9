"""Own tables, pairs and samples in every layout by the command line: killed and resumed alike, and under doctor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.matrix import in_ci
from tests.train.killed import call, killed_and_resumed_alike
from tests.train.test_clip6_own import LAYOUTS, coco, npz, table
from tests.train.test_pairs import arrays as pair_arrays
from tests.train.test_pairs_own import lay, save
from tests.train.test_tabular_own import HEADER, people, spoil, write

TABULAR = (
    "tabular",
    "--target",
    "income",
    "--epochs",
    "4",
    "--batch-size",
    "16",
    "--width",
    "16",
    "--ema-decay",
    "0.9",
)
PAIRS = ("pairs", "--image-size", "8", "--batch-size", "4", "--pretrain-epochs", "1", "--epochs", "2", "--width", "16")
PAIRS += ("--layers", "1", "--heads", "2", "--grad-log-interval", "0", "--gpu-log-interval", "0")
CLIP6 = ("clip6", "--steps", "9", "--width", "16", "--channels", "4", "--image-size", "12", "--text-features", "64")
CLIP6 += ("--batch-size", "8", "--warmup-steps", "1")


def _csv(folder: Path) -> Path:
    return write(folder / "people.csv", people())


def _split(folder: Path) -> Path:
    rows = [[*row, "val" if i % 5 == 0 else "train"] for i, row in enumerate(people())]
    return write(folder / "people.csv", rows, [*HEADER, "split"])


def _two_files(folder: Path) -> Path:
    (folder / "data").mkdir()
    write(folder / "data" / "train.csv", people(96))
    write(folder / "data" / "val.csv", people(24, seed=2))
    return folder / "data"


def _json_lines(folder: Path) -> Path:
    lines = [json.dumps(dict(zip(HEADER, row, strict=True))) for row in people()]
    (folder / "people.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder / "people.jsonl"


def _parquet(folder: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = people()
    parquet.write_table(
        pyarrow.table({name: [row[i] for row in rows] for i, name in enumerate(HEADER)}), folder / "people.parquet"
    )
    return folder / "people.parquet"


TABLES: dict[str, Callable[[Path], Path]] = {
    "csv": _csv,
    "split": _split,
    "two files": _two_files,
    "json lines": _json_lines,
    "parquet": _parquet,
}


def _pictures(folder: Path) -> Path:
    lay(folder / "data", ending=".png")
    return folder / "data"


def _undivided(folder: Path) -> Path:
    lay(folder / "data", 100, split=False)
    return folder / "data"


def _pair_arrays(folder: Path) -> Path:
    np.savez(folder / "pairs.npz", **pair_arrays())
    return folder


PAIR_LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "csv": _pictures,
    "csv without split": _undivided,
    "npz": _pair_arrays,
}


@pytest.mark.parametrize("layout", in_ci(list(TABLES), ["csv"]))
def test_d18_tabular_in_every_layout(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    killed_and_resumed_alike([*TABULAR, "--data", str(TABLES[layout](tmp_path))], tmp_path, num_steps=24)


@pytest.mark.parametrize(
    ("layout", "workers"),
    in_ci(
        {f"{one}, {num} workers": (one, num) for one, num in [*((one, "0") for one in PAIR_LAYOUTS), ("csv", "1")]},
        ["csv, 1 workers"],
    ),
)
def test_e9_pairs_in_every_layout(layout: str, workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [*PAIRS, "--data-dir", str(PAIR_LAYOUTS[layout](tmp_path)), "--workers", workers]
    killed_and_resumed_alike(argv, tmp_path, num_steps=15)


@pytest.mark.parametrize(
    ("layout", "workers"),
    in_ci(
        {f"{one}, {num} workers": (one, num) for one, num in [*((one, "0") for one in LAYOUTS), ("csv", "1")]},
        ["csv, 1 workers"],
    ),
)
def test_a1_clip6_in_every_layout(layout: str, workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    argv = [*CLIP6, "--data", str(LAYOUTS[layout](tmp_path / "data")), "--workers", workers]
    killed_and_resumed_alike(argv, tmp_path, num_steps=9)


# -- doctor ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", in_ci(list(TABLES), ["csv"]))
def test_doctor_passes_on_an_own_table(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["doctor", *TABULAR, "--data", str(TABLES[layout](tmp_path))]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("layout", in_ci(list(PAIR_LAYOUTS), ["csv"]))
def test_doctor_passes_on_own_pairs(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["doctor", *PAIRS, "--data", str(PAIR_LAYOUTS[layout](tmp_path))]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("layout", in_ci(list(LAYOUTS), ["csv"]))
def test_doctor_passes_on_own_samples(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    data = LAYOUTS[layout](tmp_path / "data")
    assert call(["doctor", *CLIP6, "--data", str(data)]) == 0, capsys.readouterr().out


def _not_a_number(folder: Path) -> tuple[list[str], str]:
    path = write(folder / "people.csv", spoil(people(), 41, "age", "old"))
    return [*TABULAR, "--data", str(path)], "people.csv, row 42 (line 43), column 'age': 'old'"


def _no_target(folder: Path) -> tuple[list[str], str]:
    path = write(folder / "people.csv", spoil(people(), 41, "income", ""))
    return [*TABULAR, "--data", str(path)], "people.csv, row 42 (line 43), column 'income': no target"


def _unseen_label(folder: Path) -> tuple[list[str], str]:
    rows = [[*row[:-1], "yes" if i % 2 else "no", "val" if i % 5 == 0 else "train"] for i, row in enumerate(people())]
    rows[50][-2] = "maybe"
    path = write(folder / "people.csv", rows, [*HEADER, "split"])
    return [*TABULAR, "--data", str(path)], "people.csv, row 51 (line 52), column 'income': the label 'maybe' never"


def _cut_off_picture(folder: Path) -> tuple[list[str], str]:
    lay(folder, ending=".png")
    path = folder / "images" / "p7.png"
    path.write_bytes(path.read_bytes()[:40])
    return [*PAIRS, "--data", str(folder)], f"{path} cannot be read as a picture"


def _no_picture(folder: Path) -> tuple[list[str], str]:
    lines = lay(folder)
    lines[9] = lines[9].replace("p9.npy", "gone.npy")
    save(folder, lines)
    return [*PAIRS, "--data", str(folder)], "pairs.csv, row 10 (line 11), column 'image_a': there is no picture"


def _unseen_answer(folder: Path) -> tuple[list[str], str]:
    lines = [line.replace("Similar", "First") for line in lay(folder)]
    lines[4] = lines[4].replace(",First,", ",Similar,").replace(",Second,", ",Similar,")
    save(folder, lines)
    return [*PAIRS, "--data", str(folder)], "pairs.csv, row 5 (line 6), column 'answer': Similar never occurs"


def _no_caption(folder: Path) -> tuple[list[str], str]:
    coco(folder)
    path = folder / "annotations" / "captions_train2017.json"
    given = json.loads(path.read_text())
    given["annotations"] = [one for one in given["annotations"] if one["image_id"] != 103]
    path.write_text(json.dumps(given))
    return [
        *CLIP6,
        "--data",
        str(folder),
    ], "captions_train2017.json, image 4 (id 103): '000000000003.png' has no caption"


def _cut_off_sound(folder: Path) -> tuple[list[str], str]:
    path = table(folder)
    (folder / "sounds" / "6.wav").write_bytes(b"RIFF")
    return [*CLIP6, "--data", str(path)], "data.csv, row 7 (line 8), column 'sound':"


def _infinite(folder: Path) -> tuple[list[str], str]:
    path = npz(folder)
    with np.load(path) as file:
        values = {key: file[key] for key in file.files}
    values["depth"][8, 3, 3] = np.inf
    np.savez(path, **values)
    return [*CLIP6, "--data", str(path)], "six.npz, row 9, 'depth': 1 of 144 numbers are NaN or Inf"


@pytest.mark.parametrize(
    "plant",
    [
        _not_a_number,
        _no_target,
        _unseen_label,
        _cut_off_picture,
        _no_picture,
        _unseen_answer,
        _no_caption,
        _cut_off_sound,
        _infinite,
    ],
)
def test_doctor_names_file_and_row_of_a_fault(
    plant: Callable[[Path], tuple[list[str], str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    argv, told = plant(tmp_path / "data")
    assert call(["doctor", *argv]) == 1
    assert told in " ".join(capsys.readouterr().out.split())
    assert call(["train", *argv, "--run-dir", str(tmp_path / "run")]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
