"""The command line, killed at a step as by a power cut, resumed, and compared bit for bit with one that was not."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.checkpoint.checkpointer import Checkpointer
from trimtab.cli.app import main
from trimtab.compat.checkpoint_pair import read_checkpoint

ROOT = Path(__file__).parents[2]
CODE = """
import os, signal, sys
import torch
from trimtab.cli.app import main
from trimtab.train.trainer import Trainer
torch.set_num_threads(1)
made = Trainer._update
def update(trainer, *given):
    if trainer.course.steps_done == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    made(trainer, *given)
Trainer._update = update
main(sys.argv[1:])
"""


def call(argv: Sequence[str]) -> int:
    """The exit code of `trimtab ...` in this process."""
    torch.set_num_threads(1)
    with pytest.raises(SystemExit) as end:
        main(argv)
    return int(end.value.code or 0)


def final_state(folder: Path) -> dict[str, Any]:
    """Step, weights and optimizer of the newest checkpoint, in the last stage that has any."""
    stages = sorted(one for one in folder.iterdir() if one.is_dir() and one.name[:1].isdigit())
    last = Checkpointer(stages[-1] if stages else folder).list()[-1]
    found = read_checkpoint(last.path)
    return {"step": last.step, **{name: found[name] for name in ("model_state_dict", "optimizer_state_dict")}}


def same_bits(one: Any, other: Any) -> bool:
    """Whether two states are alike to the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same_bits(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def in_processes(argv: Sequence[str], folder: Path, at: int = -1) -> subprocess.CompletedProcess[str]:
    """`trimtab ...` in two processes, both killed before that step."""
    script = folder / "killed.py"
    script.write_text(CODE.format(at=at), encoding="utf-8")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), *argv]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def killed_and_resumed_alike(argv: Sequence[str], folder: Path, *, num_steps: int, every: int = 1) -> None:
    """Run `trimtab train ...` whole, and again killed at a random one of its steps and resumed; both end alike."""
    at = random.SystemRandom().randrange(1, num_steps)
    words = [*argv, "--checkpoint-every", str(every), "--run-dir", str(folder / "run"), "--json"]
    assert call(["train", *words, "--checkpoint-dir", str(folder / "whole")]) == 0
    broken = ["train", *words, "--checkpoint-dir", str(folder / "broken")]
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(at=at), *broken], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, f"at step {at}: {done.stdout}{done.stderr}"
    assert call([*broken, "--resume", "auto"]) == 0, f"resumed from step {at}"
    whole, other = final_state(folder / "whole"), final_state(folder / "broken")
    assert whole["step"] == other["step"], f"killed at step {at}"
    assert same_bits(whole, other), f"killed at step {at}: the weights or the optimizer differ"
