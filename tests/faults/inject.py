"""The tools faults are made with: how a case is declared, where the parts of a family are, how a loop is changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.faults.base import STEPS, Case, Run
from trimtab.drill import injection
from trimtab.drill.injection import alter as alter
from trimtab.drill.injection import alter_once as alter_once

ONSET = 60
ALL = ("mlp", "cnn", "rnn", "lm", "contrastive", "segment")
REAL = ("mlp", "cnn", "contrastive", "segment")  # the inputs are real numbers, not tokens
CLASSES = ("mlp", "cnn", "rnn", "lm")
NORMED = ("cnn", "segment")  # with BatchNorm
MOODY = ("cnn", "rnn", "lm", "segment")  # training and evaluation mode differ

BODY = {"mlp": "2", "cnn": "3", "rnn": "cell", "lm": "blocks.0", "contrastive": "right.0", "segment": "down"}
HEAD = {"mlp": "4", "cnn": "6", "rnn": "head", "lm": "head", "contrastive": "right.2", "segment": "head"}
WEIGHT = {
    "mlp": "2.weight",
    "cnn": "3.0.weight",
    "rnn": "cell.weight_hh_l0",
    "lm": "blocks.0.linear1.weight",
    "contrastive": "right.0.weight",
    "segment": "down.0.weight",
}

Part = Callable[[Run], None]


def fault(
    table: dict[str, Case],
    group: str,
    kind: str,
    *names: str,
    at: int | None = None,
    since: int | None = None,
    onset: int | None = None,
    setup: Part | None = None,
    families: tuple[str, ...] = ALL,
    steps: int = STEPS,
    config: dict[str, Any] | None = None,
    silent: bool = False,
) -> Callable[[Part], Part]:
    """List a fault under its function's name: done before the run, or at one step, or at every step since one.

    `setup` is the healthy part, done before the run; `onset` is given where it is not that of `at` or `since`.
    """

    def declare(part: Part) -> Part:
        name = part.__name__.replace("_", "-")
        case = Case(
            name, group, names=names, kind=kind, families=families, steps=steps, config=config or {},
            doc=part.__doc__ or "", always_harmful=silent,
        )  # fmt: skip
        if setup is not None:
            case.prepare = setup
        if at is not None:
            case.at, case.onset = lambda run: part(run) if run.step == at else None, at
        elif since is not None:
            case.at, case.onset = lambda run: part(run) if run.step >= since else None, since
        else:
            case.prepare = part
        case.onset = case.onset if onset is None else onset
        assert name not in table
        table[name] = case
        return part

    return declare


def body(run: Run) -> nn.Module:
    """A layer in the middle of the model."""
    return run.model.get_submodule(BODY[run.task.family])


def head(run: Run) -> nn.Module:
    """The last layer of the model."""
    return run.model.get_submodule(HEAD[run.task.family])


def replace_head(run: Run, new: nn.Module) -> None:
    """Put another module in the place of the last layer."""
    run.model.set_submodule(HEAD[run.task.family], new)


def weight(run: Run) -> nn.Parameter:
    """A weight in the middle of the model."""
    return run.model.get_parameter(WEIGHT[run.task.family])


def first_half(run: Run) -> list[nn.Parameter]:
    """The first half of the parameters."""
    params = list(run.model.parameters())
    return params[: len(params) // 2]


def before(run: Run, part: str, extra: Callable[[], object]) -> None:
    """From now on, do something before a part of the loop."""
    original = getattr(run, part)

    def both(*args: Any) -> Any:
        extra()
        return original(*args)

    setattr(run, part, both)


def put(index: Any, value: float) -> Callable[[Tensor], Tensor]:
    """Write a value into a tensor."""

    def write(x: Tensor) -> Tensor:
        x[index] = value
        return x

    return write


def inputs(change: Callable[[Tensor], Tensor]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A change of a batch's first tensor, which does not touch the stored data."""
    return lambda batch: (change(batch[0].clone()), *batch[1:])


def targets(change: Callable[[Tensor], Tensor]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A change of a batch's second tensor, which does not touch the stored data."""
    return lambda batch: (batch[0], change(batch[1].clone()), *batch[2:])


def scale_lr(run: Run, factor: float) -> None:
    """Multiply the rate of every group."""
    injection.scale_lr(run.optimizer, factor)


def rebuild(run: Run, kind: type[Any] | None = None, params: Any = None, **changes: Any) -> None:
    """A new optimizer, of the same kind and settings unless told otherwise."""
    old = run.optimizer
    known = inspect.signature(type(old)).parameters if kind is None else {}
    kept = {key: value for key, value in old.defaults.items() if key in known}
    run.optimizer = (kind or type(old))(run.model.parameters() if params is None else params, **kept | changes)


def moments(run: Run) -> list[Tensor]:
    """What the optimizer remembers of past gradients."""
    return injection.moments(run.optimizer)


def squares(run: Run) -> list[Tensor]:
    """What the optimizer divides by, or its momentum where it divides by nothing."""
    return injection.squares(run.optimizer)
