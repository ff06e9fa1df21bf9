"""`NWayLoss`: the loss as a module that owns its scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack, cast

import torch
from torch import Tensor

from trimtab.losses.cost import BACKENDS, OBJECTIVES
from trimtab.losses.nway import LossSettings, NWayOutput, nway_loss
from trimtab.losses.problem import NORMALIZE, PRECISION, check_name, check_smoothing
from trimtab.losses.similarity import SIMILARITIES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["NWayLoss", "initial_scale"]


def initial_scale(similarity: str, normalize: str | None = "auto", modalities: int | None = None) -> float:
    """A scale to begin with: 1/0.07 for what lives on cosines, 1 for the rms ``mip`` of more than two modalities.

    The rms product of N equal rows is about ``(N-1)!! = 1 3 5 .. (N-1)`` for even N (the moments of a normal variable),
    about 0 of either sign for odd N, and that of unrelated rows is tiny: a scale of 1 already separates six equal rows
    from others. Smaller ones learn slowly (benchmarks/results/nway_training_*.md).

    Example:
        >>> initial_scale("norm") == 1 / 0.07, initial_scale("mip", modalities=6)
        (True, 1.0)
    """
    if similarity != "mip" or modalities == 2 or normalize not in ("auto", "rms"):
        return 1 / 0.07
    return 1.0


class ModuleSettings(LossSettings, total=False):
    """The arguments of `nway_loss` that a module takes when it is built."""

    details: bool


class NWayLoss(torch.nn.Module):
    """`nway_loss` with a scale that is learned, kept as its logarithm and never above ``max_scale``.

    The bound acts on the parameter itself at the start of a training forward, as in CLIP, and its gradient is left
    alone there: a scale at the bound comes back as soon as the loss wants it to. A NaN stays one and shows in the loss.

    Args:
        similarity: as `nway_loss`.
        objective: as `nway_loss`.
        modalities: how many there will be, to be checked; two of them begin ``mip`` with the scale of CLIP.
        init_scale: None: `initial_scale`.
        max_scale: upper bound of the scale.
        learnable: a parameter ``log_scale``, or a constant.
        init_bias: of ``sigmoid``: the first value of the parameter ``bias``.
        **settings: whatever else `nway_loss` takes: ``anchors``, ``normalize``, ``precision``, ``backend``,
            ``label_smoothing``, ``reduction``, ``num_samples``, ``chunk``, ``budget_s``, ``budget_bytes``, ``details``.

    Example:
        >>> import torch
        >>> from trimtab.losses import NWayLoss
        >>> criterion = NWayLoss("norm", "full")
        >>> loss = criterion(torch.randn(4, 16), torch.randn(4, 16), torch.randn(4, 16))
        >>> loss.backward()
        >>> criterion.log_scale.grad is not None, f"{criterion.scale.item():.2f}"
        (True, '14.29')
        >>> criterion
        NWayLoss(similarity='norm', objective='full', scale=14.29, max_scale=100)
    """

    log_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        similarity: str = "mip",
        objective: str = "axis",
        *,
        modalities: int | None = None,
        init_scale: float | None = None,
        max_scale: float = 100.0,
        learnable: bool = True,
        init_bias: float = -10.0,
        **settings: Unpack[ModuleSettings],
    ) -> None:
        super().__init__()
        check_name("similarity", similarity, SIMILARITIES)
        check_name("objective", objective, OBJECTIVES)
        check_name("normalize", settings.get("normalize", "auto"), NORMALIZE)
        check_name("precision", settings.get("precision", "auto"), PRECISION)
        check_name("backend", settings.get("backend", "auto"), BACKENDS)
        check_smoothing(settings.get("label_smoothing", 0.0), objective)
        for name in settings:
            check_name("a setting of NWayLoss", name, ModuleSettings.__annotations__)
        scale = init_scale
        if scale is None:
            scale = min(initial_scale(similarity, settings.get("normalize", "auto"), modalities), max_scale)
        if not 0 < scale <= max_scale < math.inf:
            raise ValueError(f"init_scale is {scale}, max_scale {max_scale}; expected 0 < init_scale <= max_scale.")
        self.similarity, self.objective, self.modalities = similarity, objective, modalities
        self.max_scale, self.settings = float(max_scale), settings
        value = torch.tensor(math.log(scale))
        if learnable:
            self.log_scale = torch.nn.Parameter(value)
        else:
            self.register_buffer("log_scale", value)
        self.bias = torch.nn.Parameter(torch.tensor(float(init_bias))) if objective == "sigmoid" else None

    @property
    def scale(self) -> Tensor:
        """The factor of the logits: ``exp(log_scale)``, at most ``max_scale``, differentiable at the bound too."""
        scale: Tensor = _Bounded.apply(self.log_scale, math.log(self.max_scale)).exp()  # type: ignore[no-untyped-call]
        return scale

    def forward(
        self,
        *xs: Tensor | Sequence[Tensor],
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        group: ProcessGroup | None = None,
    ) -> Tensor | NWayOutput:
        """The loss of N modalities ``[B, D]``, given one by one or as one list."""
        rows = cast(Sequence[Tensor], xs[0] if len(xs) == 1 else xs)
        if self.modalities is not None and len(rows) != self.modalities:
            raise ValueError(f"the loss was made for {self.modalities} modalities and got {len(rows)}.")
        if self.training:
            with torch.no_grad():
                self.log_scale.clamp_(max=math.log(self.max_scale))
        return nway_loss(
            rows,
            similarity=self.similarity,
            objective=self.objective,
            logit_scale=self.scale,
            logit_bias=self.bias,
            mask=mask,
            generator=generator,
            group=group,
            **self.settings,
        )

    def extra_repr(self) -> str:
        """Similarity, objective, scale now, and what was set."""
        known = {"similarity": self.similarity, "objective": self.objective}
        scale = f"scale={self.scale.item():.4g}, max_scale={self.max_scale:g}"
        extra = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        return ", ".join(f"{name}={value!r}" for name, value in known.items()) + f", {scale}{extra}"


class _Bounded(torch.autograd.Function):
    """``min(x, bound)`` with the gradient of ``x``: what is at the bound must be able to leave it."""

    @staticmethod
    def forward(ctx: object, x: Tensor, bound: float) -> Tensor:
        return x.clamp(max=bound)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
