"""`trimtab train tabular --tensorboard`: the documented tags in a real event file, read back."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from trimtab.train.recipe import run_recipe
from trimtab.train.recipes import load_recipe

needed = "tensorboard" in os.environ.get("TRIMTAB_REQUIRE", "")


@pytest.mark.skipif(find_spec("tensorboard") is None and not needed, reason="needs tensorboard")
@pytest.mark.filterwarnings("ignore")  # tensorboard's own imports warn
def test_d12_a_recipe_writes_the_tags(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    given = {"table": "breast-cancer", "epochs": 3, "tensorboard": str(tmp_path)}
    result = run_recipe(load_recipe("tabular"), given, fault="nan-features", run_dir=False)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    wanted = {"Training/GradNorm_Before", "Training/GradNorm_After", "Training/CorrectiveAction", "Training/AdjustedLR"}
    wanted |= {f"{name}/Val_Epoch" for name in ("Loss", "Accuracy", "F1")} | {"Loss/Train", "Loss/Train_Epoch"}
    assert wanted <= tags
    assert len(events.Scalars("Training/GradNorm_Before")) == result.num_steps
    assert [event.value for event in events.Scalars("Accuracy/Val_Epoch")] == pytest.approx(
        [row["accuracy"] for row in result.history]
    )
    assert events.Scalars("Training/AdjustedLR")[0].value < 1e-3
