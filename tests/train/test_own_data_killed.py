"""Own data on disk in every layout, trained by the command line, killed at a random step, resumed bit-identically."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.matrix import in_ci
from tests.train.killed import call, final_state, in_processes, killed_and_resumed_alike, same_bits
from tests.train.test_segment_folder import LAYOUTS, own_data

SEGMENT = ("segment", "--img-size", "16", "--batch-size", "2", "--accumulation-steps", "2", "--num-experts", "2")
SEGMENT += ("--epochs", "3", "--stage1-epochs", "1", "--pretrain-epochs", "0", "--lr", "0.004", "--use-ema")
CHARLM = (
    "charlm",
    "--steps",
    "24",
    "--epochs",
    "50",
    "--d-model",
    "16",
    "--layers",
    "1",
    "--heads",
    "2",
    "--d-ff",
    "32",
)
CHARLM += ("--seq", "8", "--max-seq", "8", "--batch-size", "4", "--warmup-steps", "4", "--sample-length", "4")
TEXT = "the forest was dark and she was alone in the forêt. "


@pytest.mark.parametrize("layout", in_ci(list(LAYOUTS), ["images and masks", "COD10K"]))
def test_b29_segment_in_every_layout(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = own_data(tmp_path / "data", 10, names=LAYOUTS[layout])
    workers = "2" if layout == "images and masks" else "0"
    more = ("--stage2-batch-size", "4") if layout == "COD10K" else ()
    given = "val" in layout or "images/train" in layout
    per_epoch = -(-(10 if given else 8) // 4)
    argv = [*SEGMENT, *more, "--data", str(data), "--num-workers", workers]
    killed_and_resumed_alike(argv, tmp_path, num_steps=3 * per_epoch - (2 if more else 0))


@pytest.mark.long
def test_b23_segment_in_two_processes(tmp_path: Path) -> None:
    """Both end with the same weights, and with those of a run that was not killed."""
    data = own_data(tmp_path / "data", 18)
    argv = [
        "train",
        *SEGMENT,
        "--data",
        str(data),
        "--num-workers",
        "0",
        "--use-ddp",
        "--checkpoint-every",
        "1",
        "--json",
    ]
    argv += ["--run-dir", str(tmp_path / "run"), "--checkpoint-dir"]
    whole = in_processes([*argv, str(tmp_path / "whole")], tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert len(json.loads(whole.stdout)["runs"]) == 1, "the first process alone speaks"
    at = random.SystemRandom().randrange(1, 6)
    assert in_processes([*argv, str(tmp_path / "broken")], tmp_path, at).returncode != 0
    again = in_processes([*argv, str(tmp_path / "broken"), "--resume", "auto"], tmp_path)
    assert again.returncode == 0, again.stderr
    first, other = final_state(tmp_path / "whole"), final_state(tmp_path / "broken")
    assert same_bits(first, other), f"killed at step {at}"
    assert same_bits(first["model_state_dict"], final_state(tmp_path / "whole" / "rank1")["model_state_dict"])


def test_b23_ddp_without_torchrun_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert call(["train", *SEGMENT, "--use-ddp", "--run-dir", str(tmp_path)]) == 2
    assert "which torchrun starts: torchrun --nproc-per-node 2 -m trimtab train" in capsys.readouterr().err


def _file(folder: Path) -> Path:
    (folder / "text.txt").write_text(TEXT * 40, encoding="utf-8")
    return folder / "text.txt"


def _folder(folder: Path) -> Path:
    for name in ("a.txt", "b/c.md", "b/d"):
        (folder / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "text" / name).write_text(TEXT * 20, encoding="utf-8")
    return folder / "text"


def _json_tokenizer(folder: Path) -> str:
    package = pytest.importorskip("tokenizers")
    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    made.train_from_iterator([TEXT], package.trainers.BpeTrainer(vocab_size=300, show_progress=False))
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("make", "tokenizer"),
    in_ci(
        {
            "file, byte": (_file, "byte"),
            "file, char": (_file, "char"),
            "folder, byte": (_folder, "byte"),
            "folder, word": (_folder, "word"),
            "file, its own": (_file, _json_tokenizer),
        },
        ["folder, word"],
    ),
)
def test_c7_charlm_on_files_and_folders(
    make: Callable[[Path], Path],
    tokenizer: str | Callable[[Path], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    name = tokenizer if isinstance(tokenizer, str) else tokenizer(tmp_path)
    argv = [*CHARLM, "--data", str(make(tmp_path)), "--tokenizer", name, "--metrics-file", "m.jsonl"]
    killed_and_resumed_alike(argv, tmp_path, num_steps=24, every=3)
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    logged = [line["step"] for line in lines if "train/loss" in line.get("metrics", {})]
    assert logged == [0, 10, 20], "the metrics of the steps before the resume are still there, once"


# -- doctor --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["images and masks", "train, val and test"])
def test_doctor_passes_on_own_pictures(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = own_data(tmp_path / "data", 16, names=LAYOUTS[layout])
    code = call(["doctor", *SEGMENT, "--data", str(data), "--num-workers", "0"])
    assert code == 0, capsys.readouterr().out


def test_doctor_passes_on_own_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["doctor", *CHARLM, "--data", str(_folder(tmp_path)), "--metrics-file", ""]) == 0, (
        capsys.readouterr().out
    )


def _unreadable(root: Path) -> str:
    path = root / "images" / "3.npy"
    path.write_bytes(path.read_bytes()[:40])
    return "3.npy cannot be read"


def _cut_off(root: Path) -> str:
    image = pytest.importorskip("PIL.Image")
    (root / "images" / "3.npy").unlink()
    path = root / "images" / "3.jpg"
    image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 20, 3)).astype(np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-200])
    return "3.jpg cannot be read"


def _other_size(root: Path) -> str:
    np.savez(root / "masks" / "3.npz", np.zeros((7, 9), np.uint8))
    return "3.npy is 20 x 20 pixels and its mask"


def _no_mask(root: Path) -> str:
    (root / "masks" / "3.npz").unlink()
    return "3.npy has no mask of the same name"


def _nan(root: Path) -> str:
    np.save(root / "images" / "3.npy", np.full((20, 20, 3), np.nan))
    return "3.npy holds float64 values from nan to nan"


@pytest.mark.parametrize("plant", [_unreadable, _cut_off, _other_size, _no_mask, _nan])
def test_doctor_names_the_file_of_a_fault_in_pictures(
    plant: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told = plant(own_data(tmp_path / "data", 10))
    assert call(["doctor", *SEGMENT, "--data", str(tmp_path / "data"), "--num-workers", "0"]) == 1
    assert told in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (TEXT.encode() + b"\nand\n\xff\xfe here", "two.txt, line 3: not UTF-8 (invalid start byte)"),
        (TEXT.encode() + b"\nand\x00here", "two.txt, line 2: a NUL byte; this is not text"),
        (b" \n ", "two.txt is empty"),
        (TEXT.encode() + "\nê".encode()[:-1], "two.txt, line 2: not UTF-8 (it ends within a character)"),
    ],
)
def test_doctor_names_file_and_line_of_a_fault_in_text(
    content: bytes, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.txt").write_bytes(content)
    argv = ["doctor", *CHARLM, "--data", str(tmp_path / "two.txt"), "--metrics-file", "", "--batch-size", "1"]
    assert call(argv) == 1
    assert told in " ".join(capsys.readouterr().out.split())
