"""Finds out where the bad value of a step came from: keeps references to its inputs, and runs it again if it is bad."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from trimtab.core.contain import Contained
from trimtab.core.journal import GAP
from trimtab.core.origin_notes import SENTENCE, is_bad, noted
from trimtab.core.types import Sample
from trimtab.guard.buffers import BufferShadow
from trimtab.sample.observed import Observed
from trimtab.sample.reduce import is_one_of_several
from trimtab.sample.watch import Step
from trimtab.torchutil.autograd_graph import keeps_tensors
from trimtab.trace.batch_rows import BatchRows, ids_in
from trimtab.trace.origin import NUM_NAMED, Origin
from trimtab.trace.source_lines import callers_tensors
from trimtab.trace.step_replay import ForwardCall, RandomState, Replay
from trimtab.trace.trace import Trace, trace
from trimtab.trace.values import bad_in, tensors_in

log = logging.getLogger("trimtab")
MAX_CALLS = 64
"""Calls of the model in one step whose inputs are held on to."""
MAX_TRACES = 10
"""Incidents that are all traced; of later ones the 100th, the 1000th, and so on: a trace costs a few steps."""
AVERAGED = {"ema_bad", "state_bad"}
"""Facts of what is made of weights and gradients: where those are fine, running the step again says nothing of it."""
LATER = "the step was run again with the weights of a later one"
_autocast_enabled = torch.is_autocast_enabled
_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr
Kept = Callable[[int, Trace, Replay], object]


@dataclass(slots=True)
class Past:
    """What is held of a step: what the model was called with, what was told, and the losses."""

    step: int
    calls: list[ForwardCall]
    batch: Any
    losses: list[Tensor | float]
    loss: Tensor | None


class Provenance:
    """What is known of the last steps, by reference only, and the traces made of bad ones."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        step_fn: Callable[[Any], Any] | None,
        observed: Observed,
        shadow: BufferShadow,
        loader: object,
        lag: int,
        contained: Contained,
        kept: Kept | None = None,
    ) -> None:
        self._model, self._optimizers, self._step_fn = model, list(optimizers), step_fn
        self._observed, self._shadow, self._loader, self._contained = observed, shadow, loader, contained
        self._kept = kept
        self._device = next((p.device.type for p in model.parameters()), "cpu")
        self._random = draws_numbers(model)
        self._calls: list[ForwardCall] = []
        self._batch: Any = None
        self._is_over = False
        self._steps: deque[Past] = deque(maxlen=lag + 1)
        self._holds_losses = None if lag else False  # None: not known yet
        self._held_on: int | None = None  # the stream of a device that losses are held of
        self._since: dict[str, int] = {}
        self._last_bad, self._incidents = -GAP - 1, 0

    # -- always on: references, nothing else -----------------------------------------------------------------------

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A root module is about to be called."""
        if self._is_over:
            self._calls, self._batch, self._is_over = [], None, False
            if self._held_on is not None and self._held_on != current_stream(self._device):
                self._let_go()
        if len(self._calls) >= MAX_CALLS:
            return
        device = self._device
        autocast = (device, torch.get_autocast_dtype(device)) if _autocast_enabled(device) else None
        random = random_state(self._device) if self._random else None
        self._calls.append(ForwardCall(module, args, kwargs, random, autocast, _sequence()))

    def _let_go(self) -> None:
        """Another stream begins: nodes of the old graph would be used again, and make the two wait for each other."""
        for past in self._steps:
            past.loss = None
        self._held_on = None

    def told(self, batch: object) -> None:
        """The loop told its batch."""
        self._batch = batch

    def step_done(self, step: int) -> None:
        """The step is over: what was called belongs to it."""
        loss = None if self._holds_losses is False else self._held_loss()
        self._steps.append(Past(step, self._calls, self._batch, self._observed.losses(), loss))
        self._is_over = True

    def _held_loss(self) -> Tensor | None:
        """The loss with its graph, where what is wrong with it is known only when the loop has made others.

        Its nodes are small once backward has freed what they saved; a graph that is kept whole is not held on to.
        """
        if (loss := self._observed.last_loss) is None:
            return None
        if self._holds_losses is None:
            self._holds_losses = not keeps_tensors(loss)
        if not self._holds_losses:
            return None
        self._held_on = current_stream(self._device)
        return loss

    def bad_sample(self) -> int:
        """The first sample with NaN or Inf in what the model was given in this step; -1 where it is not known."""
        found: int = self._contained.call("looking for a bad sample", self._bad_sample, default=-1)
        return found

    def _bad_sample(self) -> int:
        for call in self._calls:
            tensors = list(tensors_in((call.args, dict(call.kwargs))))
            rows = BatchRows(tensors)
            bad = (rows.of_leaf(t) for t in tensors if t.is_floating_point() and bad_in(t))
            if (first := next((samples[0] for samples in bad if samples), None)) is not None:
                return first
        return -1

    # -- a bad step ------------------------------------------------------------------------------------------------

    def look(self, step: Step) -> None:
        """Before the update, where the host knows already that the step is bad: everything is still as it was."""
        scalars = step.scalars
        loss, routine = scalars.get("loss"), scalars.get("routine_overflow")
        bad = bool(step.bad_buffers) or ("nonfinite_grads" in scalars and scalars["nonfinite_grads"] == 1.0)
        if (isinstance(loss, float) and not math.isfinite(loss)) or (bad and not routine):
            self._contained.call("tracing a bad step", self._look, step)

    def _look(self, step: Step) -> None:
        if self._is_news(step.number):
            now = Past(step.number, self._calls, self._batch, self._observed.losses(), self._observed.last_loss)
            replay = self._replay(now, self._shadow.before_step(), is_now=True)
            loss = step.scalars.get("loss")
            fine = loss is None or (isinstance(loss, float) and math.isfinite(loss))
            replay.may_be_the_loss = ("nonfinite_grads" in step.scalars or not fine) and not self._is_others(now)
            step.notes |= self._traced(step.number, replay)

    def explained(self, sample: Sample) -> Sample:
        """Afterwards, where it was not known before: on an accelerator, or if the update made the weights bad."""
        if SENTENCE in sample.notes or not is_bad(sample):
            return sample
        found: Sample = self._contained.call("tracing a bad step", self._explained, sample, default=sample)
        return found

    def _explained(self, sample: Sample) -> Sample:
        weights = sample.notes.get("weights_bad", ())
        for name in weights:
            self._since.setdefault(name, sample.step)
        known = next((s for s in self._steps if s.step == sample.step), None)
        if known is None or not self._is_news(sample.step):
            return sample
        found: Mapping[str, tuple[str, ...]] = {}
        gradients_fine = not sample.scalars.get("nonfinite_grads") and math.isfinite(sample.scalars.get("loss", 0.0))
        is_now = known is self._steps[-1]
        replay = self._replay(known, (), is_now=is_now)
        if weights and gradients_fine:
            found = self._kept_notes(sample.step, Trace(origin=self._of_update(weights[0], sample.step)), replay)
        elif not weights and not (gradients_fine and AVERAGED.intersection(sample.scalars)):
            replay.may_be_the_loss = not gradients_fine and not self._is_others(known)
            found = self._traced(sample.step, replay, note="" if is_now else LATER)
        return replace(sample, notes={**sample.notes, **found}) if found else sample

    def _is_others(self, past: Past) -> bool:
        """Whether the loss that is bad is another process's: this one's own are fine."""
        return is_one_of_several() and bool(past.losses) and all(math.isfinite(float(one)) for one in past.losses)

    def _of_update(self, name: str, step: int) -> Origin:
        kinds = sorted({type(one).__name__ for one in self._optimizers})
        return Origin(
            cause="optimizer",
            phase="optimizer",
            reason="bad-update",
            op=f"{' or '.join(kinds)}.step",
            subject=name,
            since=step,
            remedy="lower the learning rate; look at the optimizer's eps and its state",
        )

    def _is_news(self, step: int) -> bool:
        """Once per incident, and of very many incidents only some."""
        goes_on = step - self._last_bad <= GAP
        self._last_bad = max(step, self._last_bad)
        if goes_on:
            return False
        self._incidents += 1
        return self._incidents <= MAX_TRACES or str(self._incidents).rstrip("0") == "1"

    def _replay(self, past: Past, buffers: Sequence[tuple[Tensor, Tensor]], *, is_now: bool) -> Replay:
        """`is_now`: the loop is still in that step, and its variables are those of it."""
        loss = self._observed.last_loss if past.loss is None and is_now else past.loss
        losses = [float(one) for one in past.losses]
        bad = next((i for i, value in enumerate(losses) if not math.isfinite(value)), None)
        return Replay(
            model=self._model,
            calls=past.calls,
            step_fn=self._step_fn if past.batch is not None else None,
            batch=past.batch,
            buffers=buffers,
            loss=loss,
            dataset_indices=ids_in(past.batch) or self._drawn(),
            bad_loss=bad if len(losses) == len(past.calls) else None,
            data=callers_tensors() if is_now and self._step_fn is None else {},
            since=self._since,
            optimizers=self._optimizers,
        )

    def _traced(self, step: int, replay: Replay, note: str = "") -> Mapping[str, tuple[str, ...]]:
        found: Trace | None = self._contained.call("tracing a bad step", trace, replay)
        if found is None:
            return {}
        if found.origin is None:
            log.info("step %d: where its bad value came from is not known. %s", step, found.error)
            return {}
        if note:
            found = replace(found, origin=replace(found.origin, notes=(*found.origin.notes, note)))
        return self._kept_notes(step, found, replay)

    def _kept_notes(self, step: int, found: Trace, replay: Replay) -> Mapping[str, tuple[str, ...]]:
        if self._kept is not None:
            self._contained.call("keeping an incident", self._kept, step, found, replay)
        return {} if found.origin is None else notes_of(found.origin)

    def _drawn(self) -> list[Any]:
        drawn = getattr(self._loader, "last_ids", None)
        return list(drawn) if isinstance(drawn, Sequence) and not isinstance(drawn, str) else []


def notes_of(origin: Origin) -> dict[str, tuple[str, ...]]:
    """What a sample carries of an origin."""
    began_here = origin.cause not in ("input", "parameter")  # else the operation only passed it on
    subjects = [origin.subject, *((origin.module, origin.op) if began_here else ())]
    subjects += [note.split(",")[0].removeprefix("in ") for note in origin.notes if ", by " in note]  # autograd's node
    subjects += [f"sample {i}" for i in origin.samples[:NUM_NAMED]]
    # What to do about bad data the finding about it says by itself.
    remedy = "" if origin.cause == "input" else origin.remedy
    remedy = remedy[:1].upper() + remedy[1:] + "." if remedy else ""
    return noted(origin.sentence(), remedy, tuple(one for one in subjects if one))


def draws_numbers(model: nn.Module) -> bool:
    """Whether a model's forward pass draws random numbers, as far as its modules say."""
    for module in model.modules():
        if isinstance(module, nn.RReLU) or (isinstance(module, _DropoutNd) and module.p > 0):
            return True
        if any("drop" in name and isinstance(v, float) and v > 0 for name, v in vars(module).items()):
            return True
    return False


def current_stream(device: str) -> int | None:
    """What tells the stream apart that a CUDA device works on now; None elsewhere."""
    return torch.cuda.current_stream().cuda_stream if device == "cuda" else None


def random_state(device: str) -> RandomState:
    """Where the random numbers stand that a forward pass on this kind of device draws from."""
    state = RandomState(cpu=torch.get_rng_state())
    if device == "cuda" and not torch.cuda.is_current_stream_capturing():
        current = torch.cuda.current_device()
        state.cuda = {current: torch.cuda.get_rng_state(current)}
    return state
