"""The modules of a model, remembered: walking them again costs far more than seeing that nothing has changed."""

from __future__ import annotations

from torch import nn


class ModuleTree:
    """Tells whether a model still consists of the same modules, parameters and buffers.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> tree = ModuleTree(model)
        >>> tree.has_changed()
        False
        >>> model[0].bias = None
        >>> tree.has_changed()
        True
        >>> tree.has_changed()
        False
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.named = list(root.named_modules())
        self._held = self._now()

    def has_changed(self) -> bool:
        """Whether anything was added, removed or replaced since the last time this was asked."""
        if self._now() == self._held:
            return False
        self.named = list(self._root.named_modules())
        self._held = self._now()
        return True

    def _now(self) -> list[int]:
        """What the modules hold, in their order, by identity: parameters and buffers are not kept alive."""
        out: list[int] = []
        for _, module in self.named:
            out += map(id, module._modules.values())
            out += map(id, module._parameters.values())
            out += map(id, module._buffers.values())
        return out
