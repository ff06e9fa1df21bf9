"""Experiments that are no single training: a process killed and resumed, many checkpoints, seeded faults for doctor."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ROTATED_EPOCHS = 110


def killed_and_resumed(recipe: str, seed: int, *, quick: bool = True) -> dict[str, Any]:
    """Train to the end; train again, killed within an epoch of the last stage; go on; compare the weights."""
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder) / "whole", Path(folder) / "broken"
        codes = [
            _child(recipe, seed, quick, whole, kill=False, resume=None),
            _child(recipe, seed, quick, broken, kill=True, resume=None),
        ]
        left = sorted(str(path.relative_to(broken)) for path in broken.glob("**/step-*"))
        codes.append(_child(recipe, seed, quick, broken, kill=False, resume="auto"))
        first, second = (torch.load(path / "end.pt", weights_only=True) for path in (whole, broken))
        place = json.loads((broken / "killed.json").read_text())
    same = first.keys() == second.keys() and all(_same_bits(first[name], second[name]) for name in first)
    return {"codes": codes, "identical": same, "tensors": len(first), "killed": place, "checkpoints": left}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()


def _child(recipe: str, seed: int, quick: bool, folder: Path, *, kill: bool, resume: str | None) -> int:
    folder.mkdir(exist_ok=True)
    asked = {"recipe": recipe, "seed": seed, "quick": quick, "folder": str(folder), "kill": kill, "resume": resume}
    line = [sys.executable, "-c", "import recipes_trials; recipes_trials.child()", json.dumps(asked)]
    env = dict(os.environ) | {"PYTHONPATH": f"{HERE}:{HERE.parent / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a training ended with {done.returncode}: {done.stderr[-1500:]}")
    return done.returncode


def child() -> None:
    """What runs in the process that is killed, and in the one that goes on."""
    from trimtab.train.recipe import run_recipe
    from trimtab.train.recipes import load_recipe

    asked = json.loads(sys.argv[1])
    folder, recipe = Path(asked["folder"]), load_recipe(asked["recipe"])
    model: list[torch.nn.Module] = []

    def build(settings: Any) -> Any:
        parts = recipe.build(settings)
        model.append(parts.model)
        before = parts.after_step

        def after(trainer: Any) -> None:
            if before is not None:
                before(trainer)
            course, last = trainer.course, trainer.rig.stage.name == trainer.stages[-1].name
            steps = len(parts.train_loader) // trainer.config.accumulation_steps
            within = course.step - course.first_step
            if asked["kill"] and last and course.epoch == 1 and within == max(steps // 2, 1):
                place = {"stage": trainer.rig.stage.name, "epoch": course.epoch + 1, "step": within + 1, "of": steps}
                (folder / "killed.json").write_text(json.dumps(place))
                os.kill(os.getpid(), signal.SIGKILL)

        return replace(parts, after_step=after)

    run_recipe(
        replace(recipe, build=build),
        {"seed": asked["seed"]},
        quick=asked["quick"],
        checkpoint_dir=folder / "checkpoints",
        run_dir=folder / "run",
        resume=asked["resume"],
    )
    torch.save({name: value.clone() for name, value in model[0].state_dict().items()}, folder / "end.pt")


def rotation(recipe: str, seed: int, stage: str, metric: str, **given: Any) -> dict[str, Any]:
    """A long stage with a checkpoint after each epoch: which are left, and which epochs were best, by their numbers."""
    from trimtab.train.recipe import run_recipe
    from trimtab.train.recipes import load_recipe

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        result = run_recipe(load_recipe(recipe), {"seed": seed, **given}, checkpoint_dir=root, run_dir=False)
        rows = [row for row in result.history if row["stage"] == stage]
        ends = {row["first_step"] + row["num_steps"]: epoch for epoch, row in enumerate(rows, 1)}
        holds = next(path.parent for path in root.glob("**/step-*") if path.parent.name in (f"2-{stage}", root.name))
        left = sorted(int(re.sub(r"\D", "", path.name)) for path in holds.glob("step-*"))
    highest = max(row[metric] for row in rows)
    best = [epoch for epoch, row in enumerate(rows, 1) if row[metric] == highest]
    return {"epochs": len(rows), "left": [ends.get(step, -step) for step in left], "best": best}


SEEDED = """from tests.train.test_pairs_doctor import FAULTS, build


def sound():
    return build()

"""
ONE_SEEDED = """
def fault_{number}():
    built = build()
    FAULTS[{number}][0](built)
    return built

"""


def seeded_faults() -> dict[str, Any]:
    """`trimtab doctor` on the pairs as the tests build them, sound and with each of their faults."""
    from tests.train.test_pairs_doctor import FAULTS
    from typer.testing import CliRunner

    from trimtab.cli.app import app

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seeded_pairs.py"
        path.write_text(SEEDED + "".join(ONE_SEEDED.format(number=number) for number in range(len(FAULTS))))

        def ask(function: str) -> tuple[int, list[str]]:
            done = CliRunner().invoke(app, ["doctor", f"{path}:{function}", "--json"])
            lines = json.loads(done.stdout)["lines"] if done.exit_code in (0, 1) else []
            return done.exit_code, [line["name"] for line in lines if line["status"] == "fail"]

        code, named = ask("sound")
        faults = []
        for number, (change, cause) in enumerate(FAULTS):
            fault_code, fault_named = ask(f"fault_{number}")
            name = change.__qualname__.split(".")[0].replace("_", " ")
            faults.append({"fault": name, "code": fault_code, "wanted": cause, "named": fault_named})
    return {"healthy": {"code": code, "named": named}, "faults": faults}
