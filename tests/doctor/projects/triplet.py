"""Triplets: many of them cost nothing any more, and batches without a cost have no gradient."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trimtab.data import load_digits


class Triplets(Dataset):
    def __init__(self):
        images, labels = load_digits()
        self.x = torch.tensor(images, dtype=torch.float32) / 16.0
        self.rows = [torch.tensor(labels).eq(c).nonzero().flatten() for c in range(10)]

    def __len__(self):
        return 640

    def __getitem__(self, i):
        mine, other = self.rows[i % 10], self.rows[(i * 7 + 3) % 10 if (i * 7 + 3) % 10 != i % 10 else (i + 1) % 10]
        return self.x[mine[i % len(mine)]], self.x[mine[(i * 3 + 1) % len(mine)]], self.x[other[i % len(other)]]


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.TripletMarginLoss(margin=0.3)
    loader = DataLoader(Triplets(), batch_size=16, shuffle=True)
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "step_fn": lambda model, batch: criterion(*(model(x) for x in batch)),
    }
