"""A mask token that is used in some batches only, a branch that is dropped at times, an auxiliary head that waits."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Linear(8, 24)
        self.hidden_row = nn.Parameter(torch.zeros(24))
        self.mix = nn.MultiheadAttention(24, 2, batch_first=True)
        self.branch = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU())
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        h = self.rows(x)
        if self.training and torch.rand(()) < 0.3:
            hide = torch.rand(h.shape[:2]) < 0.2
            h = torch.where(hide[..., None], self.hidden_row, h)
        h = h + self.mix(h, h, h, need_weights=False)[0]
        if not self.training or torch.rand(()) < 0.7:
            h = h + self.branch(h)
        return self.head(h.mean(1))


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 8, 8) / 16.0
    y = torch.tensor(labels, dtype=torch.long)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    return {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": nn.CrossEntropyLoss()}
