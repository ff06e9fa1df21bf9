"""Low-rank adapters (one factor random, the other zero) around frozen layers; only they are trained."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


class LoRA(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


def pretrained(x, y):
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for i in range(20):
        part = slice(64 * (i % 10), 64 * (i % 10 + 1))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[part]), y[part]).backward()
        optimizer.step()
    net.zero_grad()
    return net


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    y = torch.tensor(labels, dtype=torch.long)
    model = pretrained(x, y)
    for i in (0, 2, 4):
        model[i] = LoRA(model[i])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.0)
    loader = DataLoader(TensorDataset(x[700:], y[700:]), batch_size=32, shuffle=True)
    return {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": nn.CrossEntropyLoss()}
