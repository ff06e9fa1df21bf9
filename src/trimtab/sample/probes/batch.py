"""The data of a step in a few numbers: size, spread, a fingerprint, and what is plainly wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import sqrt
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.sample.measure.native import native
from trimtab.sample.probes.answers import Answers
from trimtab.sample.transfer import Copies, Later, Notes, is_here, to_host

SLICE = 2048
"""Leading elements that stand for a tensor in its fingerprint and spread."""
LARGE = 1 << 20
"""Elements of a tensor that are searched for NaN and Inf in every step."""
MAX_CLASSES = 4096
MIN_LABELS = 8
MIN_HEARD = 16
"""Labels of a batch that are compared with each other."""
MIN_ROWS = 4
MARKED = 512
WORDS = 1024
"""Words of 4 bytes that so many elements have at most."""
MIN_KEYS, KEY_COLUMNS, MIN_DIFFERENT = 8, 64, 2
"""Samples of a batch that are compared with each other, by so many of their last numbers; those that differ."""
REPEATED, KNOWN, NUM_EARLIER = 0.5, 0.3, 4
"""Share of a batch that stands in it already; of its samples that are in one of so many batches before."""
ROWS_EVERY = 20
MIN_TARGETS = 256
CHANCE_EVERY = 5
NUM_TENSORS = 8
HELD_BACK = "in_values"
"""Under this name a batch on a device is handed on: it is looked at together with the gradients."""
MAX_HELD = 1 << 26
"""Bytes up to which a batch is kept from the forward to the step."""
MAX_SENT = 1 << 14
"""Elements of float targets on a device that are sent to the host: whole rows, as many as fit."""
MAX_WAITING = 64
"""Forwards and targets on a device that are remembered for the next step, if there is one."""
FEW = 4
"""Different batches up to which it is asked whether they are all the data there are."""
FIRST = 4
"""Batches at first, on a device, whose samples are compared with each other whatever they begin with."""
MORE_BAD, SAME_ROWS = "in_bad/more", "in_flat/rows"
"""What a device counts beside what its kernels look at: further tensors with NaN or Inf, batches of equal samples."""
_SAME_IN_NUMPY = (torch.float32, torch.int64, torch.int32, torch.uint8)
_INTEGERS = (torch.int64, torch.int32, torch.uint8)


def tensors_in(value: object, depth: int = 3) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses, in order, not too deep."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_nested:
            yield value
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part, depth - 1)
    elif depth and is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth - 1)


class Epoch:
    """The fingerprints of one epoch: how many batches in a row were already seen in it, in the same order."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        self._places: dict[int, int] = {}
        self._num = self._row = 0
        self._last = self._expected = -1
        self._stuck, self._step_mark = 0, -1

    def step_done(self) -> int:
        """How many steps in a row had the very same batch, where there are others."""
        if self.length is None or self._last < 0:
            return 0
        self._stuck = self._stuck + 1 if self._last == self._step_mark else 1
        self._step_mark = self._last
        return self._stuck

    def saw(self, mark: int) -> int:
        """Take in one batch; 0 where it is new, or where nobody said how long an epoch is."""
        if self.length is None:
            return 0
        if mark == self._last:
            return self._row  # several forwards on one batch are one visit
        if self._num >= self.length:
            self._places.clear()
            self._num = self._row = 0
        place = self._places.get(mark)
        self._row = 0 if place is None else self._row + 1 if place == self._expected else 1
        self._expected = -1 if place is None else place + 1
        if place is None:
            self._places[mark] = self._num
        self._num += 1
        self._last = mark
        return self._row


class OneClass:
    """Batches whose labels are all the same: how many in a row, where batches used to be mixed or the class changes."""

    def __init__(self) -> None:
        self._row = 0
        self._was_mixed = False
        self._labels: set[int] = set()

    def saw(self, labels: NDArray[np.int64]) -> int:
        """Take in the labels of one batch; 0 where they differ, or where there may be only one class."""
        if len(labels) < MIN_HEARD:
            return 0
        if (labels != labels[0]).any():
            self._was_mixed, self._row = True, 0
            return 0
        self._row += 1
        self._labels.add(int(labels[0]))
        return self._row if self._was_mixed or len(self._labels) > 1 else 0


class RepeatedRows:
    """Batches in which the same sample stands again and again, though other batches bring other samples."""

    def __init__(self) -> None:
        self._row = 0
        self._earlier: list[NDArray[np.float64]] = []

    def saw(self, keys: NDArray[np.float64]) -> tuple[int, float]:
        """Take in a number for each sample of a batch: how many batches in a row are like that, and by what share."""
        different = np.unique(keys)
        share = 1.0 - different.size / keys.size
        known = np.isin(different, np.concatenate(self._earlier)).mean() if self._earlier else 0.0
        # Data with few different samples repeat them in other batches as well.
        repeated = share >= REPEATED and known <= KNOWN and different.size >= MIN_DIFFERENT
        self._row = self._row + 1 if repeated else 0
        self._earlier = [*self._earlier[1 - NUM_EARLIER :], different]
        return self._row, share


def row_keys(found: Sequence[Tensor]) -> Tensor | None:
    """A number for each sample of a batch, from all of its tensors: equal samples have equal ones.

    None where the first is not made of floats: prompts and states are repeated on purpose.
    """
    main = found[0]
    if main.dim() < 2 or not main.is_floating_point() or not MIN_KEYS <= len(main) <= SLICE or main[0].numel() < 2:
        return None
    total: Tensor | None = None
    for i, tensor in enumerate(found):
        if tensor.dim() and len(tensor) == len(main) and not tensor.is_complex() and tensor[0].numel():
            rows = tensor.detach().reshape(len(tensor), -1)[:, -KEY_COLUMNS:].double()
            weights = torch.arange(1, rows.shape[1] + 1, dtype=rows.dtype, device=rows.device).add(0.5 * i).sqrt()
            part = (rows * weights).sum(1)
            total = part if total is None else total + (i + 1) * part
    return total


class SmallData:
    """The different batches so far, as long as they are few: how many rows they have, and whether they are all of it.

    Slices of one tensor that cover it are a small data set. Of batches that own their memory nobody can know.
    """

    def __init__(self) -> None:
        self._sizes: dict[float, tuple[int, int, int]] = {}  # by mark: address and bytes of the storage, bytes
        self._num_rows = 0
        self.is_small = True

    def saw(self, mark: float, batch: Tensor) -> None:
        """Take in a batch."""
        if mark in self._sizes:
            return
        storage = batch.untyped_storage()
        self._sizes[mark] = storage.data_ptr(), storage.nbytes(), batch.numel() * batch.element_size()
        self._num_rows += len(batch) if batch.dim() else 1
        self.is_small = len(self._sizes) <= FEW

    def facts(self) -> dict[str, float]:
        """What is known while they are few; nothing of a single one, which may be the full batch."""
        if not self.is_small or len(self._sizes) < 2:
            return {}
        out = {"data_rows": float(self._num_rows)}
        storages = {(at, size) for at, size, _ in self._sizes.values()}
        if len(storages) == 1:
            whole = storages.pop()[1]
            out["data_covered"] = min(sum(part for *_, part in self._sizes.values()) / max(whole, 1), 1.0)
        return out


class Glance(NamedTuple):
    """A batch on a device that is held until the step: its beginning comes along with the gradients' table."""

    batch: Tensor
    version: int  # as it was in the forward
    num: int  # words of 4 bytes of its beginning
    second: int  # how many its second sample lies behind the first; 0: there is none


class Looks(NamedTuple):
    """What was sent, or is still to be sent, of the batches of one step on a device."""

    waiting: list[Later]
    glance: Glance | None
    due: bool  # whether it is a step that says what guessing would give


class BatchProbe:
    """Collects what the forwards of one step were given, and what targets the loop told."""

    def __init__(self) -> None:
        self._facts: dict[str, float | Tensor] = {}
        self._ids: set[int] = set()
        self._counts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._guessed: tuple[NDArray[np.int64], float] | None = None  # from which counts, and the loss of guessing
        self._places = Places()
        self.loss_kind = ""
        self.epoch = Epoch()
        self._small: SmallData | None = SmallData()  # until there were too many different batches
        self._steps = 0
        self._has_targets = False  # the loop tells them
        # Of batches on a device: what was sent of them, and whether their samples are compared with each other.
        self._waiting: list[Later] = []
        self._copies = Copies()
        self._one_class, self._repeated = OneClass(), RepeatedRows()
        self._num_first, self._begin_alike = 0, False
        self._glance: Glance | None = None
        self.compares = False  # with the batches of other processes, which may share some of the inputs on purpose
        self.print_of_all: float | None = None
        """Of all inputs of the last forward, where they are compared and on the host."""
        self._is_written = False  # somebody writes into batches after the forward: they cannot be held

    def inputs(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Look at what a forward was called with."""
        if len(args) == 1 and not kwargs and args[0].__class__ is Tensor and args[0].layout is torch.strided:
            main = args[0]  # the usual case
            self._ids.add(main.data_ptr())
            self._look([main])
            return
        found = list(tensors_in((args, dict(kwargs) if kwargs else ())))[:NUM_TENSORS]
        self._ids.update(tensor.data_ptr() for tensor in found)
        if found:
            self._look(found)

    def told(self, batch: object) -> None:
        """Look at a batch the loop told: what no forward was given is taken for targets."""
        with np.errstate(all="ignore"):
            self._told(batch)

    def _told(self, batch: object) -> None:
        found = list(tensors_in(batch))[:NUM_TENSORS]
        if not self._ids and found:
            self._look(found[:1])
            self._ids.add(found[0].data_ptr())
        for target in found:
            if target.data_ptr() not in self._ids:
                self._target(target)

    def take(self) -> dict[str, float | Tensor]:
        """Everything since the last step that asked."""
        out, self._facts = self._facts, {}
        self._ids.clear()
        self._steps += 1
        if self._waiting or self._glance is not None:
            return out  # the rest is known later
        if self.epoch.length is not None and (stuck := self.epoch.step_done()) > 1:
            out["stuck"] = float(stuck)
        if self._steps % CHANCE_EVERY == 1 and (chance := self._chance()) is not None:
            out["chance"] = chance
        if self._small is not None and self._steps % CHANCE_EVERY == 1:
            out |= self._small.facts()
        return out

    @property
    def waits(self) -> bool:
        """Whether anything was sent of batches on a device since the last step that asked."""
        return self._glance is not None or len(self._waiting) > 0

    def delayed(self) -> Looks:
        """What was sent of batches on a device since the last step that asked: `arrived` reads it when it is there."""
        waiting, self._waiting = self._waiting, []
        return Looks(waiting, self._take_glance(), self._steps % CHANCE_EVERY == 1)

    def settled(self, looks: Looks) -> Looks:
        """The same where the beginning of the batch does not come along with the step's table: it is sent now."""
        if looks.glance is None:
            return looks
        several = len(looks.waiting) > 0
        return looks._replace(waiting=[*looks.waiting, self._sent(looks.glance.batch, several=several)], glance=None)

    def arrived(self, looks: Looks, lead: NDArray[np.int32] | None, facts: dict[str, float], notes: Notes) -> None:
        """Add what `take` says of batches on the host. `lead` is the beginning of the one that was held."""
        if looks.waiting:
            with np.errstate(all="ignore"):
                for add in looks.waiting:
                    add(facts, notes)
        if looks.glance is not None and lead is not None:
            self._read_lead(looks.glance, lead, facts)
        if bad := facts.pop(MORE_BAD, 0.0):
            facts["in_bad"] = facts.get("in_bad", 0.0) + bad
        if facts.pop(SAME_ROWS, 0.0):
            facts["in_flat"] = 1.0
        if self.epoch.length is not None and (stuck := self.epoch.step_done()) > 1:
            facts["stuck"] = float(stuck)
        if looks.due and (chance := self._chance()) is not None:
            facts["chance"] = chance

    def _look(self, found: Sequence[Tensor]) -> None:
        facts, main = self._facts, found[0]
        num = main.numel()
        if num == 0:
            facts["in_empty"] = 1.0
            return
        if self._steps % ROWS_EVERY == ROWS_EVERY - 1:
            self._compare_rows(found)
        if not is_here(main):
            if len(self._waiting) < MAX_WAITING and can_be_sent(main):
                self._count_on_device(found)
                self._hold_or_send(main)
            if self._glance is None:
                self._look_on_device(main)
            else:
                facts[HELD_BACK] = self._glance.batch
            return
        read = native and native.leading(main, SLICE, MARKED)
        num_read, square, mark, alike = read or _read(main)
        if self.epoch.length is None:
            facts["in_print"] = mark  # as `_mark` does
        else:
            self._mark(mark, facts)
        if self.compares:
            self.print_of_all = _print_of(mark, found[1:])
        if self._small is not None:
            self._small.saw(mark, main)
            if not self._small.is_small:
                self._small = None
        size = sqrt(square) if square is not None else 0.0
        if square is not None and size > facts.get("in_rms", 0.0):
            facts["in_rms"] = size
        # What was looked at is sound if its size is: only the rest has to be searched.
        if len(found) > 1 or (square is not None and (num > SLICE or not size < math.inf)):
            for tensor in found[1:] if size < math.inf and num == num_read else found:
                if tensor.is_floating_point() and is_here(tensor) and tensor.numel() and _nonfinite(tensor):
                    facts["in_bad"] = float(facts.get("in_bad", 0.0)) + 1.0
        if alike and _same_rows(main):
            facts["in_flat"] = 1.0

    def _compare_rows(self, found: Sequence[Tensor]) -> None:
        """Now and then: how many samples of this batch are in it several times."""
        if "rows_repeated" in self._facts or (keys := row_keys(found)) is None:
            return
        if is_here(keys):
            self._tell_rows(to_host(keys), self._facts)
        elif len(self._waiting) < MAX_WAITING and can_be_sent(keys):
            copy = self._copies.send(keys)

            def later(facts: dict[str, float], notes: Notes) -> None:
                self._tell_rows(to_host(copy).copy(), facts)
                self._copies.hand_back(copy)

            self._waiting.append(later)

    def _tell_rows(self, keys: NDArray[np.float64], facts: dict[str, Any]) -> None:
        looks, share = self._repeated.saw(keys)
        if looks:
            facts["rows_repeated"], facts["rows_repeated_looks"] = share, float(looks)

    def _mark(self, mark: float, facts: dict[str, Any]) -> None:
        facts["in_print"] = mark  # of the last forward: a line search calls the model as often as it likes
        if self.epoch.length is not None and (row := self.epoch.saw(int(mark))):
            facts["replayed"] = float(row)

    def _count_on_device(self, found: Sequence[Tensor]) -> None:
        """Count on the device what the host would search for."""
        facts, main = self._facts, found[0]
        held = facts.get(HELD_BACK)
        if isinstance(held, Tensor) and held.is_floating_point():  # another micro-batch: the kernels look at one
            self._count_bad(held)
        for tensor in found[1:]:
            if tensor.is_floating_point() and not is_here(tensor) and tensor.numel():
                self._count_bad(tensor)
        self._num_first += 1
        if (self._begin_alike or self._num_first <= FIRST) and main.dim() > 1 and len(main) >= MIN_ROWS:
            flat = (main == main[:1]).all().float()
            facts[SAME_ROWS] = flat if SAME_ROWS not in facts else flat + facts[SAME_ROWS]

    def _hold_or_send(self, main: Tensor) -> None:
        """Hold a batch until the step, whose kernels send its beginning; else, and of an earlier one, send it now."""
        if (earlier := self._take_glance()) is not None:
            self._waiting.append(self._sent(earlier.batch, several=True))
        if not self._is_written and (words := words_of(main)) is not None:
            batch = main.detach() if main.requires_grad else main
            self._glance = Glance(batch, batch._version, *words)
        else:
            self._waiting.append(self._sent(main, several=len(self._waiting) > 0))

    def _take_glance(self) -> Glance | None:
        glance, self._glance = self._glance, None
        if glance is not None and glance.batch._version != glance.version:
            self._is_written = True  # it is not what the model was given any more
            return None
        return glance

    def _read_lead(self, glance: Glance, lead: NDArray[np.int32], facts: dict[str, float]) -> None:
        """What the host reads of a batch, from the words that the kernels sent of it."""
        words = lead[: glance.num]
        if glance.batch.dtype not in _SAME_IN_NUMPY:  # the same of any type that is held as one that is sent
            words = _leading(torch.from_numpy(words).view(glance.batch.dtype))
        self._mark(float(crc32(words.data)), facts)
        some = min(glance.num, glance.second)
        self._begin_alike = (
            some > 0 and lead[0] == lead[WORDS] and np.array_equal(lead[:some], lead[WORDS : WORDS + some])
        )

    def _sent(self, main: Tensor, *, several: bool) -> Later:
        """Send the beginning of a batch on a device to the host: what is read of it there."""
        width, floats = main.numel() // max(len(main), 1) if main.dim() > 1 else 0, main.is_floating_point()
        step = MARKED if width >= SLICE else width  # of one sample to the next in what is sent
        copy = self._copies.send(_leading_rows(main))

        def later(facts: dict[str, float], notes: Notes) -> None:
            values = _leading(copy) if copy.is_cpu else _leading(copy.to("cpu"))
            self._mark(float(crc32(values[:MARKED].data)), facts)
            if floats and (several or "in_rms" not in facts):
                size = sqrt(float(np.vdot(values, values)) / values.size)
                if size > facts.get("in_rms", 0.0):
                    facts["in_rms"] = size
            # Samples that begin alike are compared as a whole, in the steps to come.
            self._begin_alike = 0 < step < values.size and values.item(0) == values.item(step)
            if self._begin_alike:
                some = min(step, MARKED)
                self._begin_alike = np.array_equal(values[:some], values[step : step + some])
            self._copies.hand_back(copy)

        return later

    def _count_bad(self, tensor: Tensor) -> None:
        bad = _is_bad(tensor.detach().reshape(-1))
        known = self._facts.get(MORE_BAD)
        self._facts[MORE_BAD] = bad if known is None else known + bad

    def _look_on_device(self, main: Tensor) -> None:
        """Without waiting: numbers that stay on the device until their step is judged."""
        if not main.is_floating_point():
            return
        if can_be_held(main):
            self._facts[HELD_BACK] = main.detach() if main.requires_grad else main
        else:
            self._facts.pop(HELD_BACK, None)
            self._facts |= look_on_device(main)

    def heard(self, answers: Answers) -> None:
        """What answers were compared with: it counts where the loop tells no targets."""
        if self._has_targets:
            return
        if answers.labels is not None:
            self._count(answers.labels)
            if (looks := self._one_class.saw(answers.labels)) > 1:
                self._facts["one_class"] = float(looks)
        elif answers.values is not None and answers.values.ndim:
            self._places.add(torch.from_numpy(answers.values))

    def _target(self, target: Tensor) -> None:
        self._has_targets = True
        facts = self._facts
        if target.numel() == 0:
            facts["in_empty"] = 1.0
        elif not is_here(target):
            self._send_target(target)
        elif target.is_floating_point() and _nonfinite(target):
            facts["in_bad"] = float(facts.get("in_bad", 0.0)) + 1.0
        else:
            self._labels(target, target.dim(), facts)

    def _send_target(self, target: Tensor) -> None:
        """Send targets on a device to the host: all of them where they are few."""
        if len(self._waiting) >= MAX_WAITING or target.is_complex() or not can_be_sent(target):
            return
        dim = target.dim()
        if target.is_floating_point():
            self._count_bad(target)
            num = max(MAX_SENT // max(target.numel() // len(target), 1), 1) if dim else 1
            part = self._copies.send(target.detach()[:num] if dim else target.detach())
        else:
            part = self._copies.send(target.detach().reshape(-1)[:SLICE])

        def later(facts: dict[str, float], notes: Notes) -> None:
            if not facts.get(MORE_BAD):  # what they are is no matter then
                self._labels(part, dim, facts)
            self._copies.hand_back(part)

        self._waiting.append(later)

    def _labels(self, target: Tensor, dim: int, facts: dict[str, Any]) -> None:
        """Targets that the host can read, or a part of them; `dim` is that of the whole."""
        if not is_here(target):
            target = torch.from_numpy(to_host(target))
        values = _leading(target)
        if target.is_floating_point():
            if self.loss_kind == "bce":
                facts["targets_outside"] = float(np.mean((values < -1e-6) | (values > 1 + 1e-6)))
            self._places.add(target)
        elif not target.is_complex() and target.dtype is not torch.bool and dim:
            self._count(values[values >= 0])
            if dim <= 2 and values.size >= MIN_LABELS and (values == values[0]).all():
                facts["target_flat"] = 1.0

    def _count(self, labels: NDArray[Any]) -> None:
        if not labels.size or labels.max() >= MAX_CLASSES:
            return
        counts = np.bincount(labels.astype(np.int64, copy=False), minlength=self._counts.size)
        counts[: self._counts.size] += self._counts
        self._counts = counts

    def _chance(self) -> float | None:
        """The loss of always guessing by frequency (or the mean): a model that learns gets below it."""
        if self.loss_kind == "nll" and self._guessed is not None and self._guessed[0] is self._counts:
            return self._guessed[1]
        if self.loss_kind == "nll" and (num := self._counts.sum()) >= 256:
            share = self._counts[self._counts > 0] / num
            self._guessed = self._counts, float(-(share * np.log(share)).sum())
            return self._guessed[1]
        return self._places.chance(self.loss_kind)


def can_be_held(batch: Tensor) -> bool:
    """Whether a batch can be looked at later, where it is: the kernels read it from its address on."""
    dtype = batch.dtype
    wide = 4 if dtype is torch.float32 else 2 if dtype in (torch.bfloat16, torch.float16) else 0
    return wide > 0 and type(batch) is Tensor and batch.is_contiguous() and batch.numel() * wide <= MAX_HELD


def words_of(batch: Tensor) -> tuple[int, int] | None:
    """Of a batch that is held: how many words of 4 bytes its first `MARKED` elements have, and one sample.

    None where its beginning is no whole number of words, or where it cannot be held.
    """
    dtype, size = batch.dtype, batch.element_size()
    if dtype in _INTEGERS:
        if type(batch) is not Tensor or not batch.is_contiguous() or batch.numel() * size > MAX_HELD:
            return None
    elif not can_be_held(batch):
        return None
    if batch.is_inference():  # nobody counts who writes to it
        return None
    num = batch.numel()
    lead = min(num, MARKED) * size
    sample = num // len(batch) * size if batch.dim() > 1 and len(batch) > 1 else 0
    if (batch.data_ptr() | lead | sample) & 3:
        return None
    return lead >> 2, sample >> 2


def can_be_sent(tensor: Tensor) -> bool:
    """Whether a copy can be sent to the host now: what a CUDA graph records is nobody's to keep."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _leading_rows(main: Tensor) -> Tensor:
    """The first elements, side by side; of wide samples the beginnings of the first few."""
    main, num = main.detach() if main.requires_grad else main, main.numel()
    if main.dim() > 1 and len(main) > 1 and num // len(main) >= SLICE:
        return main[: SLICE // MARKED].reshape(min(len(main), SLICE // MARKED), -1)[:, :MARKED].reshape(-1)
    if main.is_contiguous():  # one view instead of two
        return main.as_strided((min(num, SLICE),), (1,))
    return main.reshape(-1)[:SLICE]


def _is_bad(values: Tensor) -> Tensor:
    return (~torch.isfinite(values[:LARGE].sum(dtype=torch.float32))).float()


def look_on_device(main: Tensor) -> dict[str, float | Tensor]:
    """The size of a batch and whether it holds NaN or Inf, as numbers on its device."""
    values = main.detach().reshape(-1)
    lead = values[:SLICE].float()
    return {
        "in_rms": torch.linalg.vector_norm(lead) / math.sqrt(lead.numel()),
        "in_bad": _is_bad(values),
    }


class Places:
    """Float targets, place by place: what is guessed best at each pixel or label without looking at the input."""

    def __init__(self) -> None:
        self._shape: tuple[int, ...] = ()
        self._num = 0
        self._first: NDArray[np.float64] = np.zeros(0)
        self._second: NDArray[np.float64] = np.zeros(0)

    def add(self, target: Tensor) -> None:
        """Take in the targets of a batch; another shape starts over."""
        rows = target.detach().float().reshape(len(target), -1)[:, :SLICE] if target.dim() else target.reshape(1, 1)
        values = to_host(rows).astype(np.float64)
        if values.shape[1:] != self._shape:
            self._shape, self._num = values.shape[1:], 0
            self._first, self._second = np.zeros(self._shape), np.zeros(self._shape)
        with np.errstate(all="ignore"):
            self._num += len(values)
            self._first += values.sum(0)
            self._second += (values * values).sum(0)

    def chance(self, kind: str) -> float | None:
        """The loss of the best guess; None while too little was seen, or where the loss is another."""
        if self._num < MIN_TARGETS or kind not in ("mse", "bce"):
            return None
        mean = self._first / self._num
        if kind == "mse":
            with np.errstate(all="ignore"):
                value = float(np.maximum(self._second / self._num - mean**2, 0.0).mean())
        elif mean.min() < 0 or mean.max() > 1:
            return None
        else:
            share = np.clip(mean, 1e-6, 1 - 1e-6)
            value = float(-(share * np.log(share) + (1 - share) * np.log(1 - share)).mean())
        return value if math.isfinite(value) and value > 0 else None


def _leading(tensor: Tensor) -> NDArray[Any]:
    """The first elements as numpy, float32 where they are floats."""
    if tensor.dtype in _SAME_IN_NUMPY and tensor.is_contiguous():
        host = tensor.detach() if tensor.requires_grad else tensor
        return host.numpy().reshape(-1)[:SLICE]  # numpy's views are cheaper than torch's
    flat = tensor.detach().reshape(-1)[:SLICE]
    if tensor.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.is_floating_point() and flat.dtype is not torch.float32:
        flat = flat.float()
    return to_host(flat)


def _read(tensor: Tensor) -> tuple[int, float | None, float, bool]:
    """What `native.leading` reads of a plain tensor, of any; no squares where it holds no floats."""
    values = _leading(tensor)
    # This product does not warn of what is looked for.
    square = float(np.vdot(values, values)) / values.size if tensor.is_floating_point() else None
    alike = False
    if tensor.dim() > 1:
        width = tensor.numel() // tensor.shape[0]
        alike = width >= values.size or values.item(0) == values.item(width)
    return values.size, square, float(crc32(values[:MARKED].data)), alike


def _print_of(first: float, others: Sequence[Tensor]) -> float:
    """One mark for several tensors, from that of the first."""
    mark = int(first)
    for tensor in others:
        if is_here(tensor) and tensor.numel():
            mark = crc32(_leading(tensor)[:MARKED].tobytes(), mark)
    return float(mark)


def _nonfinite(tensor: Tensor) -> bool:
    flat = tensor.detach().reshape(-1)[:LARGE]
    values = to_host(flat) if flat.dtype in (torch.float32, torch.float64) else to_host(flat.float())
    # A product is the cheapest test; huge finite values can overflow it: only a second look is proof.
    return not math.isfinite(np.vdot(values, values)) and not np.isfinite(values).all()


def _same_rows(tensor: Tensor) -> bool:
    """Whether every sample of a batch is the same: asked only where the first two begin alike."""
    if tensor.dim() < 2 or tensor.shape[0] < MIN_ROWS:
        return False
    if tensor[0].numel() <= SLICE and not torch.equal(tensor[0], tensor[1]):
        return False
    rows = to_host(tensor) if tensor.dtype is not torch.bfloat16 else to_host(tensor.float())
    first = rows[0]
    if first.size < 2 or not (first == rows[-1]).all() or not (first == rows[len(rows) // 2]).all():
        return False
    same: np.bool_ = (rows == first).all()
    return same is np.True_
