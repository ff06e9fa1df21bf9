"""The modules that a loop calls: the model itself, or its parts where it only holds them together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn


class Parts(nn.Module):
    """Stands in for a model that exists only as modules side by side, under their names; it is never called.

    Example:
        >>> model = Parts({"maker": nn.Linear(2, 1), "critic": nn.Linear(1, 1)})
        >>> [name for name, _ in model.named_parameters()]
        ['maker.weight', 'maker.bias', 'critic.weight', 'critic.bias']
        >>> model.title
        'maker (Linear), critic (Linear)'
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(parts)
        # The stand-in is not one of the modules whose mode the loop sets: it says what its parts do.
        self.training = any(part.training for part in parts.values())

    @property
    def title(self) -> str:
        """The parts and what they are."""
        return ", ".join(f"{name} ({type(part).__name__})" for name, part in self._modules.items())

    def forward(self) -> None:
        """There is nothing to compute."""


def roots_of(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that can be called: of a mere holder (`ModuleDict`, `ModuleList`, `Parts`) what it holds.

    Example:
        >>> a, b = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> roots_of(nn.ModuleDict({"a": a, "more": nn.ModuleList([b])})) == [a, b]
        True
        >>> roots_of(a) == [a]
        True
    """
    return list(dict.fromkeys(_roots(model)))


def _roots(model: nn.Module) -> Iterator[nn.Module]:
    uncallable = type(model).forward is nn.Module.forward and "forward" not in vars(model)
    if isinstance(model, Parts) or uncallable:
        for child in model.children():
            yield from _roots(child)
    else:
        yield model
