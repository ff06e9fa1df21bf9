"""Sinks for a console, a `logging.Logger` or a function, and `adapt`, which makes a sink of whatever a user passes."""

from __future__ import annotations

import inspect
import io
import logging
import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO, cast

from trimtab.core.config import Config
from trimtab.core.errors import InputError
from trimtab.core.journal import IncidentLines, Said
from trimtab.core.presets import get_preset
from trimtab.core.printable import printable
from trimtab.core.types import Outcome, Record, Sample, Severity, Sink, Verdict
from trimtab.record.csv_sink import CsvSink, metrics
from trimtab.record.writer import RunWriter

__all__ = ["CallSink", "ConsoleSink", "CsvSink", "DiscardSink", "LoggerSink", "adapt", "is_main_process"]

BY_WORD = {"lines": "trimtab.compat.line_sink:from_text"}
"""Sinks that are asked for as `word:where` and live above this package: what makes one of them from `where`."""
LOGGERS = "trimtab.integrations.loggers.known_loggers"
"""Where experiment loggers are known, above this package: `is_logger`, `sink_for` and `from_text`."""
LOGGER_WORDS = ("wandb", "mlflow", "tensorboard")

_ACCEPTED = (
    "a Sink (write, close), an object with .log(dict) or .log_metrics(dict) such as a wandb run or a Lightning logger, "
    "an MLflow run, one with .add_scalar(tag, value, step) such as a SummaryWriter, a logging.Logger, a text stream, "
    'a function of one dict, or one of the texts "console", "csv:PATH", "jsonl:FOLDER", "lines:STYLE", "wandb", '
    '"mlflow", "tensorboard:FOLDER"'
)


def named_metrics(sample: Sample) -> dict[str, float]:
    """Metrics under names that two optimizers do not share."""
    prefix = f"{sample.optimizer}/" if sample.optimizer else ""
    return {prefix + name: value for name, value in metrics(sample).items()}


def _sample_text(sample: Sample) -> str:
    found = named_metrics(sample)
    wanted = [name for name in found if name.rsplit("/", 1)[-1] in {"loss", "global_norm", "lr", "ratio"}]
    return "  ".join([f"step {sample.step}", *(f"{name} {found[name]:.4g}" for name in wanted)])


class ConsoleSink:
    """One plain line per incident and per outcome, and per `every` steps one with the main numbers.

    Lines go to `stream` (standard error unless given), above any live tqdm bar. `said` is shared by the sinks of
    several guards that are not all to say the same.
    """

    def __init__(self, stream: TextIO | None = None, every: int = 0, *, said: Said | None = None) -> None:
        self._stream = stream
        self._every = every
        self._lines = IncidentLines(said)

    def write(self, record: Record) -> None:
        """Print what a person should know of."""
        if isinstance(record, Verdict):
            line = self._lines.of(record)
            if line is not None:
                advice = f" -> {line.finding.advice[0]}" if line.finding.advice else ""
                self._say(f"trimtab {line.severity.name}: {line}{advice}")
        elif isinstance(record, Outcome):
            became = self._lines.outcome(record)
            if became is not None:
                self._say(f"trimtab: {became}")
        elif isinstance(record, Sample) and self._every and record.step % self._every == 0:
            self._say(f"trimtab: {_sample_text(record)}")

    def close(self) -> None:
        """The stream is not ours; that this training has ended is news to those beside it."""
        self._lines.close()

    def _say(self, line: str) -> None:
        say(line, self._stream if self._stream is not None else sys.stderr)


def takes_step(log: Callable[..., object]) -> bool:
    """Whether a function to log with takes `step=`."""
    try:
        parameters = inspect.signature(log).parameters
    except (TypeError, ValueError):  # written in C: wandb's own convention is the best guess
        return True
    return "step" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


class LoggerSink:
    """Writes incidents to a `logging.Logger`: warnings at WARNING, worse at ERROR, outcomes at INFO."""

    def __init__(self, logger: logging.Logger | logging.LoggerAdapter[logging.Logger]) -> None:
        self._logger = logger
        self._lines = IncidentLines()

    def write(self, record: Record) -> None:
        """Log findings and outcomes; samples at DEBUG."""
        if isinstance(record, Verdict):
            line = self._lines.of(record)
            if line is not None:
                level = logging.WARNING if line.severity == Severity.WARN else logging.ERROR
                self._logger.log(level, "%s", line)
        elif isinstance(record, Outcome):
            became = self._lines.outcome(record)
            if became is not None:
                self._logger.log(logging.INFO, "%s", became)
        elif isinstance(record, Sample):
            self._logger.log(logging.DEBUG, "%s", _sample_text(record))

    def close(self) -> None:
        """Nothing: the logger belongs to the user."""


class CallSink:
    """Calls a function with one dict per sample (`step` and the metrics) and per finding."""

    def __init__(self, function: Callable[[dict[str, float | str]], object]) -> None:
        self._function = function

    def write(self, record: Record) -> None:
        """Call the function for samples and findings."""
        if isinstance(record, Sample):
            self._function({"step": record.step, **named_metrics(record)})
        elif isinstance(record, Verdict):
            for finding in record.findings:
                self._function({"step": record.step, f"health/{finding.code}": 1.0, "finding": str(finding)})

    def close(self) -> None:
        """Nothing to let go of."""


class DiscardSink:
    """Takes everything and does nothing: stands for a logger in the processes that do not log."""

    def write(self, record: Record) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def is_main_process() -> bool:
    """Whether this is the process of rank 0, or the only one: one logger gets each row once."""
    distributed = sys.modules.get("torch.distributed")  # whoever uses it has imported it
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    # A group may come later, and Lightning's children know only their place on this machine.
    return all(os.environ.get(name, "0") in ("", "0") for name in ("RANK", "LOCAL_RANK"))


def adapt(obj: object) -> Sink:
    """Turn what a user passed as a sink into one.

    Example:
        >>> adapt(print).__class__.__name__
        'CallSink'
    """
    if isinstance(obj, str):
        return _from_text(obj)
    if isinstance(obj, type):
        raise InputError(f"the class {obj.__name__} was given as a sink; pass an instance: {obj.__name__}(...)")
    if isinstance(obj, (logging.Logger, logging.LoggerAdapter)):  # before .log: theirs takes a level first
        return LoggerSink(obj)
    if isinstance(obj, io.TextIOBase) or any(obj is stream for stream in (sys.stdout, sys.stderr)):
        return ConsoleSink(stream=cast(TextIO, obj))  # before Sink: a stream has write and close, too
    if isinstance(obj, Sink):
        return obj
    loggers: Any = import_module(LOGGERS)
    if loggers.is_logger(obj):
        sink: Sink = loggers.sink_for(obj)
        return sink
    if callable(obj):
        return CallSink(obj)
    raise InputError(f"{type(obj).__name__} cannot be used as a sink; expected {_ACCEPTED}")


def with_preset_lines(config: Config, sinks: Iterable[object]) -> list[object]:
    """The sinks, and the lines of the preset in force unless lines were asked for in another way."""
    given = list(sinks)
    asked = any(getattr(s, "says_lines", False) or (isinstance(s, str) and s.startswith("lines:")) for s in given)
    if asked or config.preset is None or not get_preset(config.preset).lines:
        return given
    return [*given, f"lines:{config.preset}"]


def _from_text(text: str) -> Sink:
    kind, _, where = text.partition(":")
    if kind == "console" and not where:
        return ConsoleSink()
    if kind == "csv" and where:
        return CsvSink(where) if is_main_process() else DiscardSink()
    if kind in BY_WORD and where:
        module, _, name = BY_WORD[kind].partition(":")
        made: Sink = getattr(import_module(module), name)(where)
        return made
    if kind in LOGGER_WORDS:
        sink: Sink = import_module(LOGGERS).from_text(kind, where)
        return sink
    if kind == "jsonl" and where:
        return RunWriter(Path(where)) if is_main_process() else DiscardSink()
    raise InputError(f"{text!r} names no sink; expected {_ACCEPTED}")


def say(line: str, stream: TextIO) -> None:
    """Print one line to a stream without tearing a live tqdm bar apart; nothing in it acts on the terminal."""
    line = printable(line)
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is not None and len(getattr(bars, "_instances", ())) > 0:
        bars.write(line, file=stream)
        return
    stream.write(line + "\n")
    stream.flush()
