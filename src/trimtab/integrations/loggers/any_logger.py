"""Any object with `.log_metrics(dict, step)` or `.log(dict)`: Lightning's loggers, Comet, Aim, one of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trimtab.core.types import Severity
from trimtab.integrations.loggers.histogram import Histogram, as_scalars
from trimtab.integrations.loggers.metric_sink import STEP
from trimtab.record.sinks import takes_step


class AnyLoggerTarget:
    """Logs dicts of numbers with their step, in the way that the object takes it; an alert where it takes alerts."""

    def __init__(self, logger: object) -> None:
        self._logger = logger
        self._plural = callable(getattr(logger, "log_metrics", None))
        self._log: Callable[..., object] = getattr(logger, "log_metrics" if self._plural else "log")
        self._takes_step = takes_step(self._log)
        self._newest = 0

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """One call."""
        if not self._takes_step:
            self._log({**values, STEP: step})
            return
        if not self._plural:  # such a log often drops what is older than its newest step, and findings come late
            step = self._newest = max(self._newest, step)
        self._log(dict(values), step=step)

    def tell(self, title: str, text: str, severity: Severity | None, step: int) -> None:
        """An alert, where there are any."""
        alert: Any = getattr(self._logger, "alert", None)
        if callable(alert):
            alert(title=title, text=text)

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:
        """As numbers: what such an object makes of anything else is not known."""
        self.scalars(as_scalars(found), step)

    def page(self, path: Path) -> None:
        """Nothing: there is no common way to keep a file."""

    def flush(self) -> None:
        """Nothing: it logs at once."""

    def close(self) -> None:
        """Nothing: the logger belongs to the user."""
