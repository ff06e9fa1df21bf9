"""Everything beside the gradients that is looked at around one optimizer's step, gathered into its sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.contain import Contained
from trimtab.core.types import F32, Layout
from trimtab.sample.probes.activations import ActivationTap
from trimtab.sample.probes.batch import CHANCE_EVERY, Looks
from trimtab.sample.probes.forward import ForwardTap, inert
from trimtab.sample.probes.group_settings import told_by_settings
from trimtab.sample.probes.layer_gradients import LayerProbe
from trimtab.sample.probes.layer_inputs import LayerInputs
from trimtab.sample.probes.ledger import AveragedProbe, DelayedLedger, Ledger, Moved, is_plain
from trimtab.sample.probes.rounding import RoundingProbe
from trimtab.sample.probes.sentinel import Products, Sentinel
from trimtab.sample.probes.wiring import TemperatureProbe, Wiring, is_due
from trimtab.sample.rows import Rows, roots_of
from trimtab.sample.thorough import FullLook
from trimtab.sample.transfer import Arrivals, Later, Notes, Sent
from trimtab.torchutil.patch import own_hook

ALONE = 0.3
"""Share of a loss that may come from other micro-batches, or from rounding."""
NOW_AND_THEN = 10
"""Steps between two looks at what does not change from one step to the next; each probe says which of them it takes."""
LISTEN, LISTEN_EVERY, SPREAD_EVERY = 3, 20, 10
"""In which steps the scale and the sign of the loss are found out, from the gradient that comes back to the output."""


class Watch:
    """The probes of one lane. What concerns the whole model is looked at by the first lane alone."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        tap: ForwardTap,
        *,
        ema: object,
        optimizers: list[Any],
        first: bool,
        contained: Contained,
        activations: ActivationTap | None = None,
    ) -> None:
        self._optimizer, self._tap, self._contained = optimizer, tap, contained
        self._activations = activations if first else None
        self._sentinel = Sentinel(self._contained)
        self._ledger: Ledger | None = None
        self._delayed: DelayedLedger | None = None  # the same, of weights on a device
        self._away = self._on_gpu = False
        self._arrivals = Arrivals()
        self._rows: Rows | None = None
        self._wiring = Wiring(model, optimizers) if first else None
        self._averaged = AveragedProbe(ema) if first and ema is not None else None
        self._model = model if first else None  # until the inputs of its layers are looked at
        self._inputs: LayerInputs | None = None
        self._temperature: TemperatureProbe | None = None
        self._layers, self._rounding = LayerProbe((), ()), RoundingProbe(())
        self._has_float16 = self._has_bfloat16 = self._has_more = False
        self._heard = 0
        self._shared = False  # other processes may move the weights as well
        self._has_others = False  # whether the loss is made of more than what answers are compared by
        self._factor = 1.0  # of the loss, to a mean over answers, as it was heard last
        self._undo = [
            own_hook(one.register_load_state_dict_post_hook(_OnLoad(self))).remove  # type: ignore[no-untyped-call]
            for one in {id(m): m for m in (model, *roots_of(model))}.values()
        ]

    def prepare(self, rows: Rows) -> None:
        """Find out, before the first step, what it would have to find out otherwise."""
        self._forget(rows)
        if self._ledger is not None:
            self._ledger.prepare()
        if self._wiring is not None:
            self._wiring.find(rows)

    def before(self, step: Step, rows: Rows, scale: float | Tensor | None) -> None:
        """Before the gradients are measured and changed."""
        if rows is not self._rows:
            self._forget(rows)
        facts, tap, number = step.scalars, self._tap, step.number
        facts.update(tap.take())
        facts.update(tap.batch.take())
        if tap.output.has_news:
            facts.update(tap.output.take())
        if self._away:
            self._await(step)
        if (
            number % CHANCE_EVERY == 0
            and "chance" not in facts
            and tap.batch.loss_kind == "nll"
            and tap.num_choices > 1
        ):
            facts["chance"] = math.log(tap.num_choices)  # no targets were told: any answer is as likely
        if "chance" in facts and step.pending is None:
            self._scale_chance(facts)
        if heard := self._sentinel.before(number, 1.0 if scale is None else scale):
            facts.update(heard)
            step.products = self._sentinel.take_products()
            if step.pending is not None:
                step.pending.later += self._sentinel.take_later()
            if facts.get("carried") == 0.0:
                del facts["carried"]  # nothing was: not worth a line in the record, nor a question to a rule
        if scale is None and facts.get("autocast") == 0.0:
            del facts["autocast"]
        if self._ledger is not None:
            found = self._ledger.before()
            if found[0]:
                _merge(step, found)
        if number % NOW_AND_THEN == 0 or number < NOW_AND_THEN:
            self._look_now_and_then(step, rows)
        if step.cadence:
            facts.update(told_by_settings(self._optimizer))
        if self._inputs is not None:
            self._look_at_inputs(step, self._inputs)
        if self._has_more:
            self._look_at_more(step)
        if (factor := facts.get("loss_factor")) is not None and self._optimizer.param_groups[0].get("maximize"):
            facts["loss_factor"] = factor = -factor
        if isinstance(factor, float):
            self._hear_factor(factor, step.loss)
        if "backwards" in facts:
            several = facts["backwards"]
            self._heard += isinstance(several, float) and several > 1
        # The next step's forwards: the first ones, the first that add up several, and now and then.
        coming = number + 1
        listen = number < LISTEN or coming % LISTEN_EVERY == 0 or 0 < self._heard < LISTEN
        spread = number == 0 or coming % SPREAD_EVERY == 0
        if listen or spread or tap.looks_at_output:
            tap.look_at_output(listen=listen, spread=spread)

    def _look_now_and_then(self, step: Step, rows: Rows) -> None:
        """What is looked at in the first steps, and then in one of ten."""
        number = step.number
        if self._wiring is not None and is_due(number):
            _merge(step, self._wiring.look(number, rows))
            _merge(step, self._tap.modes())
        if self._layers.is_due(number):
            _merge(step, self._layers.look(number))
        if not self._away or step.pending is not None:
            self._look_at_rounding(step)

    def after(self, step: Step, rows: Rows) -> None:
        """After the step."""
        if not self._sentinel.chosen:
            self._sentinel.choose(rows.params)
        self._sentinel.after()
        if self._ledger is not None:
            facts, notes = self._ledger.after()
            step.scalars.update(facts)
            if notes:
                step.notes |= notes
            if self._ledger.due:
                self._lag(step, self._ledger)
        if step.number % NOW_AND_THEN == 0 and self._rounding.is_due(step.number):
            found, later = self._rounding.after()
            step.scalars.update(found)
            if later is not None and step.pending is not None:
                step.pending.later.append(later)
        if step.pending is not None:
            self._send_off(step, step.pending, rows)
        if self._model is not None:
            # Now that a compiler has seen the model as it is: hooks that come later leave its code alone.
            self._inputs, self._model = LayerInputs(self._model, self._contained), None

    def _scale_chance(self, facts: dict[str, Any]) -> None:
        if self._has_others or self._shared:
            del facts["chance"]  # there is more in the loss than the answers, or others move the weights, too
        elif self._factor != 1.0:
            facts["chance"] *= self._factor  # of a loss that was divided for accumulation, or summed up

    def _hear_factor(self, factor: float, loss: object) -> None:
        self._factor = abs(factor) if not 0.85 < abs(factor) < 1.18 else 1.0
        if (answer_loss := self._tap.output.answer_loss) is not None and isinstance(loss, float):
            self._has_others = not abs(loss - self._factor * answer_loss) <= ALONE * abs(loss)

    def _send_off(self, step: Step, pending: Pending, rows: Rows) -> None:
        """Everything is on its way: it is looked at when the step is due."""
        pending.lead = step.lead
        if pending.looks is not None and step.lead is None:
            pending.looks = self._tap.batch.settled(pending.looks)
        if self._delayed is not None:
            pending.ledger, pending.moved = self._delayed, self._delayed.after()
        if self._on_gpu:
            pending.arrival = self._arrivals.note(rows.params[0].device)

    def arrived(self, pending: Pending, facts: dict[str, float], notes: Notes) -> None:
        """What a step sent is here: add what it says."""
        if pending.arrival is not None:
            self._arrivals.hand_back(pending.arrival)
        for add in pending.later:
            try:
                add(facts, notes)
            except Exception as error:
                self._contained.report(ARRIVED, error)
        try:
            if pending.looks is not None:
                lead = None if pending.lead is None else pending.lead.lead()
                self._tap.batch.arrived(pending.looks, lead, facts, notes)
        except Exception as error:
            self._contained.report(ARRIVED, error)
        try:
            if pending.ledger is not None and pending.moved is not None:
                pending.ledger.arrived(pending.moved, facts, notes)
        except Exception as error:
            self._contained.report(ARRIVED, error)
        # As on the host: the factor that earlier steps told counts for this one, and its own for the next.
        if "chance" in facts:
            self._scale_chance(facts)
        if (factor := facts.get("loss_factor")) is not None:
            self._hear_factor(factor, facts.get("loss"))

    def _await(self, step: Step) -> None:
        """What probes sent to the host of things on a device: it is looked at when the step is due."""
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            return
        batch, output = self._tap.batch, self._tap.output
        pending = step.pending = Pending(self)
        if output.waits:  # before the batch: what answers were compared with counts where no targets are told
            later = output.delayed(climbs=self._optimizer.param_groups[0].get("maximize", False))
            if later is not None:
                pending.later.append(later)
        if batch.waits:
            pending.looks = batch.delayed()
        if self._delayed is not None:
            step.read_before = self._delayed.before(step.scalars)
        if self._temperature is not None and (later := self._temperature.delayed(step.number)) is not None:
            pending.later.append(later)
        if self._layers.is_due(step.number) and (later := self._layers.delayed(step.number)) is not None:
            pending.later.append(later)
        if self._averaged is not None and (later := self._averaged.delayed()) is not None:
            pending.later.append(later)

    def _look_at_more(self, step: Step) -> None:
        """What only some models have."""
        if self._temperature is not None:
            _merge(step, self._temperature.look(step.number))
        if self._activations is not None:
            _merge(step, self._activations.take())
        if self._has_float16:
            step.scalars["float16"] = 1.0
        if self._has_bfloat16:
            step.scalars["bfloat16"] = 1.0
        if self._averaged is not None:
            _merge(step, self._averaged.look())

    def _look_at_inputs(self, step: Step, inputs: LayerInputs) -> None:
        facts, notes, later = inputs.step_done()
        _merge(step, (facts, notes))
        if later is not None and step.pending is not None:
            step.pending.later.append(later)
        if inputs.over:
            self._inputs = None

    def _look_at_rounding(self, step: Step) -> None:
        if self._rounding.is_due(step.number):
            self._rounding.before()
        if not self._rounding.looks_at_digits(step.number):
            return
        found, later = self._rounding.digits()
        step.scalars.update(found)
        if later is not None and step.pending is not None:
            step.pending.later.append(later)

    def _lag(self, step: Step, ledger: Ledger) -> None:
        """How far this gradient is above what Adam expects of it: the second moment lags behind a burst."""
        norm, expected = step.scalars.get("grad_norm"), ledger.second_moment()
        if isinstance(norm, float) and expected is not None and expected > 0:
            step.scalars["moment_lag"] = norm / math.sqrt(expected)

    def _forget(self, rows: Rows) -> None:
        """The parameters have changed: start over."""
        self._rows = rows
        self._sentinel.remove()
        self._sentinel = Sentinel(self._contained)
        for known in (self._ledger, self._delayed):
            if known is not None:
                known.remove()
        # What lies in shared memory other processes may move as well (hogwild): who did cannot be told.
        alone = not rows.on_host or not any(p.is_shared() for p in rows.params)  # type: ignore[no-untyped-call]
        self._shared = not alone
        readable = alone and any(p.numel() and is_plain(p) for p in rows.params)
        ledger = Ledger(self._optimizer, rows.names, rows.params, self._contained) if readable else None
        self._ledger, self._delayed = (ledger, None) if rows.on_host else (None, None)
        devices = {p.device for p in rows.params}
        self._away, self._on_gpu = not rows.on_host, any(d.type == "cuda" for d in devices)
        if self._away and ledger is not None and len(devices) == 1:  # what is on several cannot be read at once
            self._delayed = DelayedLedger(ledger)
        self._layers, self._rounding = LayerProbe(rows.names, rows.params), RoundingProbe(rows.params)
        temperature = TemperatureProbe(rows.names, rows.params)
        self._temperature = temperature if temperature.found else None
        kinds = {p.dtype for p in rows.params}
        self._has_float16, self._has_bfloat16 = torch.float16 in kinds, torch.bfloat16 in kinds
        more = self._temperature, self._activations, self._averaged
        self._has_more = self._has_float16 or self._has_bfloat16 or any(probe is not None for probe in more)

    def renew(self) -> None:
        """Other weights were put in place on purpose: loaded, or gone back to."""
        for known in (self._ledger, self._delayed):
            if known is not None:
                known.declare()

    def loaded(self) -> None:
        """The same, from a hook inside the user's own call."""
        self._contained.call("noting loaded weights", self.renew)

    def remove(self) -> None:
        """Take every hook off."""
        self._sentinel.remove()
        if self._inputs is not None:
            self._inputs.remove()
        for known in (self._ledger, self._delayed):
            if known is not None:
                known.remove()
        for undo in self._undo:
            undo()
        self._undo.clear()


class _OnLoad:
    """Tells a watch that weights were loaded; a copied model carries only an inert stand-in."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, module: nn.Module, incompatible: object) -> None:
        self._watch.loaded()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return inert()


def _merge(step: Step, found: tuple[Mapping[str, float | Tensor], dict[str, tuple[str, ...]]]) -> None:
    if found[0]:
        step.scalars |= found[0]
    if found[1]:
        step.notes |= found[1]


ARRIVED = "looking at what a device sent"


class Pending:
    """What the probes of one step sent to the host: called, it adds what that says to the facts of the step."""

    __slots__ = ("_watch", "arrival", "later", "lead", "ledger", "looks", "moved")

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.later: list[Later] = []
        self.looks: Looks | None = None
        self.lead: Sent | None = None
        self.ledger: DelayedLedger | None = None
        self.moved: Moved | None = None
        self.arrival: torch.cuda.Event | None = None  # when all of that is there

    def __call__(self, facts: dict[str, float], notes: Notes) -> None:
        """When the step is due."""
        self._watch.arrived(self, facts, notes)


NO_TABLE = torch.zeros(0, 1, dtype=torch.float32, device="cpu")


@dataclass(slots=True)
class Step:
    """One attempted optimizer step, from its gradients to its sample."""

    number: int
    cadence: bool
    layout: Layout
    loss: Tensor | float | None
    scalars: dict[str, float | Tensor]
    table: Tensor | F32 | Sent = NO_TABLE
    least_norm: float | None = None  # where the table is on the host, with a gradient in every row
    device_names: tuple[str, ...] = ()  # of the values that stand behind the table in one device buffer
    look: FullLook | None = None
    withheld: Any = None
    rejected: bool = False
    bad_buffers: list[tuple[int, int]] = field(default_factory=list)
    undo_flag: Tensor | None = None  # set where the device decides: the host does not know yet
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    frozen: tuple[int, ...] = ()
    multiplied: bool = False  # its learning rates are cut or limited
    products: Products | None = None  # still to be computed, on the device
    captured: bool = False  # recorded into a CUDA graph: there is nobody to tell
    pending: Pending | None = None  # what probes sent to the host of things on a device
    lead: Sent | None = None  # with this comes the beginning of the batch that was held
    read_before: Callable[[], None] | None = None  # still to be launched, before the step
    unseen: bool = False  # looking at it failed: other processes are told that nothing is known of its batch
    shared: bool = False  # other processes were told of it, and it of theirs
    bad_sample: int = -1  # the first sample of the batch that holds NaN or Inf, where others want to know
    batch_print: float = -1.0  # of a batch of its own, for the same reason
    checksum: float = -1.0  # of weights that others should have as well, in the steps in which they are compared
    late_s: float = 0.0  # until its first forward pass began
    spent_s: float = 0.0  # until its gradients were there
