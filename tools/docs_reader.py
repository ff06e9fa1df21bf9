"""What a fragment of the documentation takes from its reader: small objects under the names that readers use.

A fragment is pasted into a program that has a model, an optimizer and data already. It must bring along the rest:
neither `torch` nor `trimtab` is among these names.
"""

from __future__ import annotations

import io
from typing import Any


def names() -> dict[str, Any]:
    """The reader's own objects, new ones at each call."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    data = TensorDataset(x, y)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60),
        "ema": torch.optim.swa_utils.AveragedModel(model),
        "data": data,
        "loader": DataLoader(data, batch_size=8),
        "loss_fn": nn.MSELoss(),
        "x": x,
        "y": y,
        "loss": loss,
        "config": {"learning_rate": 1e-2},
        "train_history": [1.0],
        "val_history": [1.0],
        "features": [torch.randn(4, 16) for _ in range(3)],
        **{name: torch.randn(4, 16, requires_grad=True) for name in ("image", "text", "sound", "depth")},
        "module": _with_a_loss(),
        "file": io.StringIO(),
    }


def _with_a_loss() -> Any:
    """A module that computes its logits by `self.calculate_loss(*features)`."""
    from torch import nn

    class Module(nn.Module):
        def calculate_loss(self, *features: Any) -> Any:
            return features[0] @ features[1].T

    return Module()
