"""What is seen while a training steps: each forward, backward, clip and step in order, and where each gradient goes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import Node
from torch.nn.modules import module as modules
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.doctor.loss_graph import LossFacts, read_graph
from trimtab.sample.transfer import number
from trimtab.torchutil.optimizers import params_of
from trimtab.torchutil.patch import wrap_attribute, wrap_on_object

P = ParamSpec("P")
R = TypeVar("R")
Tensors = Tensor | Iterable[Tensor]
Marks = tuple[tuple[int, int] | None, ...]
"""For each gradient: which tensor it is, and how often it was changed in place."""


@dataclass(slots=True)
class Gradients:
    """The gradients of one optimizer at the moment of its step: norms by parameter, None where there is none."""

    norms: dict[int, float | None]
    carried: int = 0
    shared_with: int | None = None

    @property
    def present(self) -> dict[int, float]:
        """Those that there are."""
        return {k: v for k, v in self.norms.items() if v is not None}


class Facts(TypedDict, total=False):
    """What is known about an event. Its kind decides which entries there are."""

    # forward
    name: str
    training: bool
    grad: bool
    autocast: torch.dtype | None
    trainable: bool
    # backward; `scaled` also for clip, step and scaler-step, `scale` also for scaler-step
    scaled: bool
    scale: float
    value: float | None
    kind: str
    reduction: str
    factors: list[float]
    in_step: bool
    root: Node | None
    # clip
    num: int
    norm: float
    max_norm: float
    # autocast
    in_forward: bool
    # scale
    enabled: bool
    # step
    gradients: Gradients
    closure: bool
    in_scaler: bool
    fresh: int
    again: bool
    moved: bool
    update_ratio: float
    made_of: list[int]
    rates: tuple[float, ...]


@dataclass(slots=True)
class Event:
    """Something that happened.

    `kind` is forward, autocast, backward, clip, scale, unscale, step, scaler-step, update, schedule or zero.
    """

    kind: str
    call: int
    who: int = 0
    facts: Facts = field(default_factory=Facts)


@dataclass(slots=True)
class Failure:
    """An exception that ended a call, and where it was raised."""

    kind: str
    text: str
    where: str
    module: str
    phase: str
    trace: str = ""


@dataclass(slots=True)
class Call:
    """One call of the training: what it was given, what it returned, and what changed."""

    index: int
    events: list[Event] = field(default_factory=list)
    loss: float | None = None
    loss_shape: tuple[int, ...] | None = None
    loss_kind: str = ""
    requires_grad: bool = False
    loss_device: str = ""
    facts: LossFacts = field(default_factory=LossFacts)
    failure: Failure | None = None
    warnings: list[str] = field(default_factory=list)
    modules: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    strangers: list[nn.Module] = field(default_factory=list)
    changes: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    rates: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    output: Tensor | None = None
    inputs: list[Tensor] = field(default_factory=list)
    lookups: list[tuple[nn.Embedding, Tensor]] = field(default_factory=list)
    seconds: float = 0.0
    norm_before: float | None = None
    norm_after: float | None = None
    scale: float | None = None
    average: float | None = None

    def note_losses(self) -> None:
        """Fill in what a call that was only watched is known by: the loss that backward was called on."""
        backwards = self.of("backward")
        if backwards and self.loss is None:
            self.loss, self.loss_shape, self.requires_grad = backwards[-1].facts.get("value"), (), True

    @property
    def grad_norms(self) -> list[float]:
        """The norm of every gradient that its steps used."""
        return [v for e in self.of("step") for v in e.facts["gradients"].present.values()]

    def of(self, kind: str) -> list[Event]:
        """Its events of one kind."""
        return [e for e in self.events if e.kind == kind]


class Watch:
    """Wraps PyTorch's functions while a training steps and writes down what they were called for.

    Args:
        model: The model whose forward passes, parameters and gradients are followed.
        optimizers: Optimizers to follow from the start; others are followed from their first step on.
        schedulers: Schedules whose steps are noted.
        num_graphs: The number of calls whose graphs are read in detail; None: all of them.
        keep_gradients: Whether `gradients` keeps a copy of the gradients after every backward pass.
        before_forward: Called before each forward pass that is inside no other.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[Optimizer] = (),
        schedulers: Iterable[object] = (),
        *,
        num_graphs: int | None = None,
        keep_gradients: bool = False,
        before_forward: Callable[[], None] | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.pending = Pending()
        self.optimizers: dict[int, Optimizer] = {}
        self.running: list[str] = []
        self.gradients: list[dict[int, Tensor]] = []
        self._model, self._schedulers, self._num_graphs = model, tuple(schedulers), num_graphs
        self._keep_gradients, self._before_forward = keep_gradients, before_forward
        self._names = {id(m): n or type(m).__name__ for n, m in model.named_modules()}
        self._mine = {id(p) for p in model.parameters()}
        self._depth: dict[int, int] = {}
        self._scaled: dict[int, tuple[Tensor, Tensor, float]] = {}  # by scaled loss: itself, the plain one, the scale
        self._in_scaler = 0
        self._before: dict[int, Tensor] = {}
        for optimizer in optimizers:
            self.know(optimizer)

    @property
    def now(self) -> Call:
        """The call that is under way."""
        return self.calls[-1]

    def begin(self) -> Call:
        """A new call begins."""
        self.calls.append(Call(len(self.calls)))
        self.running.clear()
        self._depth.clear()
        self._in_scaler = 0
        return self.now

    def know(self, optimizer: Optimizer) -> None:
        """Follow the gradients of this optimizer from now on."""
        self.optimizers[id(optimizer)] = optimizer
        self.pending.know(optimizer)

    @contextmanager
    def listening(self) -> Iterator[Watch]:
        """Put the wrappers in place, and take them off again."""
        with ExitStack() as stack:
            stack.callback(modules.register_module_forward_pre_hook(self.enter).remove)
            stack.callback(modules.register_module_forward_hook(self._leave).remove)
            stack.callback(register_optimizer_step_pre_hook(self._stepping).remove)
            stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
            for home, name, around in (
                (torch.autograd, "backward", self._backward),
                (clip_grad, "_clip_grads_with_norm_", self._clip),
                (clip_grad, "clip_grad_value_", self._clip_value),
                (torch.nn.utils, "clip_grad_value_", self._clip_value),
                (Optimizer, "zero_grad", self._zero),
                (torch.autocast, "__enter__", self._autocast),
                (torch.amp.GradScaler, "scale", self._scale),
                (torch.amp.GradScaler, "unscale_", self._unscale),
                (torch.amp.GradScaler, "step", self._scaler_step),
                (torch.amp.GradScaler, "update", self._update),
            ):
                stack.callback(wrap_attribute(home, name, around, while_compiling=False))
            for scheduler in self._schedulers:
                if callable(getattr(scheduler, "step", None)):
                    stack.callback(wrap_on_object(scheduler, "step", functools.partial(self._schedule, id(scheduler))))
            yield self

    def put(self, kind: str, who: int = 0, /, **facts: Unpack[Facts]) -> Event:
        """Write an event down."""
        event = Event(kind, self.now.index, who, facts)
        self.now.events.append(event)
        return event

    # -- forward -------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Note that a forward pass begins. Call it yourself for one that began before `listening`."""
        name = self._names.get(id(module))
        if name is None:
            own = [p for p in module._parameters.values() if p is not None and p.requires_grad]
            if own and not any(id(p) in self._mine for p in own) and self.running:
                self.now.strangers.append(module)
            return
        if not self.running:
            if self._before_forward is not None:
                self._before_forward()
            device = next((p.device.type for p in self._model.parameters()), "cpu")
            on = torch.is_autocast_enabled(device)
            self.put(
                "forward",
                id(module),
                training=module.training,
                grad=torch.is_grad_enabled(),
                autocast=torch.get_autocast_dtype(device) if on else None,
                name=name,
                trainable=any(p.requires_grad for p in module.parameters()),
            )
            self.now.inputs += [t for t in args if isinstance(t, Tensor)][:4]
        if isinstance(module, nn.Embedding) and args and isinstance(args[0], Tensor):
            self.now.lookups.append((module, args[0]))
        self.running.append(name)
        self.now.modules[id(module)] = (module.training, torch.is_grad_enabled())

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if id(module) not in self._names or not self.running:
            return
        self.running.pop()
        if not self.running:
            found = main_of(output)
            if found is not None:
                self.now.output = found.detach()

    def _autocast(self, inner: Callable[[torch.autocast], R], context: torch.autocast) -> R:
        if self.calls and context._enabled:
            self.put("autocast", in_forward=bool(self.running))
        return inner(context)

    # -- backward and gradients ----------------------------------------------------------------------------------

    def _backward(
        self, inner: Callable[Concatenate[Tensors, P], R], tensors: Tensors, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        loss = next((t for t in roots if isinstance(t, Tensor)), None)
        event = self.put("backward", scaled=loss is not None and id(loss) in self._scaled)
        handle = None
        if loss is not None:
            _, plain, scale = self._scaled.get(id(loss), (loss, loss, 1.0))
            factors: list[float] = []
            event.facts |= {
                "value": number(plain.detach().float()) if plain.numel() == 1 and not plain.is_meta else None,
                "kind": "",
                "factors": factors,
                "in_step": bool(self._depth),
                "root": loss.grad_fn,
                "scale": scale,
            }
            facts = read_graph(loss, detailed=self._num_graphs is None or self.now.index < self._num_graphs)
            event.facts["kind"], event.facts["reduction"] = facts.kind, facts.reduction
            if facts.node is not None:
                handle = facts.node.register_prehook(lambda grads: factors.append(size_of(grads)))
            if not self.now.facts.num_nodes:
                self.now.facts = facts
        self.pending.before_backward(self.optimizers.values(), event)
        out = inner(tensors, *args, **kwargs)
        if handle is not None:
            handle.remove()
        self.pending.after_backward(self.optimizers.values())
        if self._keep_gradients:
            self.gradients.append(
                {id(p): p.grad.detach().clone() for p in self._model.parameters() if p.grad is not None}
            )
        self.now.reached |= {id(p) for p in self._model.parameters() if p.grad is not None}
        return out

    def _clip(
        self,
        inner: Callable[Concatenate[list[Tensor], float, Tensor, P], R],
        parameters: Tensors,
        max_norm: float,
        total: Tensor,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        held = {id(p) for p in params if p.grad is not None}
        self.put(
            "clip",
            num=len(held),
            norm=number(total.detach().float()),
            max_norm=float(max_norm),
            scaled=self.pending.is_scaled(held),
        )
        self.pending.look()
        out = inner(params, max_norm, total, *args, **kwargs)
        self.pending.clipped()
        return out

    def _clip_value(self, inner: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self.pending.look()
        out = inner(*args, **kwargs)
        self.pending.clipped()
        return out

    def _zero(
        self, inner: Callable[Concatenate[Optimizer, P], R], optimizer: Optimizer, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        self.put("zero", id(optimizer))
        return inner(optimizer, *args, **kwargs)

    # -- scaler and step -----------------------------------------------------------------------------------------

    def _scale(self, inner: Callable[[GradScaler, R], R], scaler: GradScaler, outputs: R) -> R:
        out = inner(scaler, outputs)
        self.put("scale", id(scaler), enabled=scaler.is_enabled())
        if isinstance(out, Tensor) and isinstance(outputs, Tensor) and out is not outputs:
            self._scaled[id(out)] = (out, outputs, float(scaler.get_scale()))
        return out

    def _unscale(self, inner: Callable[[GradScaler, Optimizer], R], scaler: GradScaler, optimizer: Optimizer) -> R:
        out = inner(scaler, optimizer)
        self.put("unscale", id(optimizer))
        self.pending.unscaled(optimizer)
        return out

    def _scaler_step(
        self,
        inner: Callable[Concatenate[GradScaler, Optimizer, P], R],
        scaler: GradScaler,
        optimizer: Optimizer,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        if scaler.is_enabled():
            scaled = self.pending.is_scaled({id(p) for p in params_of(optimizer)})
            self.put("scaler-step", id(optimizer), scaled=scaled, scale=scaler.get_scale())
            self.now.scale = scaler.get_scale()
        self._in_scaler += 1
        try:
            return inner(scaler, optimizer, *args, **kwargs)
        finally:
            self._in_scaler -= 1

    def _update(
        self, inner: Callable[Concatenate[GradScaler, P], R], scaler: GradScaler, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        self.put("update", id(scaler))
        return inner(scaler, *args, **kwargs)

    def _stepping(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        depth = self._depth[id(optimizer)] = self._depth.get(id(optimizer), 0) + 1
        if depth > 1:  # a class that calls the step of its parent makes one step
            return
        self.know(optimizer)
        closure = (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
        gradients = self.pending.before_step(optimizer)
        self._before = {id(p): p.detach().clone() for p in params_of(optimizer) if not p.is_meta}
        self.put(
            "step",
            id(optimizer),
            gradients=gradients,
            closure=closure,
            in_scaler=bool(self._in_scaler),
            scaled=self.pending.is_scaled(set(gradients.norms)) and not self._in_scaler,
            fresh=self.pending.num_new(optimizer),
            again=self.pending.is_used_up(optimizer),
            moved=False,
            update_ratio=0.0,
            made_of=self.pending.made_of(optimizer),
            rates=tuple(float(g["lr"]) for g in optimizer.param_groups if "lr" in g),
        )

    def _stepped(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        left = self._depth[id(optimizer)] = self._depth.get(id(optimizer), 1) - 1
        if left > 0:
            return
        del self._depth[id(optimizer)]
        event = next(e for e in reversed(self.now.events) if e.kind == "step" and e.who == id(optimizer))
        if event.facts["closure"]:
            event.facts["gradients"] = self.pending.before_step(optimizer)
            event.facts["fresh"] = self.pending.num_new(optimizer)
        params = [p for p in params_of(optimizer) if id(p) in self._before]
        moved, size = distance(params, self._before)
        event.facts["moved"], event.facts["update_ratio"] = moved > 0, moved / size if size > 0 else 0.0
        self.pending.after_step(optimizer)

    def _schedule(self, who: int, inner: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self.put("schedule", who)
        return inner(*args, **kwargs)


class Pending:
    """Which backward passes are in the gradients of each optimizer, and which of them a step has used already."""

    def __init__(self) -> None:
        self._params: dict[int, list[Tensor]] = {}
        self._old: dict[int, dict[int, int]] = {}  # by optimizer: parameter -> the gradient tensor left by its step
        self._holds: dict[int, list[int]] = {}  # by optimizer: the backward passes that its gradients are made of
        self._new: dict[int, int] = {}  # by optimizer: backward passes since its last step
        self._marks: dict[int, Marks] = {}
        self._scaled: set[int] = set()
        self.backwards: list[Event] = []
        self.used: dict[int, set[int]] = {}  # by backward: the optimizers that stepped on it
        self.given: dict[int, set[int]] = {}  # by backward: the optimizers whose gradients it is in
        self._steps: list[tuple[int, int]] = []  # (number of backwards so far, optimizer)
        self._versions: dict[int, int] = {}  # by backward: how often weights had changed when it was over
        self._moved: set[int] = set()  # backwards after which weights moved without a step
        self._ids: dict[int, tuple[int, ...]] = {}
        self.by_hand = False
        self._used_up: dict[int, Marks] = {}  # by optimizer: the gradients as its last step left them
        self._idle: set[int] = set()  # optimizers that stepped on no backward pass
        self._left: dict[int, Marks] = {}  # by optimizer: the gradients as backward or clipping left them

    def know(self, optimizer: Optimizer) -> None:
        """Follow this one, too."""
        if id(optimizer) not in self._params:
            self._holds[id(optimizer)] = []
            self._old[id(optimizer)] = {}
            self._new[id(optimizer)] = 0
        self._params[id(optimizer)] = params_of(optimizer)

    def before_backward(self, optimizers: Iterable[Optimizer], event: Event) -> None:
        """Gradients are about to be added to what is there."""
        self._look_for_moves()
        for optimizer in optimizers:
            self._forget_cleared(id(optimizer))
            self._marks[id(optimizer)] = self._mark(id(optimizer))
        self.backwards.append(event)

    def after_backward(self, optimizers: Iterable[Optimizer]) -> None:
        """Gradients were added: to whose?"""
        num = len(self.backwards) - 1
        for optimizer in optimizers:
            key = id(optimizer)
            if self._mark(key) != self._marks.get(key):
                self._holds[key].append(num)
                self._new[key] += 1
                self.given.setdefault(num, set()).add(key)
            self._ids[key] = tuple(id(p.grad) for p in self._params[key])
            self._left[key] = self._mark(key)
        self._versions[num] = self._num_changes()
        touched = {id(p) for o in optimizers for p in self._params[id(o)] if p.grad is not None}
        if self.backwards[num].facts.get("scaled"):
            self._scaled |= touched

    def before_step(self, optimizer: Optimizer) -> Gradients:
        """What the step is about to use."""
        key = id(optimizer)
        self._forget_cleared(key)
        params = self._params[key]
        if self._holds[key] and self._ids.get(key) != tuple(id(p.grad) for p in params):
            self.by_hand |= any(p.grad is not None for p in params)
        norms = dict(zip([id(p) for p in params], _norms([p.grad for p in params]), strict=True))
        if not self._holds[key]:
            self._idle.add(key)
        for num in self._holds[key]:
            self.used.setdefault(num, set()).add(key)
        return Gradients(norms, len(self._old[key]) if self._new[key] else 0, self._served_another(key))

    def _served_another(self, key: int) -> int | None:
        """Another optimizer has stepped on one of these passes, and further passes came after that."""
        held = self._holds[key]
        for so_far, other in self._steps:
            before = [n for n in held if n < so_far]
            if other != key and len(before) < len(held) and any(other in self.used.get(n, ()) for n in before):
                return other
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        """The step is made: what is left in the gradients now is old."""
        key = id(optimizer)
        left = {id(p): id(p.grad) for p in self._params[key] if p.grad is not None and _any(p.grad)}
        self._old[key], self._new[key] = left, 0
        self._used_up[key] = self._mark(key)
        self._steps.append((len(self.backwards), key))
        if self._versions:
            self._versions[max(self._versions)] = self._num_changes()
        self._scaled -= {id(p) for p in self._params[key]}

    def discarded(self) -> list[int]:
        """Backward passes that gave gradients, which no step used before they were cleared."""
        held = {n for holds in self._holds.values() for n in holds}
        lost = [n for n in self.given if not self.used.get(n) and n not in held and n not in self._moved]
        # With several players a pass may be for the others; it is lost for one that then steps on nothing.
        return [n for n in lost if len(self._params) == 1 or self.given[n] & self._idle]

    def _look_for_moves(self) -> None:
        last = len(self.backwards) - 1
        if last >= 0 and last not in self.used and self._versions.get(last) != self._num_changes():
            self._moved.add(last)

    def _num_changes(self) -> int:
        return sum(p._version for params in self._params.values() for p in params)

    def made_of(self, optimizer: Optimizer) -> list[int]:
        """The backward passes that its gradients are made of now."""
        return list(self._holds[id(optimizer)])

    def look(self) -> None:
        """Something is about to change the gradients: what was cleared before that?"""
        for key in self._params:
            self._forget_cleared(key)

    def clipped(self) -> None:
        """Gradients were changed, but not cleared."""
        for key in self._params:
            if self._holds[key]:
                self._left[key] = self._mark(key)

    def is_used_up(self, optimizer: Optimizer) -> bool:
        """Whether these are the very gradients that its last step used, untouched."""
        return self._used_up.get(id(optimizer)) == self._mark(id(optimizer))

    def num_new(self, optimizer: Optimizer) -> int:
        """How many backward passes there were since its last step."""
        return self._new[id(optimizer)]

    def unscaled(self, optimizer: Optimizer) -> None:
        """The scale was taken out again."""
        self._scaled -= {id(p) for p in self._params.get(id(optimizer), ())}

    def is_scaled(self, params: set[int]) -> bool:
        """Whether the gradients of these parameters still hold the factor of a scaler."""
        return bool(self._scaled & params)

    def _forget_cleared(self, key: int) -> None:
        params = self._params[key]
        old = self._old[key]
        if old:
            self._old[key] = {
                id(p): old[id(p)]
                for p in params
                if id(p) in old and p.grad is not None and id(p.grad) == old[id(p)] and _any(p.grad)
            }
        if self._mark(key) == self._left.get(key):
            return  # unchanged since: where they are zero, backward made them so
        if self._holds[key] and not any(p.grad is not None and _any(p.grad) for p in params):
            self._holds[key] = []
            self._scaled -= {id(p) for p in params}

    def _mark(self, key: int) -> Marks:
        return tuple(None if p.grad is None else (id(p.grad), p.grad._version) for p in self._params[key])


def _any(grad: Tensor) -> bool:
    values = grad._values() if grad.layout is torch.sparse_coo else grad
    return values.numel() > 0 and bool((values != 0).any())


def _norms(grads: list[Tensor | None]) -> list[float | None]:
    out: list[float | None] = []
    for grad in grads:
        if grad is None or grad.is_meta:
            out.append(None)
        else:
            values = grad.detach().coalesce().values() if grad.layout is torch.sparse_coo else grad.detach()
            wide = values.abs().double() if values.is_complex() else values.double()
            out.append(number(torch.linalg.vector_norm(wide)) if wide.numel() else 0.0)
    return out


def main_of(output: object) -> Tensor | None:
    """What a model says, in whatever it is wrapped: not its loss, which has no row for each sample."""
    if isinstance(output, Tensor):
        return output
    if not isinstance(output, dict | list | tuple) and hasattr(output, "__dict__"):
        output = vars(output)
    if isinstance(output, dict):
        return next((v for k, v in output.items() if isinstance(v, Tensor) and v.dim() and k != "loss"), None)
    rows = output if isinstance(output, list | tuple) else ()
    return next((v for v in rows if isinstance(v, Tensor) and v.dim()), None)


def size_of(grads: object) -> float:
    """The one number among the gradients that flow into a loss; NaN where there is none."""
    found = [g for g in (grads if isinstance(grads, tuple) else (grads,)) if isinstance(g, Tensor) and g.numel() == 1]
    return number(found[0].detach().float()) if found else float("nan")


def distance(params: list[Tensor], before: dict[int, Tensor]) -> tuple[float, float]:
    """How far all of them went together, and how large those that went were."""
    by = size = 0.0
    for p in params:
        old = before[id(p)]
        if not torch.equal(p.detach(), old):
            by += number((p.detach() - old).abs().double().square().sum())
            size += number(old.abs().double().square().sum())
    return math.sqrt(by), math.sqrt(size)
