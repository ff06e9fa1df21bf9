"""The parts of a training that a checkpoint holds: modules, optimizers, schedulers; each captured, compared and loaded.

Differences are gathered, in words, before anything is changed.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trimtab.core.errors import CheckpointError
from trimtab.core.printable import brief
from trimtab.torchutil.undo import tensor_values

log = logging.getLogger("trimtab")
_Saved = TypeVar("_Saved")
SHOWN = 5
"""Names in one line of a difference; the rest are counted."""


def listed(names: Iterable[str], shown: int = SHOWN) -> str:
    """Some names, and how many more there are.

    Example:
        >>> listed(["a", "b", "c"], shown=2)
        'a, b and 1 more'
    """
    kept = list(names)
    more = f" and {len(kept) - shown} more" if len(kept) > shown else ""
    return ", ".join(brief(name) for name in kept[:shown]) + more


def joined(path: str, key: object) -> str:
    """The name of something inside of a container; one that is too long is cut, and ends in a checksum of the whole.

    A file can nest thousands of tensors below a name of a million characters, and each of them would repeat it.

    Example:
        >>> joined("model", "weight"), joined("", 3), len(joined("x" * 300, "y" * 300)) < 420
        ('model.weight', '3', True)
    """
    return _cut(f"{path}.{_cut(_named(key), 120)}" if path else _cut(_named(key), 120), 400)


def _named(key: object) -> str:
    return str(key) if not isinstance(key, int) or key.bit_length() < 1000 else brief(key)


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[: length - 10]}…{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"


def missing_and_extra(part: str, here: Iterable[str], saved: Iterable[str], what: str) -> list[str]:
    """Lines for the names that are only here, or only in the checkpoint."""
    ours, theirs = dict.fromkeys(here), dict.fromkeys(saved)
    lines = []
    if absent := [name for name in ours if name not in theirs]:
        lines.append(f"{part}: {what} here but not in the checkpoint: {listed(absent)}")
    if extra := [name for name in theirs if name not in ours]:
        lines.append(f"{part}: {what} in the checkpoint but not here: {listed(extra)}")
    return lines


def kind_of(value: object) -> str:
    """A tensor by type and shape, everything else by its class."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__


def different(part: str, name: str, here: str, saved: str) -> str:
    """One line: the name, what the checkpoint has, and what is here."""
    return f"{part}: {name} is {saved} in the checkpoint, {here} here"


class Stateful(Protocol):
    """An optimizer, scheduler, scaler, average or guard: its state can be taken and put back."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain data and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take over a state."""


Several: TypeAlias = Stateful | Sequence[Stateful] | Mapping[str, Stateful] | None
"""One of a kind, or any number of them."""

Entry = TypedDict(
    "Entry",
    {"class": str, "state": dict[str, Any], "names": list[list[str]], "shapes": list[list[list[int]]]},
    total=False,
)
"""An optimizer or scheduler as it is saved; torch's optimizers with names and shapes of their parameters by group."""


def labelled(objects: Several) -> dict[str, Stateful]:
    """One object, or several in a list or dict, each under a name; None is none."""
    if objects is None:
        return {}
    if isinstance(objects, Mapping):
        return {str(name): one for name, one in objects.items()}
    if isinstance(objects, Sequence):
        return {str(index): one for index, one in enumerate(objects)}
    return {"0": objects}


def paired(here: Mapping[str, object], saved: Mapping[str, _Saved]) -> Mapping[str, _Saved]:
    """What was saved, under the labels of this side: a guard, a list and a dict label the same objects differently.

    One and one belong together whatever they are called; several only by their labels, or by their order where one
    side has none but their places.

    Example:
        >>> paired({"": "adam"}, {"0": "its state"}), paired({"g": 1, "d": 2}, {"0": "first", "1": "second"})
        ({'': 'its state'}, {'g': 'first', 'd': 'second'})
    """
    if set(here) == set(saved) or len(here) != len(saved):
        return saved
    places = [str(place) for place in range(len(here))]
    if len(here) == 1 or places in (list(here), list(saved)):
        return dict(zip(here, saved.values(), strict=True))
    return saved


def refuse(differences: Sequence[str]) -> None:
    """Raise a `CheckpointError` that lists every difference, if there are any."""
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        raise CheckpointError(
            f"the checkpoint does not fit; nothing was changed. {len(differences)} difference(s):\n{lines}\n"
            "Build the objects as they were when it was saved, or choose another checkpoint."
        )


def copied(value: object) -> Any:
    """A deep copy of plain data and tensors: what is loaded must never share memory with what it was loaded from."""
    if isinstance(value, Tensor):
        return value.detach().to(value.device, copy=True)
    if isinstance(value, dict):
        whole = copy.copy(value)  # an OrderedDict or defaultdict keeps its kind
        whole.update((key, copied(one)) for key, one in value.items())
        return whole
    if type(value) is list or type(value) is tuple:
        return type(value)(copied(one) for one in value)
    return copy.deepcopy(value)


COMPILED = "_orig_mod."
"""What `torch.compile` puts into names; a compiled and a plain model are the same model."""

KEPT_BYTES = 1 << 30
"""A module larger than this is not copied before it is loaded."""


Model: TypeAlias = nn.Module | Mapping[str, nn.Module] | None
"""A model, or several under their names."""


def whole_model(model: Model) -> nn.Module | None:
    """The model; several in a dict as one module that holds them under their names, as a guard saves them."""
    if model is None or isinstance(model, nn.Module) or not isinstance(model, Mapping):
        return model
    if wrong := {str(name): one for name, one in model.items() if not isinstance(one, nn.Module)}:
        found = ", ".join(f"{name!r} is a {type(one).__name__}" for name, one in wrong.items())
        raise CheckpointError(f"model is a dict, and {found}; expected names with a torch.nn.Module each")
    holder = nn.Module()
    holder._modules.update({str(name): one for name, one in model.items()})
    return holder


def plain_name(module: nn.Module, name: str) -> str:
    """The name without what `torch.compile` and the data-parallel wrappers add to it."""
    name = name.replace(COMPILED, "")
    parallel = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    return name.removeprefix("module.") if parallel else name


def parameter_names(module: nn.Module | None) -> dict[int, str]:
    """The plain name of every parameter by its identity; the first one where a tensor has several."""
    found: dict[int, str] = {}
    if isinstance(module, nn.Module):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), plain_name(module, name))
    return found


def tensors_of(module: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and extra state under plain names; buffers that `state_dict` leaves out are in it too."""
    state = {plain_name(module, name): value for name, value in module.state_dict().items()}
    return state | _unsaved_buffers(module)


def module_differences(part: str, module: nn.Module, saved: Mapping[str, object]) -> list[str]:
    """Why `saved` cannot be put into this module, one line each; nothing is changed."""
    here = {plain_name(module, name): value for name, value in module.state_dict(keep_vars=True).items()}
    unsaved = _unsaved_buffers(module)
    lines = missing_and_extra(part, here, (name for name in saved if name not in unsaved), "tensors")
    for name in (name for name in here if name in saved):
        ours, theirs = here[name], saved[name]
        if isinstance(ours, Tensor) and is_lazy(ours):  # takes the shape of what is loaded
            continue
        if isinstance(ours, Tensor) and (not isinstance(theirs, Tensor) or kind_of(ours) != kind_of(theirs)):
            lines.append(different(part, name, kind_of(ours), kind_of(theirs)))
    return lines


@torch.no_grad()
def load_module(part: str, module: nn.Module, saved: Mapping[str, object]) -> None:
    """Copy `saved` into the module's own tensors, which stay the same objects.

    Goes through `load_state_dict`, so that hooks on it learn of the change.
    """
    current = module.state_dict()
    state = OrderedDict((name, saved[plain_name(module, name)]) for name in current)
    # The names are those of this version of the module, so its version marks are the right ones.
    state._metadata = getattr(current, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    module.load_state_dict(state)
    left = []
    for name, buffer in _unsaved_buffers(module).items():
        value = saved.get(name)
        if isinstance(value, Tensor) and kind_of(value) == kind_of(buffer):
            buffer.copy_(value)
        else:
            left.append(name)
    if left:
        log.warning("%s: buffers that are not in the checkpoint in this shape stay as they are: %s", part, listed(left))


def keep_module(module: nn.Module) -> Callable[[], None]:
    """A function that puts the tensors back as they are now, for a module small enough to be copied.

    Shapes were compared before; only a hook of the module's own can still fail, and the copy is for that.
    """
    live = [one for one in (*module.parameters(), *module.buffers()) if not is_lazy(one) and not one.is_meta]
    if sum(one.numel() * one.element_size() for one in live) > KEPT_BYTES:
        return lambda: log.warning("%s was too large to be kept: part of it may be loaded", type(module).__name__)
    return tensor_values(live)


def _unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers registered with persistent=False: `state_dict` leaves them out, the next step may depend on them."""
    found: dict[str, Tensor] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name in sorted(owner._non_persistent_buffers_set):
            buffer = owner._buffers.get(name)
            if buffer is not None:
                found[plain_name(module, f"{prefix}.{name}" if prefix else name)] = buffer.detach()
    return found


@torch.no_grad()
def masks_of(section: str, module: object) -> set[str]:
    """The names (`model.mask`) of buffers that hold nothing but -inf, 0 and 1.

    Statistics that went wrong do not look like that, so a mask may pass where everything else must be finite.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> model.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        >>> model.register_buffer("mean", torch.tensor([0.3, float("-inf")]))
        >>> masks_of("model", model)
        {'model.mask'}
    """
    if not isinstance(module, nn.Module):
        return set()
    found = module.named_buffers(remove_duplicate=False)
    return {f"{section}.{plain_name(module, name)}" for name, buffer in found if _is_mask(buffer)}


def _is_mask(buffer: Tensor) -> bool:
    if buffer.is_meta or buffer.layout is not torch.strided or not buffer.is_floating_point() or buffer.numel() < 2:
        return False
    if buffer.element_size() == 1:  # 8-bit floats know no arithmetic
        buffer = buffer.float()
    return bool((buffer.isneginf() | (buffer == 0) | (buffer == 1)).all())


HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how a step is computed, not what it computes: those of the optimizer that is here stay."""


def capture_optimizers(optimizer: Several, model: nn.Module | None) -> dict[str, Entry]:
    """The state of every optimizer, with its class and the names and shapes of its parameters by group."""
    names = parameter_names(model)
    found = {}
    for label, one in ((label, inner_optimizer(one)) for label, one in labelled(optimizer).items()):
        entry: Entry = {"class": type(one).__name__, "state": one.state_dict()}
        if isinstance(one, Optimizer):
            groups = [group["params"] for group in one.param_groups]
            entry["names"] = [[names.get(id(p), "") for p in group] for group in groups]
            entry["shapes"] = [[list(p.shape) for p in group] for group in groups]
        found[label] = entry
    return found


def inner_optimizer(optimizer: Stateful) -> Stateful:
    """The optimizer itself, where a framework has wrapped it."""
    wrapped = getattr(optimizer, "optimizer", None)
    return wrapped if not isinstance(optimizer, Optimizer) and isinstance(wrapped, Optimizer) else optimizer


def optimizer_differences(optimizer: Several, saved: Mapping[str, Entry], model: nn.Module | None) -> list[str]:
    """Why `saved` cannot be loaded into these optimizers, one line each; nothing is changed."""
    return _entry_differences("optimizer", capture_optimizers(optimizer, model), saved, _group_differences)


def _entry_differences(
    what: str,
    here: Mapping[str, Entry],
    saved: Mapping[str, Entry],
    compare: Callable[[str, Entry, Entry], Iterator[str]],
) -> list[str]:
    saved = paired(here, saved)
    lines = missing_and_extra(what, here, saved, f"{what}s")
    for label in (label for label in here if label in saved):
        part = what if len(here) == 1 else f"{what} {label}"
        ours, theirs = here[label], saved[label]
        if ours["class"] != theirs["class"]:
            lines.append(different(part, "its class", ours["class"], theirs["class"]))
        else:
            lines.extend(compare(part, ours, theirs))
    return lines


def _group_differences(part: str, ours: Entry, theirs: Entry) -> Iterator[str]:
    if "names" not in ours or "names" not in theirs:
        return
    counts = [[len(group) for group in entry["shapes"]] for entry in (ours, theirs)]
    if len(counts[0]) != len(counts[1]):
        yield different(part, "the number of parameter groups", str(len(counts[0])), str(len(counts[1])))
        return
    for index, (num_here, num_saved) in enumerate(zip(*counts, strict=True)):
        if num_here != num_saved:
            yield different(part, f"group {index}", f"{num_here} parameters", f"{num_saved} parameters")
            continue
        for place in range(num_here):
            name_here, name_saved = ours["names"][index][place], theirs["names"][index][place]
            shape_here, shape_saved = ours["shapes"][index][place], theirs["shapes"][index][place]
            if (name_here and name_saved and name_here != name_saved) or shape_here != shape_saved:
                kinds = [
                    f"{name or 'a parameter'} {tuple(shape)}"
                    for name, shape in ((name_here, shape_here), (name_saved, shape_saved))
                ]
                yield different(part, f"parameter {place} of group {index}", *kinds)


def load_optimizers(optimizer: Several, saved: Mapping[str, Entry]) -> None:
    """Load the state of every optimizer; it shares no memory with `saved` afterwards."""
    here = labelled(optimizer)
    saved = paired(here, saved)
    for label, one in here.items():
        one, state = inner_optimizer(one), saved[label]["state"]
        if isinstance(one, Optimizer):
            _load_one(one, state)
        else:
            one.load_state_dict(copied(state))


def keep_optimizers(optimizer: Several) -> Callable[[], None]:
    """A function that puts the optimizers back as they are now."""
    undo: list[Callable[[], object]] = []
    for one in map(inner_optimizer, labelled(optimizer).values()):
        if isinstance(one, Optimizer) and type(one).load_state_dict is Optimizer.load_state_dict:
            # Loading replaces these objects and leaves the old ones alone: keeping them costs no memory.
            undo.append(partial(one.__dict__.update, state=one.state, param_groups=one.param_groups))
        else:
            undo.append(partial(one.load_state_dict, copied(one.state_dict())))

    def put_back() -> None:
        for back in undo:
            back()

    return put_back


def _load_one(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    state = copied(dict(saved))
    for group, ours in zip(state.get("param_groups", ()), optimizer.param_groups, strict=False):
        group.update({option: ours[option] for option in HOW if option in ours})
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        _set_exactly(optimizer, state)


def _set_exactly(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loading casts moments to the type of their parameter, and leaves step counts on the device they were saved from.

    Moments kept in float32 for parameters in bfloat16 would lose their lower half.
    """
    for group, packed in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, index in zip(group["params"], packed["params"], strict=True):
            for key, value in state["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    optimizer.state[parameter][key] = placed(key, value, parameter, group)


def placed(key: str, value: Tensor, parameter: Tensor, group: Mapping[str, object]) -> Tensor:
    """A moment on the device of its parameter, a step count where the optimizer wants it."""
    if key != "step":
        return value.to(parameter.device)
    if group.get("fused"):
        return value.to(parameter.device, torch.float32)
    return value.to(parameter.device if group.get("capturable") else "cpu")


PLANNED = ("total_steps", "T_max", "T_0", "step_size", "total_iters")
"""How long a schedule is meant to be; loading one of another length is easily overlooked."""


def capture_schedulers(scheduler: Several) -> dict[str, Entry]:
    """The state of every scheduler, with its class."""
    return {
        label: {"class": type(one).__name__, "state": one.state_dict()} for label, one in labelled(scheduler).items()
    }


def scheduler_differences(scheduler: Several, saved: Mapping[str, Entry]) -> list[str]:
    """Why `saved` does not belong to these schedulers, one line each."""
    return _entry_differences("scheduler", capture_schedulers(scheduler), saved, _rate_differences)


def _rate_differences(part: str, ours: Entry, theirs: Entry) -> Iterator[str]:
    num_here, num_saved = (len(entry["state"].get("base_lrs", ())) for entry in (ours, theirs))
    if num_here != num_saved:
        yield different(part, "the number of base learning rates", str(num_here), str(num_saved))


def load_schedulers(scheduler: Several, saved: Mapping[str, Entry]) -> None:
    """Load the state of every scheduler; a schedule of another length is warned about."""
    here = labelled(scheduler)
    saved = paired(here, saved)
    for label, one in here.items():
        state = copied(saved[label]["state"])
        for name in PLANNED:
            if name in state and getattr(one, name, state[name]) != state[name]:
                message = "scheduler: %s is %s in the checkpoint, %s here; the one of the checkpoint is used"
                log.warning(message, name, state[name], getattr(one, name))
        one.load_state_dict(state)


def keep_schedulers(scheduler: Several) -> Callable[[], None]:
    """A function that puts the schedulers back as they are now."""
    before = copied(capture_schedulers(scheduler))
    return lambda: load_schedulers(scheduler, before)
