"""MLflow: metrics, tags and the report in the run that is active where the guard is built.

MLflow's active run belongs to a thread. Rows are sent by another one, where `mlflow.log_metrics` would begin a second
run. So the run's id is taken when the sink is made, and everything goes through a client.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.types import Severity
from trimtab.integrations.loggers.histogram import Histogram, as_scalars

INSTALL = "pip install 'trimtab[mlflow]'"
MOST_IN_BATCH = 1_000
"""What MLflow takes in one request."""
MOST_WAITING = 100_000
"""Metrics kept while a server does not answer; beyond this the oldest go."""
MOST_TEXT = 4_900
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")


def mlflow_module() -> Any:
    """The package; InputError with the install line where it is missing."""
    try:
        return import_module("mlflow")
    except ImportError:
        raise InputError(f"logging to MLflow needs the package: {INSTALL}") from None


def is_mlflow_client(obj: object) -> bool:
    """Whether it is an `MlflowClient`."""
    return all(callable(getattr(obj, name, None)) for name in ("log_batch", "set_tag", "create_run"))


def run_id_of(obj: object) -> str | None:
    """The id of an MLflow run; None for anything else."""
    found = getattr(getattr(obj, "info", None), "run_id", None)
    return found if isinstance(found, str) else None


class MlflowTarget:
    """One MLflow run, through a client. `owned`: the run was begun for this guard, and ends with it."""

    def __init__(self, client: Any, run_id: str, *, owned: bool = False) -> None:
        self._client, self._run_id, self._owned = client, run_id, owned
        self._metric = import_module("mlflow.entities").Metric
        self._waiting: list[Any] = []
        self._names = MetricNames()
        self.num_lost = 0

    @classmethod
    def active(cls, client: Any = None, experiment: str | None = None) -> MlflowTarget:
        """The run that is active in this thread; where there is none, or in another experiment, one of our own."""
        mlflow = mlflow_module()
        client = client if client is not None else mlflow.MlflowClient()
        running = mlflow.active_run()
        if running is not None:
            return cls(client, running.info.run_id)
        if experiment is not None:
            found = client.get_experiment_by_name(experiment)
            place = found.experiment_id if found is not None else client.create_experiment(experiment)
        else:
            place = _current_experiment()
        # Not start_run: that would make it the active one, and begin to collect what the user logs.
        return cls(client, client.create_run(place, run_name="trimtab").info.run_id, owned=True)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Collect metrics: many steps go in one request."""
        now_ms = int(time.time() * 1000)
        self._waiting += [self._metric(self._names.of(name), float(v), now_ms, step) for name, v in values.items()]
        excess = len(self._waiting) - MOST_WAITING
        if excess > 0:
            del self._waiting[:excess]
            self.num_lost += excess

    def tell(self, title: str, text: str, severity: Severity | None, step: int) -> None:
        """A tag of the run."""
        self._client.set_tag(self._run_id, f"trimtab.{_allowed(title).replace(' ', '.')}", text[:MOST_TEXT])

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:
        """MLflow has no histograms: quantiles, NaN and Inf as metrics."""
        self.scalars(as_scalars(found), step)

    def page(self, path: Path) -> None:
        """An artifact of the run, in the folder `trimtab`."""
        self._client.log_artifact(self._run_id, str(path), "trimtab")

    def flush(self) -> None:
        """Send what was collected; what a server refuses stays, and is sent again."""
        while self._waiting:
            batch = self._waiting[:MOST_IN_BATCH]
            try:
                self._client.log_batch(self._run_id, metrics=batch)
            except Exception as error:
                if getattr(error, "error_code", "") != "INVALID_PARAMETER_VALUE":
                    raise
                self._send_singly(batch)  # one of them is refused for good: the others need not wait for it
            del self._waiting[: len(batch)]

    def _send_singly(self, batch: list[Any]) -> None:
        for one in batch:
            try:
                self._client.log_batch(self._run_id, metrics=[one])
            except Exception:
                self.num_lost += 1

    def close(self) -> None:
        """End a run of ours; the user's own goes on."""
        try:
            self.flush()
        finally:
            if self._owned:
                self._client.set_terminated(self._run_id)


def _current_experiment() -> str:
    """The experiment that the user chose, else MLflow's default one."""
    fluent = import_module("mlflow.tracking.fluent")
    found = getattr(fluent, "_get_experiment_id", lambda: None)()
    return str(found) if found is not None else "0"


class MetricNames:
    """Names that MLflow takes. A store on disk makes files of them: `lr` and `lr/0` cannot both be there.

    Example:
        >>> names = MetricNames()
        >>> [names.of(name) for name in ("lr", "lr/0", "val/a/b", "val/a", "x<y>")]
        ['lr', 'lr.0', 'val/a/b', 'val/a.value', 'x_y_']
    """

    def __init__(self) -> None:
        self._made: dict[str, str] = {}
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def of(self, name: str) -> str:
        """The name to use, always the same one."""
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self._make(_allowed(name))
            self._files.add(made)
            parts = made.split("/")
            self._folders.update("/".join(parts[:i]) for i in range(1, len(parts)))
        return made

    def _make(self, name: str) -> str:
        parts, made = name.split("/"), ""
        for part in parts:
            made = part if not made else f"{made}{'.' if made in self._files else '/'}{part}"
        return f"{made}.value" if made in self._folders else made


def _allowed(name: str) -> str:
    """MLflow refuses names with other characters."""
    return _NOT_ALLOWED.sub("_", name)
