"""DATA009: a layer gets inputs of another size than its weights were made for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsOutOfRange:
    """A layer gets inputs of another size than its weights were made for.

    ## What it sees
    The data that go straight into a layer have, in the second, third and fourth step, a size of `large` or more or
    `small` or less per feature, where about 1 is usual; or they lie `offset` times farther from zero than from each
    other (data that are all the same are no data). A layer behind a normalisation gets no raw data. Or, in a model
    without normalisation layers: in each of the first three looks, 20 steps apart, the gradients of a layer's weights
    and bias show that its inputs have a size of about `size` or more. Above `cancels` nothing is said: the gradient of
    the bias cancels out, as in a loss of differences.

    ## Why it matters
    Images of 0 to 255, prices, time stamps: the first layer answers with values a hundred times too large, its weights
    get gradients that are a hundred times too large beside all others, and units saturate or die in the first steps.

    ## What to try
    1. Scale inputs to a mean of 0 and a deviation of 1 (images: divide by 255), with the statistics of the training
       set.
    2. If they are scaled, look for a scaling that is applied twice, or undone by a later transform.
    """

    code: ClassVar[str] = "DATA009"
    name: ClassVar[str] = "inputs-out-of-range"
    needs: ClassVar[tuple[str, ...]] = ("layer_input", "data_size")
    hold: ClassVar[int] = 100
    severity: Severity = Severity.WARN
    large: float = 30.0
    small: float = 1e-3
    offset: float = 30.0
    size: float = 50.0
    cancels: float = 1e4
    gain: float = 6.0

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on inputs that no weight of usual size can take."""
        yield from self._data(window)
        size, gain = window.scalar("layer_input") or 0.0, window.scalar("start_gain") or 0.0
        if not self.size < size < self.cancels or gain > self.gain:
            return  # if the weights are that large, they made the inputs so: initial-weights
        names = window.now.notes.get("layer_input", ())
        yield found(
            self,
            window,
            f"the inputs of {listed(names) or 'a layer'} have a size of {size:.3g} per feature (usually about 1).",
            names,
            size=size,
        )

    def _data(self, window: Window) -> Iterator[Finding]:
        """What goes straight into a layer."""
        size, least, offset = (window.scalar(name) for name in ("data_size", "data_least", "data_offset"))
        if size is None or least is None or offset is None:
            return
        if size > self.large or least < self.small:
            fact, value = ("data_size", size) if size > self.large else ("data_least", least)
            text = f"have a size of {value:.3g} per feature (usually about 1)"
        elif self.offset < offset < self.cancels:
            fact, value = "data_offset", offset
            text = f"lie {offset:.3g} times farther from zero than from each other"
        else:
            return
        names = window.now.notes.get(fact, ())
        yield found(self, window, f"the data that go into {listed(names) or 'a layer'} {text}.", names, size=value)
