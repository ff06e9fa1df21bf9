"""Sees every operation of a forward and backward pass, and remembers which one made a bad value out of good ones."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.trace.source_lines import Line, current_line
from trimtab.trace.values import FINE, Bad, bad_in, is_mask, tensors_in, where_bad

MAX_KEPT = 64
"""Operations that may be the first whose operands are kept until the one that matters is known."""
MAX_KEPT_BYTES, MAX_MASK_BYTES = 256 << 20, 1 << 20
UNINITIALISED = ("empty", "new_empty", "resize")
"""How the names of operations begin whose result is whatever was in memory."""
MAKE_NOTHING = ("set_",)
"""Operations that only let a tensor stand for other memory, as cuDNN does with the weights of recurrent layers."""
MADE_ON_PURPOSE = ("full", "fill", "scalar_tensor", "new_full", "constant_pad", "masked_fill")
_node = torch._C._current_autograd_node
_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr


@dataclass(frozen=True, slots=True)
class Call:
    """One operation: what it is called, and where it stands. Outside of the model there is no module."""

    op: str
    module: str | None
    line: Line | None
    micro_batch: int = 0  # how many backward passes were followed by another call of the model


@dataclass(slots=True)
class Kept:
    """The operands of an operation, as they were before it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]


@dataclass(slots=True)
class Leaf:
    """A bad tensor that no operation made: it came in with the batch, the weights, or from elsewhere."""

    storage: int
    bad: Bad
    mask: bool
    tensor: Tensor


@dataclass(slots=True)
class Event:
    """An operation with a bad result.

    `makes`: some bad value in its result is not explained by bad values in its operands. `sources` are the events and
    leaves that its bad operands come from.
    """

    index: int
    op: Any
    bad: Bad
    call: Call
    phase: str
    node: str
    forward: Call | None
    makes: bool
    on_purpose: bool
    sources: list[Event | Leaf]
    makers: tuple[str, ...] = ()  # which operations made the operands, where that is known
    kept: Kept | None = None
    result: Tensor | None = None
    result_index: int = 0
    storage: int = 0  # which memory it wrote to
    notes: list[str] = field(default_factory=list)

    @property
    def leaves(self) -> list[Leaf]:
        """Those of its sources that no operation made."""
        return [one for one in self.sources if isinstance(one, Leaf)]

    @property
    def name(self) -> str:
        """The operation's name, as in `aten.log.default`."""
        return str(self.op)


@dataclass(frozen=True, slots=True)
class _Run:
    """An operation that was just run: what went into it, and what it wrote to as that was before."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Tensor]
    before: Mapping[int, Bad]
    copies: Mapping[int, Tensor]
    call: Call
    node: Any
    in_optimizer: bool


class OpWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active as a context: afterwards `origin_of` says what a bad tensor goes back to.

    Example:
        >>> with OpWatch() as watch:
        ...     x = torch.zeros(2)
        ...     bad = torch.log(x) * 0
        >>> watch.origin_of([bad]).name
        'aten.log.default'
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ops = 0
        self.events: list[Event] = []
        self._paths = {} if model is None else module_paths(model)
        self._root, self._after_backward = id(model), False
        self.micro_batch = 0
        self._stacks: dict[int, list[str | None]] = {}  # by thread: an accelerator's backward has one of its own
        self._forward: dict[int, Call] = {}
        # Which event wrote a storage last. The reference keeps its address from being used again.
        self._written: dict[int, tuple[Event, StorageWeakRef]] = {}
        self._raw: dict[int, StorageWeakRef] = {}
        self._makers: dict[int, str] = {}  # only to explain: an address that is used again has a new maker
        self._kept_bytes = 0
        self._hooks: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not by importing the compiler, which takes seconds: nothing is compiled while a step is replayed."""
        return False

    # -- as a context --------------------------------------------------------------------------------------------

    def __enter__(self) -> OpWatch:
        if self._paths:
            self._hooks = [
                register_module_forward_pre_hook(self._enter_module),
                register_module_forward_hook(self._leave_module, always_call=True),
            ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _enter_module(self, module: nn.Module, args: object) -> None:
        stack = self._stacks.setdefault(threading.get_ident(), [])
        if id(module) == self._root and not stack and self._after_backward:
            self.micro_batch, self._after_backward = self.micro_batch + 1, False
        stack.append(self._paths.get(id(module), stack[-1] if stack else None))

    def _leave_module(self, module: nn.Module, args: object, output: object) -> None:
        if stack := self._stacks.get(threading.get_ident()):
            stack.pop()

    # -- every operation -----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run it, and look at what came of it."""
        kwargs = kwargs or {}
        self.num_ops += 1
        node = _node()
        seen = current_line()
        self._after_backward = self._after_backward or node is not None
        call = Call(str(func), self._module(node), seen.line, self.micro_batch)
        if node is None or seen.line is not None:  # a forward, or one that is computed again
            self._forward.setdefault(_sequence() - 1, call)
        changed = changed_operands(func, args, kwargs)
        before = {id(t): self._state(t) for t in changed}
        copies = {id(t): t.detach().clone() for t in changed if t.nbytes <= MAX_KEPT_BYTES}
        out = func(*args, **kwargs)
        if func.namespace == "aten" and func.__name__.startswith(UNINITIALISED):
            for t in tensors_in(out):
                if t.layout is torch.strided:
                    self._raw[storage_of(t)] = reference_to(t)
            return out
        if func.namespace == "aten" and func.__name__.startswith(MAKE_NOTHING):
            return out
        operands = [t for t in (*tensors_in(args), *tensors_in(kwargs)) if not t.is_meta]
        run = _Run(func, args, kwargs, operands, before, copies, call, node, seen.in_optimizer)
        for i, result in enumerate([*tensors_in(out), *(t for t in changed if not _is_in(t, out))]):
            is_new = bool(changed) or not any(storage_of(t) == storage_of(result) for t in operands)  # no mere view
            if not (bad := bad_in(result)):
                if changed:
                    self._is_fine(result)
            elif is_new:
                event = self._note(run, result, bad)
                event.result_index, event.storage = i, storage_of(result)
                if result.layout is torch.strided:
                    self._written[storage_of(result)] = event, reference_to(result)
            self._raw.pop(storage_of(result), None)
            if is_new:
                self._makers[storage_of(result)] = call.op
        return out

    def _module(self, node: Any) -> str | None:
        stack = self._stacks.get(threading.get_ident())
        if stack or node is None:
            return stack[-1] if stack else None
        known = self._forward.get(int(node._sequence_nr()))  # a forward that is computed again outside of its module
        return None if known is None else known.module

    def _state(self, tensor: Tensor) -> Bad:
        return FINE if storage_of(tensor) in self._raw else bad_in(tensor)

    def _is_fine(self, tensor: Tensor) -> None:
        """All of it was written over with good values."""
        if tensor.layout is torch.strided and tensor.nbytes >= tensor.untyped_storage().nbytes():
            self._written.pop(storage_of(tensor), None)

    def _note(self, run: _Run, result: Tensor, bad: Bad) -> Event:
        """An operation with a bad result: where it stands, and which of its operands were bad already."""
        bads = [(t, run.before[id(t)] if id(t) in run.before else self._state(t)) for t in run.operands]
        sources = [self._source(t, one) for t, one in bads if one]
        values = [run.copies.get(id(t), t) for t in run.operands]
        pointwise = torch.Tag.pointwise in run.func.tags
        phase, forward = self._place(run)
        event = Event(
            index=self.num_ops,
            op=run.func,
            bad=bad,
            call=run.call,
            phase=phase,
            node="" if run.node is None else str(run.node.name()),
            forward=forward,
            makes=not sources or (pointwise and makes_more(result, values)),
            on_purpose=not bad.nan and is_on_purpose(run.func, run.args, run.kwargs),
            sources=sources,
            makers=tuple(self._makers.get(storage_of(t), "") for t in run.operands),
        )
        self._keep(event, run, result)
        self.events.append(event)
        return event

    def _place(self, run: _Run) -> tuple[str, Call | None]:
        if run.in_optimizer:
            return "optimizer", None
        if run.node is None or (run.call.line is not None and torch.is_grad_enabled()):
            return "forward", None
        return "backward", self._forward.get(int(run.node._sequence_nr()))

    def _source(self, tensor: Tensor, bad: Bad) -> Event | Leaf:
        known = self._written.get(storage_of(tensor))
        if known is not None:
            return known[0]
        return Leaf(storage_of(tensor), bad, not bad.nan and is_mask(tensor), tensor)

    def _keep(self, event: Event, run: _Run, result: Tensor) -> None:
        """Operands of what may be the first bad operation: later ones may write over them."""
        could_be_first = event.makes or not any(isinstance(s, Event) and s.bad.nan for s in event.sources)
        if not could_be_first or len(self.events) >= MAX_KEPT:
            return
        operands = [*tensors_in(run.args), *tensors_in(run.kwargs)]
        size = sum(t.nbytes for t in (*operands, result))
        if event.on_purpose and (not operands or size > MAX_MASK_BYTES):
            return
        if self._kept_bytes + size > MAX_KEPT_BYTES:
            event.notes.append("its operands are too large to be kept")
            return
        self._kept_bytes += size
        names = tuple(one.name for one in event.op._schema.arguments)
        event.kept = Kept(copied(run.args, run.copies), copied(run.kwargs, run.copies), names)
        event.result = result.detach().clone()

    # -- afterwards ----------------------------------------------------------------------------------------------

    def origin_of(self, tensors: Iterable[Tensor], *, loss_is_fine: bool = False) -> Event | Leaf | None:
        """The first event or leaf, in order of execution, that bad values in these tensors go back to.

        With `loss_is_fine`, bad values of the forward pass never reached the loss: then the operation of the backward
        pass that let them in again is the origin.
        """
        walk = _Walk(loss_is_fine)
        for tensor in tensors:
            if bad := bad_in(tensor):
                walk.from_(self._source(tensor, bad))
        return walk.first()

    def origin_from(self, event: Event) -> Event | Leaf | None:
        """The same, from one event."""
        walk = _Walk(False)
        walk.from_(event)
        return walk.first()

    def first_use(self, leaf: Leaf) -> Event | None:
        """The first operation whose result a bad leaf made bad."""
        return next((e for e in self.events if any(s.storage == leaf.storage for s in e.leaves)), None)

    def last_bad(self) -> Event | None:
        """The last event, where nobody knows which tensor matters."""
        return self.events[-1] if self.events else None


class _Walk:
    """From bad results back to what they began with."""

    def __init__(self, loss_is_fine: bool) -> None:
        self._loss_is_fine = loss_is_fine
        self._roots: dict[int, list[Event | Leaf]] = {}
        self._found: list[Event | Leaf] = []
        self._on_purpose: list[Event] = []

    def from_(self, start: Event | Leaf) -> None:
        ahead: list[Event | Leaf] = [start]
        while ahead:
            one = ahead[-1]
            if id(one) in self._roots:
                ahead.pop()
                continue
            missing = [s for s in self._followed(one) if id(s) not in self._roots]
            if missing:
                ahead += missing
                continue
            self._roots[id(one)] = self._roots_of(one)
            ahead.pop()
        self._found = _first(self._found + self._roots[id(start)])

    def _followed(self, one: Event | Leaf) -> list[Event | Leaf]:
        """The sources that explain it: NaN comes from NaN where there is any, else from Inf."""
        if isinstance(one, Leaf):
            return []
        sources = [s for s in one.sources if not (self._loss_is_fine and _is_absorbed(s, one))]
        if one.bad.nan and any(s.bad.nan for s in sources):
            return [s for s in sources if s.bad.nan]
        return sources

    def _roots_of(self, one: Event | Leaf) -> list[Event | Leaf]:
        if isinstance(one, Leaf):
            return [] if one.mask else [one]
        if one.on_purpose and not one.bad.nan:
            self._on_purpose.append(one)
            return []
        roots = _first([root for source in self._followed(one) for root in self._roots[id(source)]])
        if one.makes or (one.bad.nan and not roots):
            return _first([*roots, one])  # made of nothing bad, or NaN of infinities that were put there on purpose
        if not roots:
            self._on_purpose.append(one)  # passes such infinities on
        return roots

    def first(self) -> Event | Leaf | None:
        if not self._found:  # an infinity that was put there on purpose reached the end
            return min(self._on_purpose, key=lambda e: (not e.makers, e.index), default=None)
        leaves = [one for one in self._found if isinstance(one, Leaf)]
        return leaves[0] if leaves else min((e for e in self._found if isinstance(e, Event)), key=lambda e: e.index)


def _first(roots: list[Event | Leaf]) -> list[Event | Leaf]:
    """The first leaf and the first event: along shortcuts, all roots of all paths would double with every block."""
    leaf = next((one for one in roots if isinstance(one, Leaf)), None)
    event = min((one for one in roots if isinstance(one, Event)), key=lambda e: e.index, default=None)
    return [one for one in (leaf, event) if one is not None]


def _is_absorbed(source: Event | Leaf, consumer: Event) -> bool:
    """A bad value of the forward pass, which did not reach the loss, comes in again in the backward pass."""
    return isinstance(source, Event) and source.phase == "forward" and consumer.phase == "backward"


def makes_more(result: Tensor, operands: list[Tensor]) -> bool:
    """Whether an operation that goes value by value made a bad one where its operands are finite.

    Example:
        >>> makes_more(torch.tensor([math.inf, 1.0]), [torch.tensor([0.0, 1.0])])
        True
    """
    try:
        left = where_bad(result)
        for one in operands:
            if one.is_floating_point() or one.is_complex():
                left = left & ~where_bad(one).to(left.device).expand_as(left)
        return bool(left.any())
    except RuntimeError:  # shapes that do not fit: not value by value after all
        return False


def is_on_purpose(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an infinite number was given to the operation as such, as in `masked_fill(mask, -inf)`."""
    numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, float)]
    if any(math.isinf(v) for v in numbers):
        return True
    return bool(func.__name__.startswith(MADE_ON_PURPOSE)) and any(
        t.dim() == 0 and bool(torch.isinf(t)) for t in tensors_in(args) if t.is_floating_point()
    )


def changed_operands(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The operands that an operation writes to; those given as `out` are not operands."""
    found: list[Tensor] = []
    for i, name in _written_places(func):
        found += tensors_in(args[i] if i < len(args) else kwargs.get(name))
    return found


@cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    """Where its schema says so, and running statistics, of which the schemas of some normalisations do not say it."""
    return tuple(
        (i, one.name)
        for i, one in enumerate(func._schema.arguments)
        if one.name.startswith("running_")
        or (one.alias_info is not None and one.alias_info.is_write and not one.is_out)
    )


def storage_of(tensor: Tensor) -> int:
    """What tells its memory apart from all other: 0 where there is none of its own."""
    if tensor.layout is not torch.strided:
        return -id(tensor)
    return int(tensor.untyped_storage()._cdata)


def reference_to(tensor: Tensor) -> StorageWeakRef:
    """Keeps the address of a tensor's memory from being used again, but not the memory itself."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def copied(value: Any, copies: Mapping[int, Tensor]) -> Any:
    """Arguments as they were before the call, detached and by themselves."""
    if isinstance(value, Tensor):
        return copies[id(value)] if id(value) in copies else value.detach().clone()
    if isinstance(value, Mapping):
        return {k: copied(v, copies) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([copied(v, copies) for v in value])
    return value


def module_paths(model: nn.Module) -> dict[int, str]:
    """Each module's path in the model, by identity; the root's is empty."""
    return {id(m): name for name, m in model.named_modules()}


def _is_in(tensor: Tensor, out: object) -> bool:
    return any(t is tensor for t in tensors_in(out))
