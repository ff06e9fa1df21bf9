"""How a training shows where it is: a live bar on a terminal, one plain line per epoch elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from trimtab.compat import lines

REFRESH_S = 0.1


class Progress:
    """The bar of one epoch after another, with loss and gradient norm.

    `say` gets a finished line per epoch. `show` gets the unfinished one, at most ten times a second; without it only
    whole epochs are printed. The values come from a `LineSink` that has this object as its `bar`.

    Example:
        >>> progress = Progress(print)
        >>> progress.begin(1, 3, 2)
        >>> progress.set_postfix({"loss": "2.37", "grad": "0.423"})
        >>> progress.advance(2.5); progress.advance(2.4)
        >>> progress.end()  # doctest: +ELLIPSIS
        Epoch 1/3: 100%|████| 2/2 [00:00<00:00, loss=2.37, grad=0.423]
    """

    def __init__(self, say: Callable[[str], object] | None = None, show: Callable[[str], object] | None = None) -> None:
        self._say, self._show = say, show
        self._grad = self._loss = math.nan
        self.begin(0, 0, 0)

    def begin(self, epoch: int, num_epochs: int, total: int, done: int = 0) -> None:
        """Start an epoch."""
        self._epoch, self._num_epochs, self._total, self._done = epoch, num_epochs, total, done
        self._began, self._shown = time.monotonic(), 0.0

    def set_postfix(self, values: Mapping[str, str], refresh: bool = False) -> None:
        """Take the newest loss and gradient norm from a `LineSink`."""
        self._grad = float(values.get("grad", "nan"))
        self._loss = float(values.get("loss", "nan"))

    def advance(self, loss: float | None = None) -> None:
        """Count a batch."""
        self._done += 1
        if self._show is not None and time.monotonic() - self._shown > REFRESH_S:
            self._shown = time.monotonic()
            self._loss = self._loss if loss is None else float(loss)
            self._show(self._line())

    def end(self, loss: float | None = None) -> None:
        """End the epoch; `loss` is its mean."""
        self._total = max(self._total, self._done)
        self._loss = self._loss if loss is None else loss
        if self._show is not None:
            self._show("")  # the line is finished
        if self._say is not None:
            self._say(self._line())

    def _line(self) -> str:
        elapsed = time.monotonic() - self._began
        done = self._epoch, self._num_epochs, self._done, self._total
        return lines.epoch_bar(*done, elapsed, self._loss, self._grad)
