"""A denoiser: the target is the noise that was added, so that no target is in the batch at all."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from trimtab.data import load_digits

STEPS = 50


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.times = nn.Embedding(STEPS, width)
        self.inner = nn.Linear(64, width)
        self.middle = nn.Linear(width, width)
        self.outer = nn.Linear(width, 64)
        nn.init.zeros_(self.outer.weight)

    def forward(self, x, t):
        h = torch.nn.functional.silu(self.inner(x) + self.times(t))
        h = h + torch.nn.functional.silu(self.middle(h))
        return self.outer(h)


def build():
    torch.manual_seed(0)
    images, _ = load_digits()
    loader = DataLoader(torch.tensor(images, dtype=torch.float32) / 8.0 - 1.0, batch_size=64, shuffle=True)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    kept = torch.cumprod(1 - torch.linspace(1e-3, 0.15, STEPS), dim=0)

    def step_fn(model, x):
        t = torch.randint(0, STEPS, (len(x),))
        noise = torch.randn_like(x)
        mixed = kept[t, None].sqrt() * x + (1 - kept[t, None]).sqrt() * noise
        return nn.functional.mse_loss(model(mixed, t), noise)

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn}
