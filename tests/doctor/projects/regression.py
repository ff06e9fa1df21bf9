"""Regression with targets in their own unit: thousands, not scaled; double precision; rates of two groups."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class House(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1)


def build():
    torch.manual_seed(0)
    x = torch.rand(1200, 5, dtype=torch.float64)
    y = 250_000 + 120_000 * x[:, 0] - 40_000 * x[:, 1] * x[:, 2] + 5_000 * torch.randn(1200, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)
    model = House().double()
    groups = [
        {"params": model.body.parameters(), "lr": 0.01},
        {"params": model.head.parameters(), "lr": 0.1, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.01)
    return {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": nn.MSELoss()}
