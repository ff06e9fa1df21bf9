from __future__ import annotations

import math
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from trimtab.core.errors import InputError
from trimtab.doctor.target import (
    Target,
    check_target,
    compute_loss,
    endless,
    load_target,
    run_steps,
    take_step,
    validation_loss,
)

GOOD = """
import torch
def build():
    model = torch.nn.Linear(2, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "loader": [(torch.ones(4, 2), torch.ones(4, 1))], "loss_fn": torch.nn.functional.mse_loss}
"""


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has its own import path and its own modules."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and "site-packages" not in str(sys.modules[name].__file__):
            sys.modules.pop(name)


def parts(**changes):
    model = nn.Linear(2, 1)
    given = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(torch.ones(4, 2), torch.ones(4, 1))],
        "loss_fn": mse_loss,
    }
    return given | changes


def test_a_module_in_the_current_directory_and_a_file_elsewhere():
    Path("one.py").write_text(GOOD)
    Path("deep").mkdir()
    Path("deep/two.py").write_text("from helper_of_two import build\n")
    Path("deep/helper_of_two.py").write_text(GOOD)
    for spec in ("one:build", "deep/two.py:build", "./one.py:build"):
        target = load_target(spec)
        assert isinstance(target.model, nn.Linear)
        assert target.scaler is None


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("one", ["'one'", "module:function", "train:build"]),
        ("one:", ["module:function"]),
        ("one:no thing", ["module:function"]),
        ("nowhere:build", ["no module 'nowhere'", "path/to/file.py:build"]),
        ("nowhere.py:build", ["no file nowhere.py"]),
        ("one:bild", ["no function 'bild'", "did you mean 'build'"]),
        ("one:zzz", ["no function 'zzz'", "build"]),
        ("one:CONSTANT", ["an int", "a function"]),
        ("one:wants", ["without arguments", "'size'", "defaults"]),
        ("one:fails", ["ZeroDivisionError", "one.py, line"]),
        ("one:nothing", ["returned None", "loss_fn"]),
        ("needs:build", ["importing needs failed", "no_such_package_at_all"]),
        ("broken:build", ["importing broken failed", "SyntaxError"]),
        ("raises.py:build", ["importing raises.py failed", "RuntimeError: not today"]),
    ],
)
def test_every_mistake_is_told_in_one_line(spec, words):
    more = "\nCONSTANT = 3\ndef wants(size): ...\ndef fails(): return 1 / 0\ndef nothing(): ...\n"
    Path("one.py").write_text(GOOD + more)
    Path("needs.py").write_text("import no_such_package_at_all\n" + GOOD)
    Path("broken.py").write_text("def build(:\n")
    Path("raises.py").write_text("raise RuntimeError('not today')\n")
    with pytest.raises(InputError) as error:
        load_target(spec)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["without model, optimizer, loader, loss_fn or step_fn", "nothing"]),
        (parts(loss_fn=None), ["without loss_fn or step_fn", "it has loader, model, optimizer"]),
        (parts(model=None), ["without model"]),
        (parts(model=3), ["model is a int", "torch.nn.Module"]),
        (parts(model=nn.ReLU()), ["no parameters"]),
        (parts(optimizer="sgd"), ["optimizer is a str", "Optimizer"]),
        (parts(optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)), ["belong to the model"]),
        (parts(loader=5), ["loader is an int", "iterate"]),
        (parts(val_loader=5), ["val_loader is an int"]),
        (parts(loss_fn=5), ["loss_fn is an int", "called"]),
        (parts(scalar=1), ["'scalar'", "did you mean 'scaler'"]),
    ],
)
def test_what_is_missing_or_of_no_use_is_named(given, words):
    with pytest.raises(InputError) as error:
        check_target(given, "train:build")
    assert "train:build" in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_other_keys_are_the_users_own_business():
    target = check_target(parts(configuration={"a": 1}, val_loader=[]))
    assert target.val_loader == []
    assert check_target(target) is target


Pair = namedtuple("Pair", "x y")
X, Y = torch.ones(4, 2), torch.zeros(4, 1)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, features, extra=0.0):
        return self.inner(features) + extra


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y),
        [X, Y],
        Pair(X, Y),
        {"x": X, "y": Y},
        {"features": X, "target": Y},
        {"features": X, "labels": Y, "extra": 0.0},
    ],
    ids=lambda b: type(b).__name__ + str(len(b)),
)
def test_batches_of_every_shape_give_the_same_loss(batch):
    model = Named()
    target = check_target(parts(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    assert compute_loss(target, batch).item() == mse_loss(model(X), Y).item()


def test_a_batch_that_is_one_tensor_is_its_own_target():
    model = nn.Linear(2, 2)
    target = check_target(parts(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    assert compute_loss(target, X).item() == mse_loss(model(X), X).item()


@pytest.mark.parametrize(
    ("batch", "word"), [({"a": X, "b": Y}, "step_fn"), ((X,), "expected (input, target)"), ({}, "nothing")]
)
def test_a_batch_nobody_can_read_is_explained(batch, word):
    with pytest.raises(InputError, match=word.replace("(", r"\(").replace(")", r"\)")):
        compute_loss(check_target(parts()), batch)


def test_a_loss_that_is_not_one_number_is_refused():
    with pytest.raises(InputError, match=r"loss_fn returned a tensor of shape \(4, 1\)"):
        compute_loss(check_target(parts(loss_fn=lambda a, b: a - b)), (X, Y))
    with pytest.raises(InputError, match="step_fn returned a float"):
        compute_loss(check_target(parts(step_fn=lambda model, batch: 0.5)), (X, Y))


def test_step_fn_goes_before_loss_fn_and_the_loader_goes_round():
    seen = []

    def step_fn(model, batch):
        seen.append(batch)
        return model(torch.ones(1, 2)).sum()

    target = check_target(parts(step_fn=step_fn, loader=["a", "b"]))
    assert len(run_steps(target, 5)) == 5
    assert seen == ["a", "b", "a", "b", "a"]


def test_run_steps_trains_and_can_be_ended():
    target = check_target(parts())
    losses = run_steps(target, 30)
    assert losses[-1] < 0.1 * losses[0]
    assert len(run_steps(target, 30, on_step=lambda step, loss: step < 4)) == 5


def test_an_empty_loader_is_an_error_not_a_hang():
    with pytest.raises(InputError, match="gave no batch"):
        next(endless(check_target(parts(loader=[]))))
    once = endless(check_target(parts(loader=iter([1]))))
    assert next(once) == 1
    with pytest.raises(InputError, match="only once"):
        next(once)


def test_a_scaler_and_two_optimizers_take_their_steps():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    both = {"a": torch.optim.SGD(model[0].parameters(), lr=0.1), "b": torch.optim.Adam(model[1].parameters())}
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    target = check_target(parts(model=model, optimizer=both, scaler=scaler))
    before = [p.detach().clone() for p in model.parameters()]
    take_step(target, compute_loss(target, (X, Y)))
    assert all((a != b).any() for a, b in zip(before, model.parameters(), strict=True))


def test_validation_leaves_the_model_in_training_mode():
    target = check_target(parts(val_loader=[(X, Y), (X, Y)]))
    assert validation_loss(target) == pytest.approx(mse_loss(target.model(X), Y).item())
    assert target.model.training
    assert math.isnan(validation_loss(check_target(parts())))


def test_a_target_is_frozen():
    with pytest.raises(AttributeError):
        check_target(parts()).scaler = 1
    assert Target.__slots__
