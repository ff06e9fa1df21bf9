"""What is saved, copied, scripted, traced or exported under a guard is what it is without one, to the byte."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import re
import warnings
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tests.matrix import sampled
from trimtab import Guard
from trimtab.run.auto_guard import AutoGuard
from trimtab.torchutil.patch import wrap_method_of


class Net(nn.Module):
    """A body with a norm, activations and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class OwnState(Net):
    """Says itself what of it is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "extra": 1}


class CopiedState(Net):
    """The same, and copies every part of it."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: copy.copy(value) for name, value in self.__dict__.items()}


def note(*args: Any, **kwargs: Any) -> None:
    """A hook of the user's own."""


def hooked() -> nn.Module:
    net = Net()
    net.register_forward_pre_hook(note, with_kwargs=True)
    net.register_forward_hook(note, always_call=True)
    net.body.register_forward_hook(note, with_kwargs=True)
    net.head.register_full_backward_hook(note)
    net.register_load_state_dict_post_hook(note)  # type: ignore[no-untyped-call]
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "own state": OwnState,
    "copied state": CopiedState,
    "hooked": hooked,
    "bare layer": lambda: nn.Linear(4, 1),
}


def saved_by_torch(obj: Any) -> bytes:
    out = io.BytesIO()
    torch.save(obj, out)
    return out.getvalue()


def dumper(base: Any, protocol: int) -> Callable[[Any], bytes]:
    """A pickler that numbers storages, as `torch.save` does: pickled by themselves they tell their address."""

    class Numbering(base):  # type: ignore[misc]
        def __init__(self, out: io.BytesIO) -> None:
            super().__init__(out, protocol)
            self.seen: dict[int, int] = {}

        def persistent_id(self, obj: Any) -> Any:
            if not torch.is_storage(obj):
                return None
            storage = getattr(obj, "_untyped_storage", obj)
            values = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            return f"{self.seen.setdefault(storage.data_ptr(), len(self.seen))} {values.tobytes().hex()}"

        def reducer_override(self, obj: Any) -> Any:  # as those of cloudpickle have
            return NotImplemented

    def dumps(obj: Any) -> bytes:
        out = io.BytesIO()
        Numbering(out).dump(obj)
        return out.getvalue()

    return dumps


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


plainly = dumper(pickle.Pickler, 4)
SAVES: dict[str, Callable[[Any], bytes]] = {
    "pickle 0": dumper(pickle.Pickler, 0),
    "pickle 2": dumper(pickle.Pickler, 2),
    "pickle 5": dumper(pickle.Pickler, 5),
    "in python": dumper(pickle._Pickler, 4),  # type: ignore[attr-defined]
    "torch.save": saved_by_torch,
    "deepcopy": lambda obj: plainly(copy.deepcopy(obj)),
    "copy": lambda obj: plainly(copy.copy(obj)),
    "loaded": lambda obj: plainly(loaded(saved_by_torch(obj))),
}


@contextmanager
def flying() -> Iterator[None]:
    auto_guard = AutoGuard({"run_dir": False}, lambda training: None)
    auto_guard.start()
    try:
        yield
    finally:
        auto_guard.finish()


@contextmanager
def under(how: str, model: nn.Module, make: Callable[..., Any], lr: float = 0.1, **more: Any) -> Iterator[Any]:
    """An optimizer under no guard, one of the program's own in several settings, or that of `trimtab run`."""
    if how == "plain":
        yield make(model.parameters(), lr=lr), None
    elif how == "run":
        with flying():
            yield make(model.parameters(), lr=lr), None
    else:
        settings: dict[str, Any] = {
            "guard": {},
            "activations": {"config": {"activations": True}},
            "act": {"mode": "act"},
            "checkpoint": {"checkpoint": Path("checkpoints"), "config": {"checkpoint_on_signal": False}},
        }[how]
        optimizer = make(model.parameters(), lr=lr)
        with Guard.attach(model, optimizer, run_dir=False, **settings, **more) as guard:
            yield optimizer, guard


def train(model: nn.Module, optimizer: Any, num: int = 3, loss_of: Callable[[Tensor], Tensor] | None = None) -> None:
    for x in torch.randn(num, 8, 4):
        optimizer.zero_grad()
        out = model(x)
        (out.square().mean() if loss_of is None else loss_of(out)).backward()
        optimizer.step()


GUARDS = ("plain", "guard", "activations", "act", "checkpoint", "run")


@pytest.fixture(autouse=True)
def same_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemovableHandle, "next_id", RemovableHandle.next_id)


def story(make: Callable[[], nn.Module], how: str) -> dict[str, bytes]:
    """A training in which everything is saved in every way, also with hooks that come and go while it is guarded."""
    gc.collect()
    torch.manual_seed(1)
    RemovableHandle.next_id = 1_000
    model = make()
    early = model.register_forward_hook(note)
    said: dict[str, bytes] = {}

    def save(when: str) -> None:
        for name, one in {"model": model, "optimizer": optimizer, "part": next(model.children(), model)}.items():
            said.update({f"{when} {name} {way}": save(one) for way, save in SAVES.items()})

    with under(how, model, torch.optim.AdamW, lr=1e-3) as (optimizer, _):
        save("before")
        train(model, optimizer, 1)
        save("in the first steps")
        train(model, optimizer, 3)
        early.remove()
        late = model.register_forward_hook(note, prepend=True)
        model.register_forward_pre_hook(note)
        optimizer.register_step_post_hook(note)
        save("with hooks")
        train(model, optimizer, 20)
        late.remove()
        save("late")
    save("closed")
    assert not vars(model._forward_hooks)
    assert not vars(model._forward_pre_hooks)
    return said


@functools.cache
def plain_story(model: str) -> dict[str, bytes]:
    return story(MODELS[model], "plain")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", sampled(GUARDS, "guard run"))
def test_what_is_pickled_is_the_same_to_the_byte(how: str, model: str) -> None:
    plain, guarded = plain_story(model), story(MODELS[model], how)
    assert [name for name in plain if plain[name] != guarded[name]] == []


@pytest.mark.parametrize("how", GUARDS)
def test_a_saved_model_loads_where_only_its_own_classes_are_allowed(how: str) -> None:
    model = Net()
    allowed = [Net, set, *{type(m) for m in model.modules()}]
    with under(how, model, torch.optim.SGD) as (optimizer, _):
        train(model, optimizer)
        data = saved_by_torch(model)
    with torch.serialization.safe_globals(allowed):
        loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert torch.equal(loaded(torch.ones(2, 4)), model(torch.ones(2, 4)))


class OwnOptimizer:
    """Looks like an optimizer and is none of PyTorch's."""

    def __init__(self, params: Any, lr: float) -> None:
        self.param_groups = [{"params": list(params), "lr": lr}]

    def zero_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p -= self.param_groups[0]["lr"] * p.grad


class OwnTorchOptimizer(torch.optim.SGD):
    """One of PyTorch's that pickles all it has."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


@pytest.mark.parametrize("kind", [torch.optim.Adam, OwnOptimizer, OwnTorchOptimizer])
@pytest.mark.parametrize("how", ["guard", "act"])
def test_optimizers_are_the_same_even_while_a_rate_is_cut(how: str, kind: Any) -> None:
    def saved(how: str) -> list[bytes]:
        torch.manual_seed(1)
        model = Net()
        with under(how, model, kind) as (optimizer, guard):
            train(model, optimizer)
            if guard is not None:
                next(iter(guard._lanes.values())).multiplier.cut(0.5)
            return [save(optimizer) for save in SAVES.values()]

    if how == "guard" and kind is OwnTorchOptimizer:
        pytest.skip("the same as in mode act")
    assert saved(how) == saved("plain")


class Scaler(torch.amp.GradScaler):
    """One with a step of its own."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return super().step(optimizer, *args, **kwargs)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, Scaler])
@pytest.mark.parametrize("how", ["plain", "guard", "run"])
def test_a_scaler_is_the_same_and_its_skips_are_seen(how: str, kind: Any) -> None:
    def trained(how: str) -> tuple[bytes, bytes, int]:
        torch.manual_seed(1)
        model, scaler, other = Net(), kind("cpu", init_scale=8.0), kind("cpu", init_scale=8.0)
        more = {"scaler": scaler} if how == "guard" else {}
        skipped = 0
        with under(how, model, torch.optim.SGD, **more) as (optimizer, guard):
            for x in torch.randn(4, 8, 4):
                optimizer.zero_grad()
                scaler.scale(model(x).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
            out = plainly(scaler), plainly(other)
            model.head.weight.grad = torch.full_like(model.head.weight, torch.inf)
            scaler.step(optimizer)
            if guard is not None:
                skipped = next(iter(guard._lanes.values())).attempts
        assert "step" not in vars(scaler)
        return *out, skipped

    before = vars(kind)["step"]
    assert trained(how)[:2] == trained("plain")[:2]
    assert vars(kind)["step"] is before
    if how == "guard":
        assert trained(how)[2] == 5


def test_a_plain_tensor_that_is_optimized_is_saved_without_a_warning() -> None:
    tensor = torch.zeros(64, requires_grad=True)
    RemovableHandle.next_id = 1_000
    with flying():
        optimizer = torch.optim.SGD([tensor], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (tensor - 1).square().sum().backward()
            optimizer.step()
        assert torch.load(io.BytesIO(saved_by_torch(tensor)), weights_only=True).shape == (64,)
        assert copy.deepcopy(tensor)._backward_hooks is None
    assert RemovableHandle.next_id == 1_000


def test_an_output_of_the_model_is_saved_without_a_warning() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard.attach(model, optimizer, run_dir=False) as guard:
        for x in torch.randn(4, 8, 4):
            optimizer.zero_grad()
            out = model(x)
            loss = nn.functional.cross_entropy(out, torch.zeros(8, dtype=torch.long))
            guard.observe(loss)
            loss.backward()
            saved_by_torch(out)
            optimizer.step()


# -- scripts, traces and exports -----------------------------------------------------------------------------------


def scripted(model: nn.Module, x: Tensor) -> Any:
    found = torch.jit.script(model)
    return re.sub(r"___torch_mangle_\d+", "", str(found.graph)), hooks_in(found), saved_script(found)


def traced(model: nn.Module, x: Tensor) -> Any:
    found = torch.jit.trace(model.eval(), x)
    return re.sub(r"___torch_mangle_\d+", "", str(found.graph)), hooks_in(found)


def saved_script(found: Any) -> list[str]:
    out = io.BytesIO()
    torch.jit.save(found, out)
    with zipfile.ZipFile(out) as archive:
        return sorted(name.split("/", 1)[1] for name in archive.namelist() if "mangle" not in name)


def symbolic(model: nn.Module, x: Tensor) -> Any:
    found = torch.fx.symbolic_trace(model)
    return found.code, plainly(found.state_dict()), hooks_in(copy.deepcopy(found))  # its parts are the model's own


def exported(model: nn.Module, x: Tensor) -> Any:
    found = torch.export.export(model, (x,))
    return str(found.graph), list(found.state_dict), hooks_in(found.module())


def exported_strictly(model: nn.Module, x: Tensor) -> Any:
    found = torch.export.export(model, (x,), strict=True)
    return str(found.graph), list(found.state_dict), hooks_in(found.module())


def functional(model: nn.Module, x: Tensor) -> Any:
    params = {name: p.detach() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, params, (x,)).tolist()


def prepared(model: nn.Module, x: Tensor) -> Any:
    """What moves a module's hooks on to the one that takes its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.eval().qconfig = torch.ao.quantization.default_qconfig  # type: ignore[assignment]
        found = torch.ao.quantization.prepare(model, inplace=False)
        found(x)
        found = torch.ao.quantization.convert(found)
    return str(found), hooks_in(found)


def hooks_in(model: nn.Module) -> int:
    tables = ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_post_hooks")
    return sum(len(getattr(m, t)) for m in model.modules() for t in tables)


@functools.cache
def can_export_hooks() -> bool:
    model = Net()
    model.register_forward_pre_hook(note)
    try:
        torch.export.export(model, (torch.ones(2, 4),), strict=True)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("how", sampled(["guard", "activations", "checkpoint", "run"], "guard run"))
@pytest.mark.parametrize("turned", [scripted, traced, symbolic, exported, exported_strictly, functional, prepared])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_nothing_of_ours_is_in_what_a_model_is_turned_into(turned: Callable[..., Any], how: str) -> None:
    if "export" in turned.__name__ and not can_export_hooks():
        pytest.skip("this PyTorch exports no model with a hook, whose ever it is")

    def told(how: str) -> Any:
        torch.manual_seed(1)
        model = Net()
        with under(how, model, torch.optim.SGD) as (optimizer, _):
            train(model, optimizer, 2)  # within the first steps, when the outputs are looked at, too
            twin = copy.deepcopy(model)
            assert hooks_in(twin) == 0
            out = turned(model, torch.ones(2, 4))
            train(model.train(), optimizer, 2)
        return out, plainly(model.state_dict())

    assert told(how) == told("plain")


def test_the_table_of_hooks_stays_the_users() -> None:
    """Handles that were given out before, during and after a guard all work."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.register_forward_pre_hook(note)
    table = model._forward_pre_hooks
    with Guard.attach(model, optimizer, run_dir=False):
        during = model.register_forward_pre_hook(note, with_kwargs=True)
        train(model, optimizer)
        assert type(table) is OrderedDict
        assert table is model._forward_pre_hooks
        before.remove()
        model._forward_hooks.clear()  # a program may do that, too
        train(model, optimizer)
    during.remove()
    assert not table
    assert not vars(table)


def test_a_wrapped_method_keeps_nothing_alive_and_is_gone_with_its_last_object() -> None:
    class Owner:
        def __init__(self, optimizer: OwnOptimizer) -> None:
            self.optimizer, self.seen = optimizer, 0

        def around(self, inner: Callable[..., Any]) -> Any:
            self.seen += 1
            return inner()

    original = OwnOptimizer.step
    weights = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    for w in weights:
        w.grad = torch.ones(2)
    one, two, three = (OwnOptimizer([w], lr=1.0) for w in weights)
    owners = [Owner(one), Owner(two)]
    undo = [wrap_method_of(owner.optimizer, "step", owner.around) for owner in owners]
    second = Owner(one)
    undo.append(wrap_method_of(one, "step", second.around))
    for optimizer in (one, two, three):
        optimizer.step()
    assert [owner.seen for owner in (*owners, second)] == [1, 1, 1]
    assert all(w.tolist() == [-1.0, -1.0] for w in weights)
    gone = weakref.ref(two)
    del two, optimizer, owners[1]
    gc.collect()
    assert gone() is None
    undo.pop()()
    one.step()
    assert (owners[0].seen, second.seen) == (2, 1)
    for back in undo:
        back()
        back()
    assert OwnOptimizer.step is original
