"""A state is taken whole and put back whole, in place; where it does not fit, not one bit changes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import trimtab
from trimtab.checkpoint import state
from trimtab.checkpoint.format.tree import flatten, unflatten
from trimtab.checkpoint.state import nonfinite
from trimtab.core.errors import CheckpointError


class Net(nn.Module):
    def __init__(self, width: int = 8, extra: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(width, 2)
        if extra:
            self.more = nn.Linear(2, 2)
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.cache: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.cache += 1
        return self.head(self.body(x)) * (1 + self.cache.mean())


class Setup:
    """Everything a run has, built from a seed."""

    def __init__(self, seed: int = 0, **kwargs: Any) -> None:
        torch.manual_seed(seed)
        self.model = Net(**kwargs)
        decay, rest = [self.model.head.weight], [p for n, p in self.model.named_parameters() if n != "head.weight"]
        self.optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
        self.scheduler = OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=50)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

    def all(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "scaler", "ema")}

    def step(self, update: bool = True) -> None:
        loss = self.model(torch.randn(16, 4)).square().mean()
        self.scaler.scale(loss).backward()
        if update:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.ema.update_parameters(self.model)


def bits(value: Any) -> Any:
    """Tensors as bytes, so that NaN equals NaN and -0.0 does not equal 0.0."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [bits(one) for one in value]
    return value if isinstance(value, str | bytes | int | type(None)) else repr(value)


def through_storage(sections: dict[str, Any]) -> dict[str, Any]:
    """As a file would return them: nothing but JSON and tensors of its own."""
    tree, tensors = flatten(sections)
    return unflatten(tree, {key: one.clone() for key, one in tensors.items()})


def test_b18_everything_comes_back_bit_for_bit_and_goes_on_the_same() -> None:
    first = Setup(0)
    for _ in range(5):
        first.step()
    first.step(update=False)  # in the middle of an accumulation
    saved = through_storage(state.capture(**first.all(), gradients=True))
    second = Setup(1)
    second.step()
    identities = [id(one) for one in (*second.model.parameters(), *second.model.buffers())]
    state.restore(saved, **second.all())
    assert [id(one) for one in (*second.model.parameters(), *second.model.buffers())] == identities
    assert bits(state.capture(**second.all(), gradients=True)) == bits(saved)
    for _ in range(5):
        second.step()
    state.restore({"rng": saved["rng"]})
    for _ in range(5):
        first.step()
    assert bits(state.capture(**first.all())) == bits(state.capture(**second.all()))


def test_all_buffers_are_in_it_also_those_that_state_dict_leaves_out() -> None:
    run = Setup()
    run.step()
    saved = state.to_host(state.capture(model=run.model))
    assert set(saved["model"]) == set(run.model.state_dict()) | {"cache"}
    fresh = Setup(1)
    state.restore(saved, model=fresh.model)
    assert torch.equal(fresh.model.cache, run.model.cache)


def test_what_is_loaded_shares_no_memory_with_the_checkpoint() -> None:
    run = Setup()
    for _ in range(3):
        run.step()
    run.step(update=False)
    saved = state.to_host(state.capture(**run.all(), gradients=True, extra={"log": [1.0]}))
    before = bits(saved)
    state.restore(saved, **run.all(), extra={"log": None})
    for _ in range(3):
        run.step()
    assert bits(saved) == before


def test_a_copy_on_the_host_does_not_move_with_training_and_keeps_ties() -> None:
    run = Setup()
    run.step()
    run.model.register_parameter("tied", run.model.head.bias)
    run.ema = AveragedModel(run.model)
    first = state.to_host(state.capture(model=run.model, optimizer=run.optimizer))
    before = bits(first)
    assert first["model"]["tied"] is first["model"]["head.bias"]
    run.step()
    assert bits(first) == before
    now = bits(state.capture(model=run.model, optimizer=run.optimizer))
    where = first["model"]["head.weight"].data_ptr()
    second = state.to_host(state.capture(model=run.model, optimizer=run.optimizer), into=first)
    assert bits(second) == now
    assert second["model"]["head.weight"].data_ptr() == where
    assert second["model"]["tied"] is second["model"]["head.bias"]


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "missing key": (
        lambda: _with(extra=True),
        r"model: tensors here but not in the checkpoint: more\.weight, more\.bias",
    ),
    "shape": (
        lambda: _with(width=9),
        r"model: body\.0\.weight is float32 \(8, 4\) in the checkpoint, float32 \(9, 4\) here",
    ),
    "dtype": (lambda: _as_double(), r"model: head\.bias is float32 \(2,\) in the checkpoint, float64 \(2,\) here"),
    "fewer groups": (lambda: _one_group(), r"the number of parameter groups is 2 in the checkpoint, 1 here"),
    "other order": (
        lambda: _other_order(),
        r"parameter 0 of group 1 is body\.0\.weight \(8, 4\) in the checkpoint, head\.bias \(2,\) here",
    ),
    "other optimizer": (lambda: _sgd(), r"optimizer: its class is AdamW in the checkpoint, SGD here"),
    "two optimizers": (lambda: _two(), r"optimizers here but not in the checkpoint: 1"),
    "other scheduler": (lambda: _cosine(), r"its class is OneCycleLR in the checkpoint, CosineAnnealingLR here"),
    "other average": (lambda: _other_ema(), r"ema: tensors in the checkpoint but not here: n_averaged"),
}


def _with(**kwargs: Any) -> dict[str, Any]:
    return Setup(7, **kwargs).all()


def _as_double() -> dict[str, Any]:
    run = Setup(7)
    run.model.head.bias.data = run.model.head.bias.data.double()
    return run.all()


def _optimizer(build: Callable[[Net], Any]) -> dict[str, Any]:
    run = Setup(7)
    return run.all() | {"optimizer": build(run.model), "scheduler": None}


def _one_group() -> dict[str, Any]:
    return _optimizer(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))


def _other_order() -> dict[str, Any]:
    def build(model: Net) -> Any:
        rest = [p for n, p in model.named_parameters() if n != "head.weight"]
        return torch.optim.AdamW([{"params": [model.head.weight]}, {"params": rest[::-1]}], lr=1e-2)

    return _optimizer(build)


def _sgd() -> dict[str, Any]:
    return _optimizer(lambda model: torch.optim.SGD(model.parameters(), lr=1e-2))


def _two() -> dict[str, Any]:
    return _optimizer(
        lambda model: [torch.optim.AdamW([p], lr=1e-2) for p in (model.head.weight, model.head.bias)],
    )


def _cosine() -> dict[str, Any]:
    run = Setup(7)
    return run.all() | {"scheduler": CosineAnnealingLR(run.optimizer, 10)}


def _other_ema() -> dict[str, Any]:
    return Setup(7).all() | {"ema": Net()}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_with_the_difference_and_nothing_changes(case: str) -> None:
    run = Setup()
    for _ in range(2):
        run.step()
    saved = through_storage(state.capture(**run.all(), gradients=True))
    build, words = WRONG[case]
    wrong = {name: one for name, one in build().items() if one is not None}
    before = bits(copy.deepcopy(state.capture(**wrong, gradients=True)))
    with pytest.raises(CheckpointError, match=words) as caught:
        state.restore(saved, **wrong)
    assert "nothing was changed" in str(caught.value)
    assert bits(state.capture(**wrong, gradients=True)) == before


def test_an_extra_key_in_the_checkpoint_is_refused() -> None:
    saved = state.to_host(state.capture(model=Net(extra=True)))
    with pytest.raises(CheckpointError, match=r"in the checkpoint but not here: more\.weight, more\.bias"):
        state.restore(saved, model=Net())


def test_every_difference_is_told_at_once_and_long_lists_are_cut() -> None:
    saved = state.capture(model=nn.Sequential(*(nn.Linear(2, 2) for _ in range(8))))
    with pytest.raises(CheckpointError) as caught:
        state.restore(saved, model=nn.Sequential(nn.Linear(2, 3)))
    assert "3 difference(s)" in str(caught.value)
    assert "and 9 more" in str(caught.value)


class Fails:
    """Loads half of its state, then raises, as foreign code may."""

    def __init__(self) -> None:
        self.value, self.broken = 0, False

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        self.value = given["value"]
        if self.broken:
            self.broken = False
            raise KeyError("half way")


@pytest.mark.parametrize("where", ["extra", "guard", "loader", "ema", "optimizer", "model"])
def test_a_part_that_fails_while_loading_leaves_every_other_as_it_was(where: str) -> None:
    run = Setup()
    run.step()
    run.step(update=False)
    own = Fails()
    own.value = 5
    parts: dict[str, Any] = run.all() | {"extra": {"own": own, "epoch": 1}, "guard": Fails(), "loader": Fails()}
    if where == "ema":
        parts["ema"] = Fails()
    saved = through_storage(state.capture(**parts, gradients=True))
    for _ in range(3):
        run.step()
    own.value, parts["extra"]["epoch"] = 9, 4
    if where == "optimizer":
        breaking = parts["optimizer"].register_load_state_dict_pre_hook(_raise)
    elif where == "model":
        breaking = run.model.head.register_load_state_dict_pre_hook(_raise)
    else:
        (own if where == "extra" else parts[where]).broken = True
    before = bits(copy.deepcopy(state.capture(**parts, gradients=True)))
    with pytest.raises(CheckpointError, match=f"{where} could not be loaded .*half way.*nothing was changed"):
        state.restore(saved, **parts)
    if where in ("optimizer", "model"):
        breaking.remove()
    assert bits(state.capture(**parts, gradients=True)) == before
    state.restore(saved, **parts)
    assert (own.value, parts["extra"]["epoch"]) == (5, 1)


def _raise(*_: Any) -> None:
    raise KeyError("half way")


def test_missing_parts_are_told_by_name_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    run = Setup()
    run.step()
    part = state.to_host(state.capture(model=run.model, scheduler=run.scheduler, extra={"epoch": 1}))
    del part["rng"]
    extra: dict[str, Any] = {"epoch": 0, "best": 0.5}
    asked: dict[str, Any] = {"model": run.model, "scaler": run.scaler, "ema": run.ema, "extra": extra}
    before = bits(run.model.state_dict())
    with pytest.raises(CheckpointError, match="no scaler and no ema; it holds model, scheduler, extra"):
        state.restore(part, **asked)
    assert (bits(run.model.state_dict()), extra["epoch"]) == (before, 0)
    with caplog.at_level(logging.INFO, "trimtab"):
        state.restore(part, strict=False, **asked)
    assert extra == {"epoch": 1, "best": 0.5}
    warned = [r.getMessage().partition(" ")[0] for r in caplog.records if r.levelno == logging.WARNING]
    assert warned == ["scaler", "ema", "rng", "extra:"]
    assert "extra: entries here but not in the checkpoint: best" in caplog.text
    (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert told == "scheduler: in the checkpoint, and not asked for: the learning rate may jump"


@pytest.mark.parametrize("strict", [True, False])
def test_what_may_be_missing(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A guard learns again what it knew, and a scaler that is off knows nothing; weights are never optional."""
    model = Net()
    plain = state.capture(model=model)
    off = torch.amp.GradScaler("cpu", enabled=False)
    state.restore(plain, model=model, guard=Setup().scheduler, scaler=off, strict=strict)
    assert caplog.text == ""
    with pytest.raises(CheckpointError, match="the checkpoint has no model; it holds rng"):
        state.restore({"rng": plain["rng"]}, model=model, strict=strict)


def test_nothing_is_told_when_everything_is_there(caplog: pytest.LogCaptureFixture) -> None:
    run = Setup()
    saved = state.to_host(state.capture(**run.all()))
    state.restore(saved, **run.all())
    assert caplog.text == ""


def test_a_checkpoint_without_weights_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"model: tensors here but not in the checkpoint"):
        state.restore({"model": {}}, model=Net())


def test_a_scaler_that_was_off_and_is_on_is_told(caplog: pytest.LogCaptureFixture) -> None:
    off = torch.amp.GradScaler("cpu", enabled=False)
    on = torch.amp.GradScaler("cpu", init_scale=4.0)
    state.restore(state.capture(scaler=off), scaler=on)
    assert "it was off when the checkpoint was saved and is on now" in caplog.text
    assert on.get_scale() == 4.0
    caplog.clear()
    state.restore(state.capture(scaler=on), scaler=off)
    assert "it was on when the checkpoint was saved and is off now" in caplog.text


def test_a_plain_loader_is_told_to_be_without_a_position(caplog: pytest.LogCaptureFixture) -> None:
    state._warn_no_position.cache_clear()
    assert "loader" not in state.capture(loader=[1, 2])
    assert "loader" not in state.capture(loader=[1, 2])
    assert caplog.text.count("wrap it in ResumableLoader") == 1
    state.restore({"loader": {}}, loader=[1, 2])
    assert "a list cannot take the place in the data that the checkpoint has" in caplog.text


def test_a_section_of_another_form_is_refused_not_crashed_on() -> None:
    run = Setup()
    with pytest.raises(CheckpointError, match=r"optimizer: what the checkpoint holds makes no sense here \(KeyError"):
        state.restore({"optimizer": {"0": {"param_groups": []}}}, optimizer=run.optimizer)


def test_a_schedule_of_another_length_is_told(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    saved = state.capture(scheduler=CosineAnnealingLR(optimizer, T_max=10))
    state.restore(saved, scheduler=CosineAnnealingLR(optimizer, T_max=99))
    assert "T_max is 10 in the checkpoint, 99 here" in caplog.text


def test_moments_in_float32_of_parameters_in_bfloat16_keep_their_lower_half() -> None:
    weight = nn.Parameter(torch.randn(5).bfloat16())
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.randn(5)
    saved = through_storage(state.capture(optimizer=optimizer))
    other = torch.optim.SGD([nn.Parameter(torch.zeros(5).bfloat16())], lr=0.1, momentum=0.9)
    state.restore(saved, optimizer=other)
    (loaded,) = other.state.values()
    assert bits(loaded["momentum_buffer"]) == bits(optimizer.state[weight]["momentum_buffer"])


@pytest.mark.parametrize(("was", "now"), [("foreach", "fused"), ("fused", "foreach"), ("fused", "fused")])
def test_how_a_step_is_computed_stays_as_it_is_here(was: str, now: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    first = torch.optim.Adam([weight], lr=0.1, **{was: True})
    weight.grad = torch.ones(3)
    first.step()
    other = nn.Parameter(torch.ones(3))
    second = torch.optim.Adam([other], lr=0.5, **{now: True})
    state.restore(through_storage(state.capture(optimizer=first)), optimizer=second)
    assert (second.param_groups[0]["lr"], bool(second.param_groups[0][now])) == (0.1, True)
    assert bool(second.param_groups[0][was]) == (was == now)
    assert second.state[other]["step"].device.type == "cpu"
    other.grad = torch.ones(3)
    second.step()
    assert float(second.state[other]["step"]) == 2.0


def test_several_optimizers_and_schedulers_by_name() -> None:
    def build(seed: int) -> tuple[Net, dict[str, Any], list[Any]]:
        torch.manual_seed(seed)
        model = Net()
        both = {
            "body": torch.optim.Adagrad(model.body.parameters(), lr=0.1),
            "head": torch.optim.Adam(model.head.parameters(), lr=0.1, amsgrad=True),
        }
        return model, both, [LambdaLR(both["body"], lambda k: 1 / (k + 1)), ReduceLROnPlateau(both["head"], patience=0)]

    def step(model: Net, both: dict[str, Any], plans: list[Any]) -> None:
        model(torch.ones(4, 4)).square().mean().backward()
        for one in both.values():
            one.step()
            one.zero_grad()
        plans[0].step()
        plans[1].step(1.0)

    first, second = build(0), build(1)
    for _ in range(3):
        step(*first)
    saved = through_storage(state.capture(**dict(zip(("model", "optimizer", "scheduler"), first, strict=True))))
    state.restore(saved, **dict(zip(("model", "optimizer", "scheduler"), second, strict=True)))
    for run in (first, second):
        state.restore({"rng": saved["rng"]})
        step(*run)
    taken = [state.capture(model=m, optimizer=o, scheduler=s) for m, o, s in (first, second)]
    assert bits(taken[0]) == bits(taken[1])


def test_a_compiled_or_wrapped_model_is_the_same_model() -> None:
    run = Setup()
    run.step()
    saved = state.to_host(state.capture(model=run.model, optimizer=run.optimizer, gradients=True))
    wrapped = nn.DataParallel(Setup(3).model)
    state.restore(saved, model=wrapped)
    assert bits(state.capture(model=wrapped)["model"]) == bits(saved["model"])
    compiled = torch.compile(Setup(4).model, backend="eager")
    state.restore(saved, model=compiled)
    assert bits(state.capture(model=compiled)["model"]) == bits(saved["model"])


def test_lazy_parameters_take_the_shape_of_the_checkpoint() -> None:
    saved = state.to_host(state.capture(model=nn.Linear(3, 2)))
    lazy = nn.LazyLinear(2)
    state.restore(saved, model=lazy)
    assert torch.equal(lazy.weight, saved["model"]["weight"])


def test_gradients_are_put_back_where_they_were_and_removed_where_they_were_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].weight.grad = torch.ones(2, 2)
    saved = state.to_host(state.capture(model=model, gradients=True))
    model[1].weight.grad = torch.ones(1, 2)
    model[0].weight.grad = None
    state.restore(saved, model=model)
    assert [p.grad is not None for p in model.parameters()] == [True, False, False, False]
    assert torch.equal(model[0].weight.grad, torch.ones(2, 2))
    model[0].weight.grad.zero_()
    state.restore(saved, model=model, gradients=False)
    assert not model[0].weight.grad.any()
    with pytest.raises(CheckpointError, match=r"gradients: gradients in the checkpoint but not here: 7\.weight"):
        state.restore(saved | {"gradients": {"7.weight": torch.ones(1)}}, model=model)


def test_a_guard_goes_on_and_takes_the_load_for_what_it_is() -> None:
    run = Setup()
    with trimtab.Guard(run.model, run.optimizer, run_dir=False) as guard:

        def step() -> None:
            loss = run.model(torch.randn(16, 4)).square().mean()
            loss.backward()
            guard.step(loss)
            run.optimizer.zero_grad()

        for _ in range(4):
            step()
        saved = through_storage(state.capture(model=run.model, optimizer=run.optimizer, guard=guard))
        for _ in range(4):
            step()
        state.restore(saved, model=run.model, optimizer=run.optimizer, guard=guard)
        assert bits(guard.state_dict()) == bits(saved["guard"])
        for _ in range(4):
            step()
        assert guard.findings == []


def test_a_part_that_would_not_go_back_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Fails):
        def load_state_dict(self, given: dict[str, Any]) -> None:
            raise KeyError("never")

    model = nn.Linear(2, 2)
    before = bits(dict(model.state_dict()))
    saved = state.capture(model=nn.Linear(2, 2), guard=Stuck())
    with pytest.raises(CheckpointError, match="and guard could not be put back as it was"):
        state.restore(saved, model=model, guard=Stuck())
    assert "guard could not be put back (KeyError: 'never')" in caplog.text
    assert bits(dict(model.state_dict())) == before


def test_a_module_too_large_to_be_kept_is_told_when_its_own_hook_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trimtab.checkpoint.parts.KEPT_BYTES", 8)
    model = nn.Linear(2, 2)
    model.register_load_state_dict_pre_hook(_raise)
    with pytest.raises(CheckpointError, match="model could not be loaded"):
        state.restore(state.capture(model=nn.Linear(2, 2)), model=model)
    assert "too large to be kept" in caplog.text


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("now", ["fused", "capturable", "foreach"])
@pytest.mark.parametrize("was", ["fused", "capturable", "foreach"])
def test_step_counts_are_on_the_device_that_the_step_wants(was: str, now: str) -> None:
    def build(how: str) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(torch.ones(3, device="cuda"))
        return weight, torch.optim.AdamW([weight], lr=0.1, **{how: True})

    first, before = build(was)
    first.grad = torch.ones_like(first)
    before.step()
    saved = state.to_host(state.capture(optimizer=before))
    assert all(one.device.type == "cpu" for one in saved["optimizer"]["0"]["state"]["state"][0].values())
    second, after = build(now)
    state.restore(saved, optimizer=after)
    held = after.state[second]
    assert held["step"].device.type == ("cpu" if now == "foreach" else "cuda")
    assert held["exp_avg"].device.type == "cuda"
    second.grad = torch.ones_like(second)
    after.step()
    assert float(held["step"]) == 2.0


@needs_cuda
def test_on_a_device_a_run_goes_on_with_the_same_bits() -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        return {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("cuda", growth_interval=2)}

    def train(run: dict[str, Any], steps: int) -> None:
        for _ in range(steps):
            with torch.autocast("cuda", torch.float16):
                loss = run["model"](torch.randn(16, 4, device="cuda")).square().mean()
            run["scaler"].scale(loss).backward()
            run["scaler"].step(run["optimizer"])
            run["scaler"].update()
            run["optimizer"].zero_grad()

    first = build(0)
    train(first, 4)
    saved = state.to_host(state.capture(**first))
    again = state.to_host(state.capture(**first), into=state.to_host(state.capture(**first)))
    assert bits(again) == bits(saved)
    assert nonfinite(state.capture(**first)) == ()
    train(first, 4)
    expected = bits(state.to_host(state.capture(**first)))
    second = build(1)
    train(second, 1)
    state.restore(through_storage(saved), **second)
    train(second, 4)
    assert bits(state.to_host(state.capture(**second))) == expected
