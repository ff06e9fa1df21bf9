"""Runs a step again and says where its first bad value came from: operation, line, module, reason, samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.trace.batch_rows import BatchRows, ids_in, sample_lists
from trimtab.trace.loss_rebuild import (
    BY_NAME,
    LEFT_OUT,
    LossGraph,
    Rebuilt,
    Span,
    calls_behind,
    is_fragile,
    is_loss,
    op_named,
    suspects,
)
from trimtab.trace.op_watch import Call, Event, Leaf, OpWatch, storage_of
from trimtab.trace.origin import Cause, Operand, Origin, Phase
from trimtab.trace.reasons import (
    BAD_INPUT,
    BAD_PARAMETER,
    BAD_UPDATE,
    MASK_REACHED,
    UNKNOWN,
    Failure,
    Reason,
    reason_of,
)
from trimtab.trace.step_replay import (
    AtBackward,
    Buffers,
    ForwardCall,
    Replay,
    cannot_run,
    has_compiled_parts,
    innermost,
    run_call,
    run_forward,
    undisturbed,
    without_backward,
)
from trimtab.trace.values import bad_in, described, is_mask, named_tensors, tensors_in

ANY_GRADIENT = "the gradient of the model's output is not known: one of ordinary size was used"


class BatchTensors(dict[str, Tensor]):
    """The tensors of a batch by the names that the user knows them by, and its lists with one entry per sample."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], lists: Sequence[list[Any]] = ()) -> None:
        super().__init__(tensors)
        self.lists = list(lists)

    def rows(self) -> BatchRows:
        """Where the samples lie in them."""
        return BatchRows(self, self.lists)


Names = dict[int, tuple[str, str, Tensor]]
"""By storage: what kind of tensor it is (parameter, buffer, input), its name, and itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingOp:
    """The operation that failed, with its operands on the CPU: enough to make the bad value again."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What running a step again brought to light. `error` says why where that failed, or found nothing."""

    origin: Origin | None = None
    failing: FailingOp | None = None
    seconds: float = 0.0
    error: str = ""


@dataclass(slots=True)
class _Outcome:
    """What a run gave: the loss or the outputs, then gradients, then what it may have written to."""

    outputs: list[Tensor]
    gradients: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)

    def bad_part(self) -> list[Tensor]:
        """The first part that is bad: what comes later is a consequence."""
        for part in (self.outputs, self.gradients, self.states):
            if any(bad_in(t) for t in part):
                return part
        return []


def trace_call(fn: Callable[[], Any], *, model: nn.Module | None = None, batch: Any = None) -> Trace:
    """Run `fn` (forward, loss, backward) once, and say where the first bad value in its loss or gradients came from.

    Nothing is changed by it: weights, gradients, buffers, modes and random numbers are bit-identical afterwards. With
    `model` modules are named, with `batch` samples.

    Example:
        >>> x = torch.tensor([1.0, 0.0, 2.0])
        >>> origin = trace_call(lambda: x.log().sum(), batch=x).origin
        >>> origin.op, origin.reason, origin.samples
        ('aten.log.default', 'log-of-zero', (1,))
    """
    return _timed(lambda: _traced_function(fn, model, batch))


def trace(replay: Replay) -> Trace:
    """Run a recorded step again: as a whole where it has a `step_fn`, else call by call.

    Example:
        >>> layer = torch.nn.LogSigmoid()
        >>> call = ForwardCall(layer, (torch.tensor([1.0, float("nan")]),), {})
        >>> trace(Replay(layer, [call])).origin.cause
        'input'
    """
    return _timed(lambda: _traced_replay(replay))


def _timed(run: Callable[[], Trace]) -> Trace:
    began = time.perf_counter()
    try:
        result = run()
    except Exception as error:  # what goes wrong here must not stop the training
        result = Trace(error=f"the step could not be run again: {type(error).__name__}: {error}")
    return replace(result, seconds=time.perf_counter() - began)


def _traced_replay(replay: Replay) -> Trace:
    if why := cannot_run(replay.model):
        return _only_data(replay, f"the step cannot be run again here: {why}")
    alone = _rank() is None
    if replay.step_fn is not None and alone:
        step_fn, batch = replay.step_fn, replay.batch
        if batch is None and len(replay.calls) == 1:
            batch = list(replay.calls[0].args)
        return _traced_function(lambda: step_fn(batch), replay.model, batch, replay, step_fn)
    return _traced_calls(replay)


def _only_data(replay: Replay, why_no_more: str) -> Trace:
    """Where nothing can be run: bad values in the batch are seen without that."""
    for i, call in enumerate(replay.calls):
        if (origin := bad_data(data_of(replay, call))) is not None:
            return Trace(origin=replace(origin, micro_batch=i if len(replay.calls) > 1 else None))
    return Trace(error=why_no_more)


# -- a function that runs the whole step ----------------------------------------------------------------------------


def _traced_function(
    fn: Callable[[], Any],
    model: nn.Module | None,
    batch: Any,
    replay: Replay | None = None,
    remembered: object = None,
) -> Trace:
    batch = held_by(fn) if batch is None else batch
    states = [] if model is None else [*model.buffers(), *model.parameters()]
    buffers: Buffers = () if replay is None else replay.buffers
    random = replay.calls[0].random if replay is not None and replay.calls else None
    fine_before = [not bad_in(t) for t in states]

    optimizers = () if replay is None else replay.optimizers
    with undisturbed(model, remembered or fn, optimizers=optimizers, batch=batch) as undo:

        def begin() -> None:
            undo()
            write(buffers)
            if random is not None:
                random.put_back()

        def run(*, backward: bool = True) -> _Outcome:
            try:
                with without_backward(skip=not backward):
                    out = fn()
            except AtBackward as stopped:
                return _Outcome(stopped.losses)
            grads = [] if model is None else [p.grad for p in model.parameters() if p.grad is not None]
            changed = [t for t, fine in zip(states, fine_before, strict=True) if fine]
            return _Outcome([t.detach() for t in tensors_in(out)], grads, changed)

        search = _Search(run, begin, model, batch, replay)
        return search.find()


# -- recorded calls of the root module ------------------------------------------------------------------------------


def _traced_calls(replay: Replay) -> Trace:
    order = list(range(len(replay.calls)))
    if replay.bad_loss in order:
        order.insert(0, order.pop(order.index(replay.bad_loss)))
    if not order:
        return Trace(error="the inputs of the step are not known: the model was not called under the guard")
    inputs = [(call.args, dict(call.kwargs)) for call in replay.calls]
    together = calls_behind(replay.loss, replay.calls) or {len(order) - 1}
    with undisturbed(replay.model, batch=(inputs, replay.batch, replay.data)) as undo:
        for i in order:
            before = [replay.calls[k] for k in sorted(together) if k < i] if i == max(together) else []
            found = _traced_call(replay, replay.calls[i], undo, before)
            if found.origin is not None:
                micro = _micro_batch(i, len(together), len(replay.calls))
                return replace(found, origin=replace(found.origin, micro_batch=micro))
            if found.error:
                return found
    return Trace()


def _micro_batch(call: int, calls_per_loss: int, num_calls: int) -> int | None:
    """Which micro-batch a call belongs to; None where there is only one, or no telling."""
    if num_calls <= calls_per_loss or num_calls % calls_per_loss:
        return None
    return call // calls_per_loss


def data_of(replay: Replay, call: ForwardCall, before: Sequence[ForwardCall] = ()) -> BatchTensors:
    """The tensors of a call's batch, by name: its inputs, and of what else is known that which has as many samples.

    `before` are calls whose outputs the same loss is made of.
    """
    single = len(call.args) == 1
    inputs = [n for i, a in enumerate(call.args) for n in named_tensors(a, "the input" if single else f"input {i}")]
    inputs += [n for key, value in call.kwargs.items() for n in named_tensors(value, f"the input {key}")]
    size = BatchRows([t for _, t in inputs]).size
    own = {storage_of(t) for t in (*replay.model.parameters(), *replay.model.buffers())}
    known = {storage_of(t) for _, t in inputs} | own
    others = [*named_tensors(replay.batch, "batch"), *replay.data.items()]
    for i, one in enumerate(before):
        others += named_tensors((one.args, dict(one.kwargs)), f"the inputs of call {i}")
    others = [(n, t) for n, t in others if t.dim() and t.shape[0] == size and storage_of(t) not in known]
    lists = sample_lists((call.args, dict(call.kwargs)))
    return BatchTensors((*inputs, *(others if call is replay.calls[-1] else ())), lists)


def bad_data(batch: BatchTensors) -> Origin | None:
    """A tensor of the batch that is bad, where nothing in the model is."""
    rows = batch.rows()
    for name, tensor in batch.items():
        if bad_in(tensor) and not is_mask(tensor):
            return Origin(
                cause="input",
                reason=BAD_INPUT.name,
                why=BAD_INPUT.words,
                remedy=BAD_INPUT.remedy,
                subject=name,
                samples=rows.of_leaf(tensor),
                rank=_rank(),
            )
    return None


def _traced_call(
    replay: Replay, call: ForwardCall, undo: Callable[[], None], before: Sequence[ForwardCall] = ()
) -> Trace:
    made = Rebuilt()
    batch = data_of(replay, call, before)
    data = list(batch.values())
    spans: list[Span] = []

    def begin() -> None:
        undo()
        write(replay.buffers)

    def loss_of(outputs: list[Tensor], num: int) -> Tensor | None:
        nonlocal made
        known = replay.loss is not None and replay.loss.grad_fn is not None and call is replay.calls[-1]
        if not known or replay.loss is None or any(bad_in(t) for t in outputs):
            return None
        made = LossGraph(replay.loss, [*spans, Span(call.sequence, num, outputs)], data).rebuild()
        return made.loss

    def run(*, backward: bool = True) -> _Outcome:
        spans[:] = [Span(one.sequence, num, outputs) for one in before for outputs, num in (run_forward(one),)]
        outputs, gradients = run_call(call, loss_of, [one.module for one in before])
        outcome = _Outcome(outputs)
        if backward and not outcome.bad_part():
            outcome.gradients = gradients()
        return outcome

    search = _Search(run, begin, replay.model, batch, replay)
    search.notes += innermost(call.module)[1]
    found = search.find(lambda: LEFT_OUT if made.left_out else "" if made.loss is not None else ANY_GRADIENT)
    if found.origin is None and not found.error and call is replay.calls[-1]:
        fine = replay.loss is not None and not bad_in(replay.loss)
        named = by_name(made, "backward" if fine else "forward") if replay.may_be_the_loss else None
        return replace(found, origin=bad_data(batch) or named)
    return found


def by_name(made: Rebuilt, phase: Phase = "forward") -> Origin | None:
    """What is left where the model and the known part of the loss are fine: an operation of the rest of the loss."""
    for node in suspects(made):
        if node.startswith("NllLoss"):
            why, remedy = (
                "most likely every target of the batch is ignored",
                "skip batches without a target that counts",
            )
        elif node.startswith("CtcLoss"):
            why = "most likely a target is longer than its input"
            remedy = "use zero_infinity=True, or leave out samples whose target does not fit"
        elif is_loss(node):
            why, remedy = "most likely the targets hold NaN or Inf", BAD_INPUT.remedy
        elif is_fragile(node):
            why = "most likely, as everything else of the step that can be run again is fine"
            remedy = "look at what this operation of the loss is given: a 0, or a number that is too large"
        else:
            why = "most likely it was given a bad value: all else of the step that can be run again is fine"
            remedy = "look at what goes into the loss beside the model's output: targets, masks, weights, constants"
        return Origin(
            cause="loss",
            reason="bad-result",
            why=why,
            remedy=remedy,
            op=op_named(node),
            phase=phase,
            rank=_rank(),
            notes=(f"in {node}, by {op_named(node)}", BY_NAME),
        )
    return None


def write(values: Buffers) -> None:
    """Give buffers the values they had before the step."""
    with torch.no_grad():
        for tensor, value in values:
            tensor.data.copy_(value)


# -- the search -----------------------------------------------------------------------------------------------------


class _Search:
    """Runs a step once under the watch, then as often as needed to find the samples."""

    def __init__(
        self,
        run: Callable[..., _Outcome],
        begin: Callable[[], None],
        model: nn.Module | None,
        batch: Any,
        replay: Replay | None,
    ) -> None:
        self._run, self._begin, self._model, self._batch, self._replay = run, begin, model, batch, replay
        self._names = names_of(model, batch)
        self.notes: list[str] = []
        self.remark = ""

    def find(self, remark: Callable[[], str] = lambda: "") -> Trace:
        """`remark` says, after the run, what has to be said of it."""
        watch, failed = OpWatch(self._model), ""
        self._begin()
        found: Event | Leaf | None = None
        try:
            with watch:
                outcome = self._run()
            self.remark = remark()
            part = outcome.bad_part()
            if part:
                found = watch.origin_of(part, loss_is_fine=part is outcome.gradients)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
            last = watch.last_bad()
            if last is None:
                raise
            found = watch.origin_from(last)
            self.notes.append(f"the step ended with {failed}")
        if found is None:
            return Trace()
        if self._model is not None and has_compiled_parts(self._model):
            self.notes.append("compiled modules were replayed as the eager ones")
        first = watch.first_use(found) if isinstance(found, Leaf) else None
        origin = self._of_leaf(found, first) if isinstance(found, Leaf) else self._of_event(found)
        origin = replace(origin, micro_batch=self._micro_batch(first if isinstance(found, Leaf) else found, watch))
        origin = self._with_samples(origin, found, first)
        return Trace(origin=origin, failing=None if isinstance(found, Leaf) else failing_op(found))

    def _of_event(self, event: Event) -> Origin:
        place = event.forward or event.call
        own = event.phase == "backward" and event.call.line is not None
        failure = failure_of(event, own_backward=own)
        reason = reason_of(failure) if failure is not None else UNKNOWN
        if reason is UNKNOWN and event.on_purpose:
            reason = MASK_REACHED
        if event.phase == "optimizer":
            reason = BAD_UPDATE if reason.name == "bad-result" else reason
        shown = Call(place.op, place.module, event.call.line) if own else place
        return Origin(
            cause=self._cause(event, shown, reason),
            reason=reason.name,
            why=reason.words,
            remedy=reason.remedy,
            op=event.name if own else shown.op,
            phase=_phase(event),
            **_position(shown),
            subject=self._names.get(event.storage, ("", "", None))[1] if event.phase == "optimizer" else "",
            operands=operands_of(event),
            rank=_rank(),
            notes=self._all_notes(event),
        )

    def _micro_batch(self, event: Event | None, watch: OpWatch) -> int | None:
        """Which one the event belongs to, where the step has several: known to be so, or seen in the replay."""
        if event is None or not watch.micro_batch:
            return None
        return (event.forward or event.call).micro_batch

    def _all_notes(self, event: Event) -> tuple[str, ...]:
        notes = [*self.notes, *event.notes]
        if event.phase == "backward":
            notes.append(f"in {event.node}, by {event.name}")
        if self.remark and (event.phase == "backward" or event.call.module is None):
            notes.append(self.remark)
        return tuple(notes)

    def _cause(self, event: Event, place: Call, reason: Reason) -> Cause:
        if event.phase == "optimizer":
            return "optimizer"
        if reason.name == "dtype-overflow":
            return "overflow"
        outside = (
            self._model is not None and place.module is None and not (event.phase == "backward" and not event.forward)
        )
        return "loss" if outside else "op"

    def _of_leaf(self, leaf: Leaf, first: Event | None) -> Origin:
        kind, name, _ = self._names.get(leaf.storage, ("input", "a tensor from outside of the step", leaf.tensor))
        cause: Cause = "input" if kind == "input" else "parameter"
        reason = BAD_INPUT if kind == "input" else BAD_PARAMETER
        place = Call("", None, None) if first is None else first.forward or first.call
        since = None if self._replay is None else self._replay.since.get(name)
        return Origin(
            cause=cause,
            reason=reason.name,
            why=reason.words,
            remedy=reason.remedy,
            op=place.op,
            phase="forward" if first is None else _phase(first),
            **_position(place),
            subject=name,
            since=since,
            operands=() if first is None else operands_of(first),
            rank=_rank(),
            notes=tuple(self.notes),
        )

    # -- samples --------------------------------------------------------------------------------------------------

    def _with_samples(self, origin: Origin, found: Event | Leaf, first: Event | None) -> Origin:
        rows = self._batch.rows() if isinstance(self._batch, BatchTensors) else BatchRows(self._batch)
        samples: tuple[int, ...] = ()
        if isinstance(found, Leaf):
            known = self._names.get(found.storage)
            if origin.cause == "input":
                tensor = found.tensor if known is None else known[2]
                samples = (BatchRows(tensor) if known is None or rows.size < 1 else rows).of_leaf(tensor)
            elif first is not None and first.result is not None and rows.size > 1:  # a bad row of an embedding
                guesses = list(rows.guesses(first.result))
                samples, _ = rows.culprits(guesses, self._begin, lambda: self._is_good("forward"), bisect=False)
        elif origin.phase != "optimizer" and rows.size > 1:
            guesses = [] if found.result is None else list(rows.guesses(found.result))
            samples, _ = rows.culprits(guesses, self._begin, lambda: self._is_good(origin.phase))
        self._begin()
        return replace(origin, samples=samples, dataset_indices=self._indices(samples))

    def _is_good(self, phase: Phase) -> bool:
        for backward in (phase == "backward", True):
            try:
                return not self._run(backward=backward).bad_part()
            except Exception:  # a step may be unable to go on without its gradients
                if backward:
                    return False
        return False

    def _indices(self, samples: Sequence[int]) -> tuple[int, ...]:
        known = ids_in(self._batch) if self._replay is None or not self._replay.dataset_indices else []
        ids = known or ([] if self._replay is None else list(self._replay.dataset_indices))
        if not all(i < len(ids) and isinstance(ids[i], int) for i in samples):
            return ()
        return tuple(int(ids[i]) for i in samples)


# -- parts ----------------------------------------------------------------------------------------------------------


def _phase(event: Event) -> Phase:
    return "backward" if event.phase == "backward" else "optimizer" if event.phase == "optimizer" else "forward"


def _position(call: Call) -> dict[str, Any]:
    line = call.line
    where: dict[str, Any] = {"module": cleaned(call.module or "")}
    if line is not None:
        where |= {"file": line.file, "line": line.number, "code": line.text, "function": line.function}
    return where


def cleaned(path: str) -> str:
    """A module's path as the user wrote it, without what a wrapper put in.

    Example:
        >>> cleaned("module._orig_mod.encoder.0")
        'encoder.0'
    """
    parts = [part for part in path.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module")]
    return ".".join(parts[1:] if parts and parts[0] == "module" else parts)


def failure_of(event: Event, *, own_backward: bool = False) -> Failure | None:
    """What the reasons are tested on; None where the operands were not kept."""
    if event.kept is None:
        return None
    return Failure(
        op=event.op,
        args=event.kept.args,
        kwargs=event.kept.kwargs,
        result=event.result,
        forward_op=event.forward.op if event.forward is not None else "",
        node=event.node if event.phase == "backward" else "",
        makers=event.makers,
        absorbed=any(isinstance(s, Event) and s.phase == "forward" for s in event.sources),
        own_backward=own_backward,
    )


def operands_of(event: Event) -> tuple[Operand, ...]:
    """The figures of every operand of an operation."""
    kept = event.kept
    if kept is None:
        return ()
    named = [*zip(kept.names, kept.args, strict=False), *kept.kwargs.items()]
    return tuple(described(name, value) for name, value in _flat(named))


def _flat(named: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in named:
        if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
            yield from ((f"{name}[{i}]", v) for i, v in enumerate(value))
        else:
            yield name, value


def failing_op(event: Event) -> FailingOp | None:
    """The operation and its operands, on the CPU."""
    if event.kept is None:
        return None
    args, kwargs = _on_cpu(event.kept.args), _on_cpu(event.kept.kwargs)
    return FailingOp(op=event.name, args=args, kwargs=kwargs, output_index=event.result_index)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {k: _on_cpu(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_on_cpu(v) for v in value])
    return torch.device("cpu") if isinstance(value, torch.device) else value


def names_of(model: nn.Module | None, batch: Any) -> Names:
    """What tensors that come from outside of a step are called."""
    found: Names = {}
    for name, t in batch.items() if isinstance(batch, BatchTensors) else named_tensors(batch, "batch"):
        found[storage_of(t)] = "input", name, t
    for kind, named in (
        () if model is None else (("buffer", model.named_buffers()), ("parameter", model.named_parameters()))
    ):
        for name, t in named:
            found[storage_of(t)] = kind, cleaned(name), t
    return found


def held_by(fn: Any) -> list[Any]:
    """The tensors, alone or in tuples, lists and dicts, that a function takes along: most likely its batch."""
    cells = getattr(fn, "__closure__", None) or ()
    held = []
    for cell in cells:
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        if isinstance(value, Tensor | list | tuple | Mapping):
            held += [t for t in tensors_in(value) if not t.requires_grad and not isinstance(t, nn.Parameter)]
    return held


def _rank() -> int | None:
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return int(dist.get_rank())
    return None
