"""Spawned (not forked) worker processes load the data; the main process trains."""

import torch
from task import batch, ending
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return batch(index)


if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in DataLoader(Rows(), batch_size=None, num_workers=1, multiprocessing_context="spawn"):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    ending(model)
