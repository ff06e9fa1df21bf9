"""WIRE019: outputs and targets of different shapes are broadcast against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.doctor.batch_tensors import fresh
from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe
from trimtab.doctor.target import raw_loss


class LossBroadcast:
    """Outputs and targets of different shapes are broadcast against each other.

    ## What it means
    `[B, 1]` minus `[B]` is `[B, B]`: each prediction is compared with every target, and the model learns their mean.

    ## How it is checked
    PyTorch's own warning, and one look at every subtraction of a step in which a column meets a row.

    ## What to try
    1. `output.squeeze(-1)`, or `y.unsqueeze(-1)`.
    """

    code: ClassVar[str] = "WIRE019"
    name: ClassVar[str] = "loss-broadcast"
    title: ClassVar[str] = "outputs and targets pair up"
    causes: ClassVar[tuple[str, ...]] = ("targets-do-not-predict", "not-learning", "initial-loss")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report outputs and targets that are broadcast."""
        warning = next((w for c in probe.calls for w in c.warnings if w.startswith("Using a target size")), "")
        seen = broadcasts(probe) if not warning and probe.through else []
        if warning or seen:
            yield failed(
                self,
                "outputs and targets of different shapes are broadcast against each other.",
                warning.partition(". This will")[0][:160] or (seen or [""])[0],
                "loss = loss_fn(output.squeeze(-1), y)",
                ("loss",),
            )
        elif not probe.through:
            yield not_applicable(self, probe.no_steps)
        elif seen is None:
            yield not_applicable(self, "the step cannot run while every operation is watched")
        else:
            yield passed(self, "no column meets a row in the loss")


class _Columns(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes subtractions of a column [B, 1] and a row [B], of which one has a graph and the other has not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        pair = [a for a in args[:2] if isinstance(a, Tensor)]
        if len(pair) == 2 and func.overloadpacket.__name__ in ("sub", "rsub"):
            a, b = sorted(pair, key=Tensor.dim, reverse=True)
            if a.dim() == 2 and b.dim() == 1 and a.shape[1] == 1 and a.shape[0] == b.shape[0] > 1:
                self.seen.append(f"{tuple(a.shape)} minus {tuple(b.shape)} gives {(a.shape[0], b.shape[0])}")
        return func(*args, **(kwargs or {}))


def broadcasts(probe: Probe) -> list[str] | None:
    """Where a column meets a row in a step; None where it could not be looked at."""
    mode = _Columns()
    try:
        with probe.trial(rates=False), mode:
            raw_loss(probe.target, fresh(probe.batch(0)))
    except Exception:
        return None
    return mode.seen
