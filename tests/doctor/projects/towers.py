"""Two towers that learn which upper half belongs to which lower half of a digit, with a contrastive loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits
from trimtab.losses import nway_loss


class Tower(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, x):
        return self.net(x)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.upper, self.lower = Tower(), Tower()
        self.log_scale = nn.Parameter(torch.tensor(2.3))

    def forward(self, upper, lower):
        return self.upper(upper), self.lower(lower), self.log_scale.exp()


def build():
    torch.manual_seed(0)
    images, _ = load_digits()
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    loader = DataLoader(TensorDataset(x[:, :32], x[:, 32:]), batch_size=48, shuffle=True, drop_last=True)
    model = Pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step_fn(model, batch):
        upper, lower = batch
        a, b, scale = model(upper, lower)
        return nway_loss([a, b], similarity="paircos", objective="pairwise", logit_scale=scale)

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn}
