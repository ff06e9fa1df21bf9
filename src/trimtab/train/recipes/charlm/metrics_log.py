"""The documented metrics file of a language model, `training_metrics.jsonl`, and Weights & Biases beside it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from trimtab.core.errors import InputError
from trimtab.core.types import Record, Sample


class WandbRun(Protocol):
    """What is used of a wandb run."""

    def log(self, data: dict[str, object], step: int) -> object:
        """Log values of a step."""
        ...

    def finish(self) -> object:
        """End the run."""
        ...


class MetricsLog:
    """A sink that writes one JSON object a line: `init`, then a step with its metrics every so often, then `finish`.

    `path` may be None if only a wandb run is used. `steps_per_epoch` gives the epoch of a step. `run` is a wandb
    run that gets the same numbers. What JSON lacks (NaN, Inf) is null. With `resumed` the lines of earlier steps
    stay, and those from the first step on that comes are written again.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "training_metrics.jsonl"
        ...     metrics = MetricsLog(path, {"base_lr": 5e-5}, steps_per_epoch=100)
        ...     metrics.text(0, "the forest", "the forest is")
        ...     metrics.finish()
        ...     lines = path.read_text().splitlines()
        >>> lines[0]
        '{"command": "init", "config": {"base_lr": 5e-05}}'
        >>> lines[-1]
        '{"command": "finish"}'
    """

    def __init__(
        self,
        path: Path | None,
        config: Mapping[str, object],
        *,
        steps_per_epoch: int,
        every: int = 10,
        run: WandbRun | None = None,
        resumed: bool = False,
    ) -> None:
        self._earlier = _lines_of(path) if resumed and path is not None else []
        self._per_epoch, self._every, self._run = max(steps_per_epoch, 1), every, run
        self._began = time.monotonic()
        self._epoch, self._sum, self._num, self._step = 0, 0.0, 0, 0
        self._last_step = 0
        self._done, self._file = False, None if path is None else _opened(path)
        self._put({"command": "init", "config": dict(config)})

    def write(self, record: Record) -> None:
        """Add a training step."""
        if not isinstance(record, Sample) or record.phase != "train" or "loss" not in record.scalars:
            return
        self._continue_at(record.step)
        scalars, epoch = record.scalars, record.step // self._per_epoch
        if epoch != self._epoch:
            self._end_epoch()
            self._epoch = epoch
        self._step = record.step
        if math.isfinite(scalars["loss"]):
            self._sum, self._num = self._sum + scalars["loss"], self._num + 1
        if record.step % self._every == 0:
            rate = scalars.get("lr/0", math.nan) * scalars.get("lr_multiplier", 1.0)
            self._metrics(
                record.step,
                {"train/loss": scalars["loss"], "train/learning_rate": rate, "train/epoch": epoch + 1},
            )

    def text(self, step: int, prompt: str, sample: str) -> None:
        """A sample of text."""
        self._put({"step": step, "metrics": {"samples/prompt": prompt, "samples/text": sample}})
        if self._run is not None:
            self._run.log({f"samples/{prompt}": sample}, step=self._forward(step))  # one line for each prompt

    def close(self) -> None:
        """End the last epoch; samples of text may still come."""
        self._end_epoch()

    def finish(self) -> None:
        """Finish the file, once; the wandb run is finished with it."""
        if self._done:
            return
        self._done = True
        self._end_epoch()
        self._metrics(self._step, {"train/total_time_seconds": round(time.monotonic() - self._began, 3)})
        self._put({"command": "finish"})
        if self._file is not None:
            self._file.close()
        if self._run is not None:
            self._run.finish()

    def _end_epoch(self) -> None:
        if self._num:
            self._metrics(self._step, {"train/epoch_avg_loss": self._sum / self._num})
        self._sum, self._num = 0.0, 0

    def _metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put({"step": step, "metrics": metrics})
        if self._run is not None:
            self._run.log(dict(metrics), step=self._forward(step))

    def _forward(self, step: int) -> int:
        """The step, or the last one that was logged: wandb drops values of earlier steps."""
        self._last_step = max(self._last_step, step)
        return self._last_step

    def _continue_at(self, step: int) -> None:
        """Write the lines that were there before the run was resumed at this step."""
        earlier, self._earlier = self._earlier, []
        for line in earlier:
            if isinstance(line.get("step"), int) and line["step"] < step:
                self._put(line)
        if earlier:
            self._epoch = step // self._per_epoch

    def _put(self, line: Mapping[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(_plain(line), ensure_ascii=False) + "\n")
            self._file.flush()


def _lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may have been cut off; none where there is no file."""
    found: list[dict[str, Any]] = []
    if not path.is_file():
        return found
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            break
        found += [one] if isinstance(one, dict) else []
    return found


def _opened(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"the metrics file {path} cannot be written: {error}; give another path") from None


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
