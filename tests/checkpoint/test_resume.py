"""A run that was killed and resumed ends with the very bits of one that never stopped."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import training
from tests.checkpoint.test_state import bits
from tests.checkpoint.training import ACCUMULATE, EPOCHS, OPTIMIZERS, PER_EPOCH, SCHEDULERS, Trainer
from tests.matrix import sampled
from tests.run.running import Nest
from trimtab.checkpoint import directory, state
from trimtab.checkpoint.format import container
from trimtab.checkpoint.format.tree import flatten, unflatten
from trimtab.core.errors import CheckpointError

SCRIPT = training.__file__
MIDDLE = EPOCHS // 2 * PER_EPOCH
CUTS = {
    "in the middle of an epoch and of an accumulation": f"micro {MIDDLE - 4}",
    "after a step, in the middle of an epoch": f"micro {MIDDLE - 2}",
    "exactly at the end of an epoch, inside the loop": f"micro {MIDDLE}",
    "between two epochs": f"epoch {EPOCHS // 2}",
    "before the first step": "micro 1",
}


def test_the_cuts_are_where_they_say() -> None:
    assert (MIDDLE - 4) % PER_EPOCH != 0
    assert (MIDDLE - 4) % ACCUMULATE == 2
    assert (MIDDLE - 2) % ACCUMULATE == 0
    assert MIDDLE % ACCUMULATE != 0


def stored(sections: dict[str, Any]) -> dict[str, Any]:
    """What a file would return, without the cost of one."""
    tree, tensors = flatten(sections)
    return unflatten(json.loads(json.dumps(tree)), {key: one.clone() for key, one in tensors.items()})


def differing(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two states differ, so that a failure says more than that they do."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [line for key in one for line in differing(one[key], other[key], f"{path}.{key}")]
    return [] if bits(one) == bits(other) else [path]


# Every optimizer under every schedule; with workers each of them once, as what a loader keeps knows of neither.
WITH_WORKERS = [("sgd", "onecycle", 2), ("adam", "cosine", 2), ("adamw", "plateau", 2), ("adamw fused", "onecycle", 2)]


def test_workers_are_tried_with_every_optimizer_and_schedule() -> None:
    assert {case[0] for case in WITH_WORKERS} == set(OPTIMIZERS)
    assert {case[1] for case in WITH_WORKERS} == set(SCHEDULERS)


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "workers"),
    sampled(
        {"-".join(map(str, case)): case for case in [*product(OPTIMIZERS, SCHEDULERS, (0,)), *WITH_WORKERS]},
        ["sgd-plateau-0", "adam-onecycle-0", "adamw fused-cosine-0", "adamw-plateau-2"],
    ),
)
def test_b29_resume_is_bit_exact_from_every_cut(optimizer: str, scheduler: str, workers: int) -> None:
    """One run to the end, a state taken at each cut; new objects of another seed then go on from each."""
    saved: dict[str, Any] = {}
    whole = Trainer(optimizer, scheduler, workers)
    wanted = {place: cut for cut, place in CUTS.items()}
    whole.run(lambda place: saved.update({place: stored(whole.everything())}) if place in wanted else None)
    expected = copy.deepcopy(whole.everything())
    assert len(expected["extra"]["ids"]) == EPOCHS * PER_EPOCH * training.BATCH
    for place, cut in wanted.items():
        if workers and cut == "before the first step" and optimizer != "sgd":
            continue  # starting workers is what takes the time
        other = Trainer(optimizer, scheduler, workers, seed=1234)
        state.restore(saved[place], **other.parts())
        other.run()
        assert differing(other.everything(), expected) == [], cut


def test_saving_changes_nothing() -> None:
    quiet = Trainer("adamw", "onecycle")
    quiet.run()
    expected = stored(quiet.everything())
    saving = Trainer("adamw", "onecycle")
    saving.run(lambda place: stored(saving.everything()) and None)
    assert differing(saving.everything(), expected) == []


def test_the_same_run_under_a_plain_loader() -> None:
    """The wrapped loader is not a run of its own: the weights are those of the loader alone."""
    wrapped = Trainer("sgd", "cosine")
    wrapped.run()
    plain = Trainer("sgd", "cosine")
    plain.loader = plain.loader._loader  # type: ignore[assignment]
    plain.run()
    assert bits(dict(wrapped.model.state_dict())) == bits(dict(plain.model.state_dict()))
    assert wrapped.progress == plain.progress


@pytest.mark.parametrize("section", ["optimizer", "scheduler", "ema", "loader", "gradients", "rng"])
def test_nothing_in_it_is_superfluous(section: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without any one part the run ends elsewhere: the test above would notice a part that is not restored."""
    whole = Trainer("adam", "onecycle")
    saved: dict[str, Any] = {}
    whole.run(lambda place: saved.update(stored(whole.everything())) if place == f"micro {MIDDLE - 4}" else None)
    other = Trainer("adam", "onecycle", seed=1234)
    state.restore({name: one for name, one in saved.items() if name != section}, strict=False, **other.parts())
    other.run()
    assert differing(other.everything(), whole.everything()) != []


# -- killed for real --------------------------------------------------------------------------------------------------


def child(nest: Nest | None, folder: Path, *told: str) -> tuple[int, str, str]:
    """Run the trainer in a process of its own, or in a fork of the nest: exit code, output, errors."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if nest is None:
        start, root = [sys.executable, "-m", "tests.checkpoint.training", str(folder), *told], Path(SCRIPT).parents[2]
        done = subprocess.run(start, cwd=root, env=env, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout, done.stderr
    files = {name: folder.with_name(name) for name in ("stdin", "stdout", "stderr")}
    for path in files.values():
        path.write_bytes(b"")
    words = {"words": [SCRIPT, str(folder), *told], "guarded": False, "cwd": str(folder.parent), "env": env}
    code = nest.run(words | {name: str(path) for name, path in files.items()})
    return code, files["stdout"].read_text(), files["stderr"].read_text()


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "workers", "save_every", "die_after", "begun", "forked"),
    sampled(
        {
            "after a step": ("sgd", "plateau", "0", "10", f"micro {MIDDLE}", 20, False),  # in the middle of an epoch
            "within an accumulation": ("adam", "onecycle", "2", "5", f"micro {MIDDLE + 5}", 25, True),  # and an epoch
            "at an epoch's end": ("adamw fused", "cosine", "2", str(PER_EPOCH), f"epoch {EPOCHS // 2}", MIDDLE, True),
        },
        ["after a step"],
    ),
)
def test_b29_killed_and_resumed_by_a_new_process(
    tmp_path: Path,
    nest: Nest,
    optimizer: str,
    scheduler: str,
    workers: str,
    save_every: str,
    die_after: str,
    begun: int,
    forked: bool,
) -> None:
    run = (optimizer, scheduler, workers, "--save-every", save_every)
    where = (nest if forked else None, tmp_path / "saved")
    code, out, err = child(*where, *run, "--seed", "0", "--die-after", die_after)
    assert code == -signal.SIGKILL, err
    assert json.loads(out) == {"begun": None}
    code, out, err = child(*where, *run, "--seed", "99")
    assert code == 0, err
    assert json.loads(out) == {"begun": begun}
    whole = Trainer(optimizer, scheduler, int(workers))
    whole.run()
    (path,) = (path for _, _, path in directory.entries(tmp_path / "saved" / "end"))
    assert differing(container.read(path).sections, stored(whole.everything())) == []


# -- what does not fit ------------------------------------------------------------------------------------------------


def _wider(trainer: Trainer) -> None:
    trainer.model.head = torch.nn.Linear(12, 2)


def _one_more(trainer: Trainer) -> None:
    trainer.model.more = torch.nn.Linear(1, 1)


def _one_less(trainer: Trainer) -> None:
    del trainer.model.body[1]


def _double(trainer: Trainer) -> None:
    trainer.model.head.double()


def _one_group(trainer: Trainer) -> None:
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.01)


def _batch(trainer: Trainer) -> None:
    trainer.loader = training.ResumableLoader(training.DataLoader(trainer.data, batch_size=8, shuffle=True))


def _other_schedule(trainer: Trainer) -> None:
    trainer.scheduler = SCHEDULERS["plateau"](trainer.optimizer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_wider, r"model: head\.weight is float32 \(1, 12\) in the checkpoint, float32 \(2, 12\) here"),
        (_one_more, r"model: tensors here but not in the checkpoint: more\.weight, more\.bias"),
        (_one_less, r"model: tensors in the checkpoint but not here: body\.1\."),
        (_double, r"model: head\.bias is float32 \(1,\) in the checkpoint, float64 \(1,\) here"),
        (_one_group, r"optimizer: the number of parameter groups is 2 in the checkpoint, 1 here"),
        (_batch, r"loader: batch_size is 4 in the checkpoint, 8 here"),
        (_other_schedule, r"scheduler: its class is OneCycleLR in the checkpoint, ReduceLROnPlateau here"),
    ],
)
def test_what_does_not_fit_is_refused_and_not_one_bit_changes(tmp_path: Path, change: Any, words: str) -> None:
    whole = Trainer("adamw", "onecycle")
    whole.run(epochs=1)
    training.save(tmp_path, whole)
    other = Trainer("adamw", "onecycle", seed=5)
    other.run(lambda place: None, epochs=1)
    change(other)
    before = stored(other.everything())
    with pytest.raises(CheckpointError, match=words) as caught:
        training.resume(tmp_path, other)
    assert "nothing was changed" in str(caught.value)
    assert differing(stored(other.everything()), before) == []
