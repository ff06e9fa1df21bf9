"""`sink_for`: which logger an object is, and the sink that logs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.types import Sink
from trimtab.integrations.loggers.any_logger import AnyLoggerTarget
from trimtab.integrations.loggers.metric_sink import STEP, MetricSink, Target
from trimtab.integrations.loggers.mlflow_logger import MlflowTarget, is_mlflow_client, mlflow_module, run_id_of
from trimtab.integrations.loggers.tensorboard_logger import TensorBoardTarget, open_writer
from trimtab.integrations.loggers.wandb_logger import WandbTarget, is_wandb_run, open_wandb, wandb_module
from trimtab.record.sinks import DiscardSink, is_main_process

LIGHTNING_AXIS = "trainer/global_step"
"""What Lightning's WandbLogger plots everything over."""


def sink_for(logger: object, *, axis: str | None = None, step_of: Callable[[int], int] | None = None) -> Sink:
    """The sink that logs to a logger you already have; in other processes than that of rank 0 one that does nothing.

    `logger` is a wandb run, the modules `wandb` or `mlflow`, an MLflow run or client, a pair of client and run id, a
    `SummaryWriter`, a logger of Lightning, a tracker of Accelerate, or any object with `.log(dict)`,
    `.log_metrics(dict, step)` or `.add_scalar(tag, value, step)`. `step_of` turns the guard's steps into those of your
    framework; `axis` is the name of its step axis in wandb.

    Example:
        >>> import numpy as np
        >>> from trimtab.core.types import Layout, Sample
        >>> from trimtab.integrations.loggers import sink_for
        >>> class Mine:
        ...     def log(self, values):
        ...         print(values)
        >>> sink = sink_for(Mine(), step_of=lambda step: 10 * step)
        >>> empty = Layout(names=(), kinds=(), numel=())
        >>> sink.write(Sample(step=3, layout=empty, table=np.empty((0, 7), np.float32), scalars={"loss": 2.0}))
        {'trimtab/loss': 2.0, 'trimtab/step': 30}
    """
    if not is_main_process():
        return DiscardSink()
    return MetricSink(target_for(logger, axis=axis), step_of=step_of)


def tags_for(logger: object) -> Callable[[Mapping[str, float], int], None] | None:
    """What sends values under names of their own to a logger that drops rows with an older `step=`; else None."""
    if isinstance(logger, ModuleType) and logger.__name__ != "wandb":
        return None
    if isinstance(logger, ModuleType) or is_wandb_run(logger) or hasattr(type(logger), "experiment"):
        target = target_for(logger)
        return target.tags if isinstance(target, WandbTarget) else None
    return None


def is_logger(obj: object) -> bool:
    """Whether `sink_for` knows what to do with it."""
    if isinstance(obj, tuple):
        return len(obj) == 2 and is_mlflow_client(obj[0]) and isinstance(obj[1], str)
    methods = ("add_scalar", "log_metrics", "log", "log_batch")
    return any(callable(getattr(obj, name, None)) for name in methods) or run_id_of(obj) is not None


def target_for(logger: object, *, axis: str | None = None) -> Target:
    """The target for a logger; InputError where it is none."""
    if isinstance(logger, ModuleType):
        return _of_module(logger, axis)
    if isinstance(logger, tuple) and is_logger(logger):
        return MlflowTarget(logger[0], logger[1])
    if is_wandb_run(logger):
        return WandbTarget(logger, axis=axis or STEP)
    if is_mlflow_client(logger):
        return MlflowTarget.active(logger)
    run_id = run_id_of(logger)
    if run_id is not None:
        return MlflowTarget(mlflow_module().MlflowClient(), run_id)
    if callable(getattr(logger, "add_scalar", None)):
        return TensorBoardTarget(logger)
    return _of_wrapper(logger, axis) or _of_any(logger)


def _of_module(module: ModuleType, axis: str | None) -> Target:
    if module.__name__ == "wandb":
        run = getattr(module, "run", None)
        owned = run is None
        return WandbTarget(open_wandb(None) if owned else run, axis=axis or STEP, owned=owned)
    if module.__name__ == "mlflow":
        return MlflowTarget.active()
    return _of_any(module)


def _of_wrapper(logger: object, axis: str | None) -> Target | None:
    """A framework's logger around one of those above; by its own method it would be called from the wrong thread."""
    kind = type(logger)
    if callable(getattr(logger, "log_metrics", None)) and hasattr(kind, "experiment"):  # Lightning
        inner: Any = logger.experiment  # type: ignore[attr-defined]
        run_id = getattr(logger, "run_id", None)
        if is_mlflow_client(inner) and isinstance(run_id, str):
            return MlflowTarget(inner, run_id)
        if is_wandb_run(inner):
            return WandbTarget(inner, axis=axis or LIGHTNING_AXIS)
        if callable(getattr(inner, "add_scalar", None)):
            return TensorBoardTarget(inner)
    if callable(getattr(logger, "store_init_configuration", None)) and hasattr(kind, "tracker"):  # Accelerate
        inner = logger.tracker  # type: ignore[attr-defined]
        if inner is not logger and is_logger(inner):
            return target_for(inner, axis=axis)
    return None


def _of_any(logger: object) -> Target:
    if not is_logger(logger):
        raise InputError(
            f"{type(logger).__name__} is no logger that is known; expected a wandb run, an MLflow run or client, a "
            "SummaryWriter, or an object with .log(dict), .log_metrics(dict, step) or .add_scalar(tag, value, step)"
        )
    return AnyLoggerTarget(logger)


def from_text(kind: str, where: str) -> Sink:
    """The sink for `wandb`, `wandb:PROJECT`, `mlflow`, `mlflow:EXPERIMENT` or `tensorboard:FOLDER`.

    The run that is active is used; where there is none, one of its own is begun, and ends with the guard.
    """
    if not is_main_process():
        return DiscardSink()
    if kind == "tensorboard":
        return MetricSink(TensorBoardTarget(open_writer(where or "tensorboard"), owned=True))
    if kind == "mlflow":
        return MetricSink(MlflowTarget.active(experiment=where or None))
    run = wandb_module().run
    owned = run is None
    return MetricSink(WandbTarget(open_wandb(where or "trimtab") if owned else run, owned=owned))
