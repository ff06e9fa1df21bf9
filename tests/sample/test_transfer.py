"""How values come to the host: sent ahead, several in one tensor, and from the replays of captured steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimtab.core.types import Column, Kind, Layout
from trimtab.sample.transfer import DelayedSamples, Replays, Sent, names_of

LAYOUT = Layout(names=("w",), kinds=(Kind.GRAD,), numel=(4,), columns=(Column.L2,))


class Event:
    """Stands in for that of CUDA; the copy it waits for is made when it is waited for."""

    def __init__(self, memory: np.ndarray, value: float) -> None:
        self._memory, self._value = memory, value
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        self._memory[:] = self._value


def test_sent_values_are_waited_for_once_and_are_the_reader_s_own() -> None:
    memory = np.zeros(4, np.float32)
    event = Event(memory, 7.0)
    sent = Sent(memory, event, 1, ("grad_norm", "", "loss"))  # type: ignore[arg-type]
    table, found = sent.split()
    assert table.tolist() == [7.0]
    assert found == {"grad_norm": 7.0, "loss": 7.0}
    memory[:] = -1.0  # the next step
    assert sent.take().tolist() == [7.0] * 4
    assert event.waits == 1


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_sent_table_becomes_a_sample_when_its_step_is_due(lag: int) -> None:
    delayed = DelayedSamples(lag)
    for step in range(6):
        sent = Sent(np.array([step, 2.0, 3.0], np.float32), None, 1, ("grad_norm", "loss"))
        delayed.post(step, LAYOUT, sent, {"lr/0": 0.1})
        due = list(delayed.due(step))
        assert [s.step for s in due] == ([step - lag] if step >= lag else [])
        for sample in due:
            assert sample.table.tolist() == [[float(sample.step)]]
            assert not sample.table.flags.writeable
            assert sample.scalars == {"lr/0": 0.1, "grad_norm": 2.0, "loss": 3.0}
    assert [s.step for s in delayed.drain()] == list(range(6 - lag, 6))


def test_names_of_single_numbers_and_of_several() -> None:
    assert names_of("loss", torch.zeros(())) == ("loss",)
    assert names_of("dots", torch.zeros(1, 2)) == ("dots/0", "dots/1")


class Ring:
    """A device's half of the ring: counts and writes as the kernels do."""

    def __init__(self, places: int) -> None:
        self.values, self.counter = torch.zeros(places, 4), torch.zeros(1, dtype=torch.int64)

    def write(self, norm: float, loss: float, number: int = 0) -> None:
        self.values[int(self.counter) % len(self.values)] = torch.tensor([norm, loss, -loss, float(number)])
        self.counter += 1


def heard(replays: Replays, **how: bool) -> list[tuple[int, float, dict[str, float]]]:
    return [(missed, float(table[0]), found) for missed, table, found in replays.take(**how)]


def test_replays_are_heard_once_in_their_order() -> None:
    ring = Ring(4)
    replays = Replays(ring.values, ring.counter, 1)
    assert replays.add(("loss",)) == 0
    assert replays.add(("", "negative")) == 1
    assert heard(replays) == []
    ring.write(1.0, 10.0)
    ring.write(2.0, 20.0, 1)
    assert heard(replays) == [(0, 1.0, {"loss": 10.0}), (0, 2.0, {"negative": -20.0})]
    assert heard(replays, wait=True) == []
    for i in range(4):
        ring.write(float(i), 0.0)
    assert [(missed, norm) for missed, norm, _ in heard(replays)] == [(0, 0.0), (0, 1.0), (0, 2.0), (0, 3.0)]


def test_replays_that_were_overwritten_are_counted() -> None:
    ring = Ring(4)
    replays = Replays(ring.values, ring.counter, 1)
    replays.add(("loss",))
    for i in range(11):
        ring.write(float(i), 0.0)
    assert [(missed, norm) for missed, norm, _ in heard(replays)] == [(7, 7.0), (0, 8.0), (0, 9.0), (0, 10.0)]
    ring.write(11.0, 0.0)
    assert [(missed, norm) for missed, norm, _ in heard(replays)] == [(0, 11.0)]


def test_a_place_that_may_be_written_while_it_is_copied_is_left_out() -> None:
    ring = Ring(4)
    replays = Replays(ring.values, ring.counter, 1)
    replays.add(("loss",))
    for i in range(6):
        ring.write(float(i), 0.0)
    # Two more were counted while the ring was copied: a third may be half written.
    got = [(missed, float(table[0])) for missed, table, _ in replays._read(4, 6, ring.values.numpy())]
    assert got == [(3, 3.0)]
    got = [(missed, float(table[0])) for missed, table, _ in replays._read(6, 6, ring.values.numpy())]
    assert got == [(0, 4.0), (0, 5.0)]
