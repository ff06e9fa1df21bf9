from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.train.helpers import QUIET, loaders, trainer
from trimtab.core.errors import InputError
from trimtab.sample.transfer import to_device
from trimtab.train.device import choose_device
from trimtab.train.evaluation import evaluate_model
from trimtab.train.recipe import run_recipe
from trimtab.train.recipes import load_recipe
from trimtab.train.settings import TrainConfig
from trimtab.train.trainer import Trainer


def gpus(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def test_e1_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    assert choose_device() == torch.device("cpu")
    gpus(monkeypatch, 2)
    assert choose_device("auto") == torch.device("cuda", 0)
    assert choose_device("cuda") == torch.device("cuda", 1), "the one that is current"
    assert choose_device("cuda:0") == torch.device("cuda", 0)


def test_a_device_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="device is 'gpu'; expected auto, cpu, cuda or cuda:N"):
        choose_device("gpu")
    with pytest.raises(InputError, match="nothing is computed"):
        choose_device("meta")
    gpus(monkeypatch, 2)
    with pytest.raises(InputError, match="there are 2 GPUs; expected cuda:0 to cuda:1"):
        choose_device("cuda:2")
    gpus(monkeypatch, 0)
    with pytest.raises(InputError, match="sees no GPU here; use --device cpu or auto"):
        Trainer(nn.Linear(1, 1), nn.functional.mse_loss, TrainConfig(device="cuda"))
    with pytest.raises(InputError, match="sees no GPU here"):
        run_recipe(load_recipe("tabular"), {"device": "cuda:0"}, quick=True, run_dir=False)


def test_e1_the_model_is_moved_before_its_optimizer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A move that makes new parameters, as one to another device does: the optimizer must hold those."""

    def moved(model: nn.Module, device: torch.device) -> nn.Module:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(parameter.detach().clone()))
        return model

    monkeypatch.setattr(nn.Module, "to", moved)
    run = trainer(TrainConfig(num_epochs=1))
    run.train(loaders()[0])
    held = {id(p) for group in run.last_rig.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in run.model.parameters()}
    assert run.findings == []


class Pair(NamedTuple):
    x: Any
    names: list[str]


def test_e5_batches_of_any_shape_are_moved_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    how: list[dict[str, Any]] = []
    original = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        how.append(kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    batch = {"pair": Pair(torch.ones(2), ["a", "b"]), "more": [torch.zeros(1), (torch.zeros(1), 3)]}
    out = to_device(batch, torch.device("cpu"))
    assert isinstance(out["pair"], Pair)
    assert (out["pair"].names, out["more"][1][1]) == (["a", "b"], 3)
    assert how == [{"non_blocking": True}] * 3


def test_history_names_the_device() -> None:
    history = trainer(TrainConfig(num_epochs=2, device="cpu"), QUIET).train(*loaders())
    assert history.column("device") == ["cpu", "cpu"]
    result = run_recipe(load_recipe("tabular"), {"device": "cpu", "epochs": 1}, run_dir=False)
    assert result.history[0]["device"] == "cpu"


def test_a_model_without_parameters_is_measured_where_the_batch_is() -> None:
    loader = [(torch.ones(3, 1), torch.zeros(3, 1))]
    assert evaluate_model(nn.Identity(), loader, loss_fn=nn.functional.mse_loss) == {"loss": 1.0}


def test_a_recipe_runs_without_what_only_the_command_line_needs(tmp_path: Path) -> None:
    """Where there is only torch, numpy and safetensors, recipes run from Python; `lines` are told, too."""
    code = f"""
import sys
for name in ("typer", "click", "rich", "pydantic", "pydantic_core", "jinja2"):
    sys.modules[name] = None
from trimtab.train.recipe import run_recipe
from trimtab.train.recipes import load_recipe
said = []
how = dict(quick=True, run_dir={str(tmp_path / "r")!r}, say=said.append, show=said.append)
result = run_recipe(load_recipe("tabular"), {{"epochs": 2}}, **how)
assert result.weights_finite and len(result.history) == 2 and any("Epoch 2/2" in line for line in said)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r" / "history.json").exists()
