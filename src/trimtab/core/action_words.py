"""Actions as a person reads them: what is done, to what, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.core.types import Action

Args = Mapping[str, float]


def in_words(action: Action) -> str:
    """An action in words; one of somebody else's making by its name and its numbers.

    Example:
        >>> from trimtab.core.types import Action
        >>> print(Action(kind="rewind", args={"before": 48, "back": 0, "limit": 1}))
        roll the weights back to before step 48, at the learning rate of then
        >>> print(Action(kind="cut_lr", args={"factor": 0.5}))
        multiply the learning rate by 0.5
        >>> print(Action(kind="freeze_layers", args={"first": 3}))
        freeze layers (first 3)
    """
    words = _WORDS.get(action.kind)
    if words is not None:
        return words(action.args)
    numbers = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in action.args.items())
    return action.kind.replace("_", " ") + (f" ({numbers})" if numbers else "")


def _rewind(args: Args) -> str:
    when = f"to before step {int(args['before'])}" if "before" in args else "to before the trouble"
    if args.get("buffers"):
        return f"put the buffers back {when}"
    back = int(args.get("back", 0))
    older = f", {back} state{'' if back == 1 else 's'} further back than the last good one" if back > 0 else ""
    return f"roll the weights back {when}{older}{', at the learning rate of then' if args.get('limit') else ''}"


def _cut_lr(args: Args) -> str:
    text = f"multiply the learning rate by {args.get('factor', 0.5):g}"
    after = args.get("after_rewind")
    if after is None:
        return text
    return text + (", unless the weights went back" if after == 1.0 else f" (by {after:g} if the weights went back)")


_WORDS: Mapping[str, Callable[[Args], str]] = {
    "skip": lambda args: "skip the update",
    "stop": lambda args: "stop the training",
    "skip_data": lambda args: "put the samples of the batch aside",
    "rewind": _rewind,
    "cut_lr": _cut_lr,
    "back_off_scaler": lambda args: f"multiply the loss scale by {args.get('factor', 0.5):g}",
    "raise_weight_decay": lambda args: f"multiply the weight decay by {args.get('factor', 1.5):g}",
}
