"""Weights & Biases: rows of ours between those that you log, on an axis of their own, so that no row is lost.

A wandb run has one counter of rows. `run.log(row)` ends a row and moves the counter on; wandb drops what you log with
`step=k` once the counter has passed `k`. So rows of ours are never logged with `step=`, and never move the
counter past a step that you may still log with:

- You log without `step=`: ours go out between your rows as they come.
- You log with `step=`: ours take the places between two of your steps. Those that find none wait, and go out when the
  run is finished.
- You have logged nothing yet, so that nobody knows: ours wait for your first row, or for the end of the run.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.types import Severity
from trimtab.integrations.loggers.histogram import Histogram, nonfinite_counts
from trimtab.integrations.loggers.metric_sink import NAMESPACE, STEP
from trimtab.record.recorder import close_at_exit
from trimtab.torchutil.patch import wrap_on_object

log = logging.getLogger("trimtab.record")

INSTALL = "pip install 'trimtab[wandb]'"
MOST_WAITING = 20_000
"""Rows that wait for a place. Beyond this every second one goes."""
MOST_AT_ONCE = 100
"""Rows that go out in one call of yours: it need not wait long."""
TITLE = "trimtab"
MOST_TEXT = 2_000


def wandb_module(why: str = "logging to wandb") -> ModuleType:
    """The package; InputError with the install line where it is missing."""
    try:
        return import_module("wandb")
    except ImportError:
        raise InputError(f"{why} needs the package: {INSTALL}") from None


def has_wandb() -> bool:
    """Whether the package is installed."""
    try:
        wandb_module()
    except InputError:
        return False
    return True


def open_wandb(project: str | None, name: str | None = None, config: Mapping[str, object] | None = None) -> Any:
    """A new wandb run, offline without a login."""
    wandb = wandb_module()
    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    return wandb.init(project=project, name=name, config=dict(config or {}), mode=mode)


def is_wandb_run(obj: object) -> bool:
    """Whether it is a wandb run, or something that can do the same."""
    return all(callable(getattr(obj, name, None)) for name in ("log", "define_metric", "finish"))


class RowFeed:
    """Puts rows into one wandb run, around those that the user logs; everyone who logs to that run shares it."""

    def __init__(self, run: Any, *, owned: bool) -> None:
        self._run = weakref.ref(run)
        self._lock = threading.RLock()
        self._waiting: deque[dict[str, Any]] = deque()
        self._sending = False
        self._drained = False
        self._open = False  # the user has begun a row with commit=False
        self._habit = "free" if owned else "unknown"
        self._counter = _counter_of(run)
        self.num_lost = 0
        self._undo: list[Callable[[], None]] = []
        if not owned:
            # wandb.log and methods that somebody kept lead to these two; by their public names they could be missed.
            name = "_log" if callable(getattr(run, "_log", None)) else "log"
            self._undo.append(wrap_on_object(run, name, _weakly(self, "_user_logs")))
            name = "_finish" if callable(getattr(run, "_finish", None)) else "finish"
            self._undo.append(wrap_on_object(run, name, _weakly(self, "_user_finishes")))
            atexit.register(self._at_exit)

    def put(self, row: dict[str, Any]) -> None:
        """Log a row as soon as there is a place for it."""
        with self._lock:
            if self._drained:
                raise InputError("the wandb run is finished; close the guard before you finish the run")
            self._waiting.append(row)
            if len(self._waiting) > MOST_WAITING:
                kept = deque(list(self._waiting)[1::2])
                self.num_lost += len(self._waiting) - len(kept)
                self._waiting = kept
            if self._habit == "free" and not self._open:
                self._send(len(self._waiting))

    def drain(self) -> None:
        """The run ends: everything that still waits goes out."""
        with self._lock:
            self._drained = True
            atexit.unregister(self._at_exit)
            with contextlib.suppress(Exception):  # it was finished before: wandb takes nothing any more
                self._send(len(self._waiting))
            if self._waiting or self.num_lost:
                self.num_lost += len(self._waiting)
                self._waiting.clear()
                log.warning(
                    "wandb: %d rows found no place between yours; log without step=, with "
                    'run.define_metric("*", step_metric=...) for an axis, and all of them do',
                    self.num_lost,
                )
            while self._undo:
                self._undo.pop()()

    def _at_exit(self) -> None:
        """wandb ends its runs at the exit, and ours comes before that: rows that are under way go out first."""
        close_at_exit()
        self.drain()

    def _send(self, num: int) -> None:
        run = self._run()
        if run is None:
            return
        self._sending = True
        try:
            for _ in range(min(num, len(self._waiting))):
                run.log(self._waiting[0])
                self._waiting.popleft()
                self._counter += 1
        finally:
            self._sending = False

    def _user_logs(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._sending:
                return inner(*args, **kwargs)
            step, commit = _argument(args, kwargs, 1, "step"), _argument(args, kwargs, 2, "commit")
            if step is not None:
                self._habit = "stepped"
                # Rows of ours end the one that is open and take the places up to this step.
                _contained(self._send, min(int(step) - self._counter, MOST_AT_ONCE))
            done = inner(*args, **kwargs)
            if step is not None:
                self._counter = max(self._counter, int(step))
            ends = commit if commit is not None else step is None
            if ends:
                self._counter += 1
            self._open = not ends
            if step is None:
                self._habit = "free" if self._habit == "unknown" else self._habit
                if self._habit == "free" and not self._open:
                    _contained(self._send, MOST_AT_ONCE)
            return done

    def _user_finishes(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.drain()
        return inner(*args, **kwargs)


_FEEDS: weakref.WeakKeyDictionary[Any, RowFeed] = weakref.WeakKeyDictionary()


def feed_of(run: Any, *, owned: bool = False) -> RowFeed:
    """The one feed of a run."""
    try:
        feed = _FEEDS.get(run)
        if feed is None:
            feed = _FEEDS[run] = RowFeed(run, owned=owned)
    except TypeError:  # one that takes no weak references
        feed = RowFeed(run, owned=owned)
    return feed


class WandbTarget:
    """A wandb run: rows on the axis `trimtab/step` or that of a framework, findings as alerts, the report an artifact.

    `owned`: the run was begun for this guard, and ends with it.
    """

    def __init__(self, run: Any, *, axis: str = STEP, owned: bool = False) -> None:
        self._run, self._axis, self._owned = run, axis, owned
        self._feed = feed_of(run, owned=owned)
        self._tags: set[str] = set()
        run.define_metric(axis)
        run.define_metric(f"{NAMESPACE}*", step_metric=axis)

    @property
    def num_lost(self) -> int:
        """How many rows found no place."""
        return self._feed.num_lost

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """One row."""
        self._feed.put({**values, STEP: step, self._axis: step})

    def tags(self, values: Mapping[str, float], step: int) -> None:
        """One row of values under names outside of our namespace: each is put on the axis when it first comes."""
        for tag in values.keys() - self._tags:
            self._tags.add(tag)
            self._run.define_metric(tag, step_metric=self._axis)
        self.scalars(values, step)

    def tell(self, title: str, text: str, severity: Severity | None, step: int) -> None:
        """An alert, which wandb also sends by mail or Slack if you ask it to."""
        level = "INFO" if severity is None else "WARN" if severity == Severity.WARN else "ERROR"
        self._run.alert(title=f"{TITLE}: {title}", text=text[:MOST_TEXT], level=level)

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:
        """One row."""
        made = wandb_module().Histogram
        drawn: dict[str, Any] = {
            name: made(np_histogram=(counts.tolist(), edges.tolist()))
            for name, one in found.items()
            if one.num
            for counts, edges in [one.linear()]
        }
        self._feed.put({**drawn, **nonfinite_counts(found), STEP: step, self._axis: step})

    def page(self, path: Path) -> None:
        """An artifact of the run."""
        artifact = wandb_module().Artifact(name=f"trimtab-report-{self._run.id}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def flush(self) -> None:
        """Nothing: wandb sends by itself."""

    def close(self) -> None:
        """Finish a run of ours; the user's own goes on, and rows that wait for a place go on waiting."""
        if self._owned:
            self._run.finish()


def _counter_of(run: Any) -> int:
    try:
        return int(run.step)
    except Exception:
        return 0


def _weakly(feed: RowFeed, name: str) -> Callable[..., Any]:
    """A run must not be kept alive by what is hung on it."""
    ref = weakref.ref(feed)

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = ref()
        return inner(*args, **kwargs) if found is None else getattr(found, name)(inner, *args, **kwargs)

    return around


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return kwargs.get(name, args[place] if len(args) > place else None)


def _contained(send: Callable[[int], None], num: int) -> None:
    """In a call of the user's: what fails here is ours, and his row goes through."""
    if num <= 0:
        return
    try:
        send(num)
    except Exception as error:
        log.warning("wandb did not take a row (%s: %s)", type(error).__name__, error)
