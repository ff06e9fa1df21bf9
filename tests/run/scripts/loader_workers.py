"""A DataLoader with two worker processes, a worker_init_fn, shuffling and its own generator."""

import os

import numpy as np
import torch
from task import ending
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self):
        source = torch.Generator().manual_seed(3)
        self.x = torch.randn(320, 8, generator=source)
        self.y = self.x[:, :1] - 0.5 * self.x[:, 1:2] + 0.1 * torch.randn(320, 1, generator=source)
        if "NAN_AT" in os.environ:
            self.x[170, 2] = float("nan")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + np.float32(np.random.normal(0, 1e-3)), self.y[index]


def seeded(worker):
    np.random.seed(torch.initial_seed() % 2**32)


def main():
    source = torch.Generator().manual_seed(1)
    loader = DataLoader(Rows(), 16, shuffle=True, num_workers=2, worker_init_fn=seeded, generator=source)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    ending(model)


if __name__ == "__main__":
    main()
