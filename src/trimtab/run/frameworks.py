"""Programs in which a framework drives the training: what its callback would tell a guard is told under `run`, too.

While a framework trains, its `GuardCallback` is one of its callbacks. It is there before the first batch, leaves no
trace in the framework's checkpoints, and is taken out again. What a framework has no callbacks for is seen otherwise:
losses where `backward` is called, and the evaluations of Ignite when they end.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from trimtab.core.errors import MissingPackageError, TrimtabError
from trimtab.run.children import when_imported

if TYPE_CHECKING:
    from trimtab.guard.guard import Guard

log = logging.getLogger("trimtab")


class Driver(Protocol):
    """What the callbacks need of the one that guards a program."""

    def attach(self, model: Any, optimizer: Any, **found: Any) -> Guard | None:
        """Guard a training whose losses will be told; None if that fails."""
        ...

    def validated(self, metrics: dict[str, Any]) -> None:
        """Tell the training under way what a validation found."""
        ...

    @property
    def mode(self) -> str:
        """The mode of its guards."""
        ...

    @property
    def rejects(self) -> bool:
        """Whether an update that is not finite is rejected."""
        ...

    @property
    def num_steps(self) -> int:
        """How many steps were made so far."""
        ...


def watch_frameworks(driver: Driver) -> Callable[[], None]:
    """Add callbacks to every training of a framework from now on; returns the undo function.

    A release of a framework in which something is not where it used to be is trained with as any other loop.
    """
    undo: list[Callable[[], None]] = []
    over: list[bool] = []

    def watch(module: str, kind: str, method: str, around: Callable[..., Any]) -> None:
        def patch() -> None:
            from trimtab.torchutil.patch import wrap_attribute

            home = getattr(sys.modules.get(module), kind, None)
            if not over and callable(getattr(home, method, None)):
                undo.append(wrap_attribute(home, method, functools.partial(around, driver)))

        when_imported(module, patch)

    for seam in SEAMS:
        watch(*seam)

    def stop() -> None:
        over.append(True)
        for back in undo:
            back()
        undo.clear()

    return stop


def _callback(
    driver: Driver, integration: str, theirs: Iterable[object], name: str = "GuardCallback", **more: Any
) -> Any:
    """A callback of ours; None where the program has one already, or where ours cannot be made."""
    try:
        kind = getattr(import_module(f"trimtab.integrations.{integration}"), name)
        if any(isinstance(one, kind) for one in theirs):
            return None
        return kind(attach=driver.attach, **more)
    except MissingPackageError:
        return None
    except Exception as error:
        log.warning("%s: its callback cannot be added (%s); it is guarded as any other loop", integration, error)
        return None


def _lightning(driver: Driver, inner: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """`Trainer._run`: in every process that trains, however it was started."""
    fitting = getattr(getattr(trainer, "state", None), "fn", None) == "fit"
    callback = _callback(driver, "lightning", trainer.callbacks) if fitting else None
    if callback is None:
        return inner(trainer, *args, **kwargs)
    trainer.callbacks = [callback, *trainer.callbacks]
    try:
        return inner(trainer, *args, **kwargs)
    except BaseException as error:
        callback.on_exception(trainer, None, error)
        raise
    finally:
        trainer.callbacks = [one for one in trainer.callbacks if one is not callback]


def _fabric(driver: Driver, inner: Callable[..., Any], fabric: Any, *args: Any, **kwargs: Any) -> Any:
    """`Fabric.clip_gradients`, which raises on NaN unless told otherwise: it is rejected and named instead."""
    if driver.rejects and len(args) < 6:
        kwargs.setdefault("error_if_nonfinite", False)
    return inner(fabric, *args, **kwargs)


def _huggingface(driver: Driver, inner: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """`Trainer.train`."""
    handler = trainer.callback_handler
    callback = _callback(driver, "huggingface", handler.callbacks, "BareCallback", trainer=trainer)
    if callback is None:
        return inner(trainer, *args, **kwargs)
    handler.callbacks.insert(0, callback)
    try:
        return inner(trainer, *args, **kwargs)
    finally:
        handler.callbacks[:] = [one for one in handler.callbacks if one is not callback]


def _fastai(driver: Driver, inner: Callable[..., Any], learner: Any, *args: Any, **kwargs: Any) -> Any:
    """`Learner.fit`."""
    given = args[3] if len(args) > 3 else kwargs.get("cbs")
    callback = _callback(driver, "fastai", [*learner.cbs, *_several(given)])
    with contextlib.nullcontext() if callback is None else learner.added_cbs(callback):
        return inner(learner, *args, **kwargs)


def _keras(driver: Driver, inner: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """`Model.fit` on PyTorch; its callbacks are the sixth argument."""
    given: Any = args[5] if len(args) > 5 else kwargs.get("callbacks")
    try:
        import_module("trimtab.integrations.keras").check_keras(model.optimizer)
        callback = _callback(driver, "keras", getattr(given, "callbacks", None) or _several(given))
        if callback is not None and driver.mode == "act":
            log.warning("Keras: its optimizers cannot be rolled back; mode 'advise' is used instead of 'act'")
            callback = type(callback)(attach=functools.partial(driver.attach, mode="advise"))
    except Exception as error:
        log.warning("not guarded: %s", error)
        callback = None
    if callback is None:
        return inner(model, *args, **kwargs)
    if hasattr(given, "append") and hasattr(given, "callbacks"):
        given.append(callback)  # a list of callbacks that the program made itself
    elif len(args) > 5:
        args = (*args[:5], [*_several(given), callback], *args[6:])
    else:
        kwargs["callbacks"] = [*_several(given), callback]
    return inner(model, *args, **kwargs)


def _several(given: Any) -> Iterator[Any]:
    if given is not None:
        yield from given if isinstance(given, Iterable) else (given,)


def _ignite(driver: Driver, inner: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """`Engine.run`: one that makes no step, on other data than the one around it, is a validation."""
    before, around = driver.num_steps, _ENGINES[-1] if _ENGINES else None
    _ENGINES.append(engine)
    try:
        out = inner(engine, *args, **kwargs)
    finally:
        _ENGINES.pop()
    try:
        if around is not None and driver.num_steps == before > 0 and _data(engine) is not _data(around):
            driver.validated({f"val_{key}": value for key, value in engine.state.metrics.items()})
    except TrimtabError:
        raise
    except Exception as error:
        log.warning("Ignite: an evaluation was not seen (%s)", error)
    return out


_ENGINES: list[Any] = []
"""The engines that run, the inmost last."""


def _data(engine: Any) -> Any:
    loader = engine.state.dataloader
    return getattr(loader, "dataset", loader)


SEAMS: tuple[tuple[str, str, str, Callable[..., Any]], ...] = (
    ("lightning.pytorch.trainer.trainer", "Trainer", "_run", _lightning),
    ("pytorch_lightning.trainer.trainer", "Trainer", "_run", _lightning),
    ("lightning.fabric.fabric", "Fabric", "clip_gradients", _fabric),
    ("lightning_fabric.fabric", "Fabric", "clip_gradients", _fabric),
    ("transformers.trainer", "Trainer", "train", _huggingface),
    ("fastai.learner", "Learner", "fit", _fastai),
    ("keras.src.backend.torch.trainer", "TorchTrainer", "fit", _keras),
    ("ignite.engine.engine", "Engine", "run", _ignite),
)
"""Module, class and method in which a training runs, and what is called around it."""
