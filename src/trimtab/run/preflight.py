"""Runs the first steps of a script under observation, stops it, and runs the checks on what was recorded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from trimtab.core.errors import InputError
from trimtab.doctor.checklist import Report
from trimtab.doctor.examine import examine_seen
from trimtab.doctor.observed_step import Options, failure_of
from trimtab.doctor.probe import Probe
from trimtab.doctor.recording import Watch
from trimtab.doctor.target import Target
from trimtab.run.discover import Census, owners_of
from trimtab.run.script import Program, run_program
from trimtab.torchutil.optimizers import params_of
from trimtab.torchutil.patch import wrap_attribute

LEAST = 4
"""Steps that the checks need."""

P = ParamSpec("P")


class _Enough(BaseException):
    """Enough steps were seen. No `except Exception` of a script catches it."""


class Preflight:
    """Waits for the first optimizer and its model, and records from their first forward pass on."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.watch: Watch | None = None
        self.model: nn.Module | None = None
        self.optimizers: list[Optimizer] = []
        self._census = Census()
        self._stack = contextlib.ExitStack()
        self._steps = 0
        self.schedulers: list[LRScheduler] = []

    def start(self) -> None:
        """Install every wrapper and hook."""
        self._stack.callback(self._census.take())
        self._stack.callback(wrap_attribute(Optimizer, "__init__", self._built))
        self._stack.callback(wrap_attribute(LRScheduler, "__init__", self._scheduled))
        hook = nn.modules.module.register_module_forward_pre_hook(self._called)
        self._stack.callback(hook.remove)

    def stop(self) -> None:
        """Undo every wrapper and hook."""
        self._stack.close()

    def _built(
        self, inner: Callable[Concatenate[Optimizer, P], None], optimizer: Optimizer, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        inner(optimizer, *args, **kwargs)
        self.optimizers.append(optimizer)
        if self.watch is not None:
            self.watch.know(optimizer)

    def _scheduled(
        self,
        inner: Callable[Concatenate[LRScheduler, P], None],
        scheduler: LRScheduler,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        inner(scheduler, *args, **kwargs)
        self.schedulers.append(scheduler)

    def _called(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """The first call of the model that the optimizers move."""
        if self.watch is not None or not self.optimizers:
            return
        params = params_of(*self.optimizers)
        mine = {id(p) for p in params}
        if not any(id(p) in mine for p in module.parameters()):
            return
        self.model = owners_of(params, self._census.modules())[-1]
        if not any(part is module for part in self.model.modules()):
            self.model = module
        schedulers = tuple(self.schedulers)
        self.watch = Watch(self.model, self.optimizers, schedulers, before_forward=self._before_forward)
        self.watch.begin()
        self._stack.enter_context(self.watch.listening())
        self.watch.enter(module, args)  # its hook was added too late for this call

    def _before_forward(self) -> None:
        """A forward pass begins: begin a new call after each step, and end the script after enough of them."""
        assert self.watch is not None
        stepped = [e for e in self.watch.now.events if e.kind in ("step", "scaler-step")]
        if not stepped:
            return
        self._steps += 1
        if self._steps >= max(self.options.max_steps, LEAST):
            raise _Enough
        self.watch.begin()


def examine_script(
    program: Program, options: Options, *, select: tuple[str, ...], ignore: tuple[str, ...]
) -> tuple[Report, Target]:
    """Run a script until enough steps were seen; returns the report and what it trained.

    Raises:
        InputError: The script trained nothing, or ended too early.
    """
    preflight = Preflight(options)
    preflight.start()
    failure: Exception | None = None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the report alone is ours to print
            run_program(program)
    except _Enough:
        pass
    except SystemExit as end:
        if end.code:
            raise InputError(f"{program.target} ended with exit code {end.code} before enough was seen") from None
    except Exception as error:
        failure = error
    finally:
        preflight.stop()
    watch, model = preflight.watch, preflight.model
    if watch is None or model is None:
        if failure is not None:
            raise InputError(
                f"{program.target} raised {type(failure).__name__}: {failure} before it trained anything"
            ) from failure
        raise InputError(f"{program.target} stepped no PyTorch optimizer; expected a script that trains")
    if failure is not None:
        watch.now.failure = failure_of(failure, watch.now, watch)
    probe = Probe.of_recording(model, preflight.optimizers, watch, options, tuple(preflight.schedulers))
    return examine_seen(probe, select=select, ignore=ignore), probe.target
