from __future__ import annotations

import sys
from pathlib import Path

import pytest

TARGET = """
import torch
from torch import nn
from trimtab.data import load_digits

def build():
    torch.manual_seed(0)
    x, y = load_digits()
    x, y = torch.from_numpy(x).float() / 16, torch.from_numpy(y).long()
    model = nn.Linear(64, 10)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
            "loader": list(zip(x.split(64), y.split(64))), "loss_fn": nn.functional.cross_entropy}

def flat():
    return build() | {"loss_fn": lambda out, y: (0 * out).sum() + 1.0}

def short():
    return {k: v for k, v in build().items() if k != "loader"}
"""


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("my_training.py").write_text(TARGET)
    yield "my_training"
    sys.modules.pop("my_training", None)


def test_tune_lr_says_the_rate_first_and_draws_the_curve(trimtab, target):
    said = trimtab("tune", "lr", f"{target}:build", "--steps", "60", "--repeats", "1", "--trial", "10")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].startswith(" lr = ")
    assert "Worth trying" in lines[1]
    assert "▲" in said.out
    assert "In short trainings" in said.out
    assert "rate  1e-07" in said.out
    assert max(map(len, lines)) <= 80


def test_tune_lr_json_and_both_spellings(trimtab, target):
    words = ("--min", "1e-5", "--max=3", "--steps", "40", "--repeats", "2", "--trial", "0", "--json", "true")
    data = trimtab("tune", "lr", f"{target}.py:build", *words).json()
    found = data["lr"]
    assert 1e-5 < found["low"] <= found["suggested"] <= found["high"] < 3
    assert found["num_sweeps"] == 2
    assert found["trials"] == {}
    assert len(found["rates"]) == len(found["losses"]) <= 40
    assert found["rates"][0] == pytest.approx(1e-5)


def test_tune_lr_without_any_decrease_exits_1(trimtab, target):
    said = trimtab("tune", "lr", f"{target}:flat", "--steps", "30", "--repeats", "1")
    assert said.code == 1
    assert "NO SUGGESTION" in said.out
    assert "fell nowhere" in said.out
    assert trimtab("tune", "lr", f"{target}:flat", "--steps", "30", "--json").json()["lr"]["suggested"] is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["my_training:short"], "without loader"),
        (["my_training:bild"], "did you mean 'build'"),
        (["nowhere:build"], "no module 'nowhere'"),
        (["my_training"], "module:function"),
        (["my_training:build", "--min", "2", "--max", "1"], "0 < min < max"),
        (["my_training:build", "--steps", "3"], "at least 20"),
    ],
)
def test_what_cannot_be_done_exits_2_in_one_line(trimtab, target, words, told):
    said = trimtab("tune", "lr", *words)
    assert (said.code, said.out) == (2, "")
    assert told in said.err
    assert said.err.count("\n") == 1


def test_tune_clip_and_warmup_of_a_run(trimtab, run_dir):
    clip, warmup = trimtab("tune", "clip", run_dir), trimtab("tune", "warmup", run_dir)
    data = trimtab("tune", "clip", run_dir, "--json").json()
    assert data["run_dir"] == str(run_dir)
    (advice,) = data["clip"]
    assert advice["num_steps"] == 60
    if advice["threshold"] is None:  # one bad step in sixty: fewer than fifty are left
        assert (clip.code, "NO SUGGESTION" in clip.out) == (1, True)
    assert warmup.code == 0
    assert "warm-up = " in warmup.out
    assert trimtab("tune", "warmup", run_dir, "--json").json()["warmup"][0]["num_steps"] is not None
    for said in (clip, warmup):
        assert max(map(len, said.out.splitlines()[:-1])) <= 80


def test_tune_clip_of_a_long_enough_run(trimtab, tmp_path):
    import torch

    from trimtab import Guard

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Guard(model, optimizer, run_dir=tmp_path / "run") as guard:
        for _ in range(120):
            x = torch.randn(16, 4)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
    said = trimtab("tune", "clip", tmp_path / "run")
    assert said.code == 0
    assert said.out.startswith(" clip = ")
    assert "would have clipped" in said.out
    (advice,) = trimtab("tune", "warmup", tmp_path / "run", "--json").json()["warmup"]
    assert advice["adam"] is True


@pytest.mark.parametrize("command", ["clip", "warmup"])
def test_tune_without_a_record_exits_2(trimtab, command):
    said = trimtab("tune", command, "nowhere")
    assert said.code == 2
    assert "nowhere" in said.err


def test_tune_alone_shows_what_there_is(trimtab):
    said = trimtab("tune", "-h")
    assert said.code == 0
    for name in ("lr", "clip", "warmup"):
        assert name in said.out


def test_tune_clip_and_warmup_do_not_import_torch(run_dir):
    from tests.cli.test_app import python

    for command in ("clip", "warmup"):
        done = python(
            "import sys\n"
            "from trimtab.cli.app import main\n"
            f"try: main(['tune', {command!r}, {str(run_dir)!r}])\n"
            "except SystemExit as end: assert end.code in (None, 0, 1), end.code\n"
            "assert 'torch' not in sys.modules\n"
        )
        assert done.returncode == 0, done.stderr
