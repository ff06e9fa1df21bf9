"""Calls of dropout functions while a model runs: those that really draw, or none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.overrides import TorchFunctionMode

DROPS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
ATTENTION = "scaled_dot_product_attention"


class DrawnDropout(TorchFunctionMode):
    """Notes every functional dropout that is really drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in DROPS:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            if p and training:
                self.seen.append(f"F.{name} with p = {p} and training = {training}")
        elif name == ATTENTION:
            p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if p:
                self.seen.append(f"scaled_dot_product_attention with dropout_p = {p}")
        return func(*args, **kwargs)


class WithoutDropout(TorchFunctionMode):
    """Nothing is dropped: what is still random under it is drawn by the training itself."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in DROPS and args:
            return args[0]
        if name == ATTENTION and len(args) < 5:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
