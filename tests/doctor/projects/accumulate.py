"""Four small batches make one step: three calls in four move nothing."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits

EVERY = 4


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    y = torch.tensor(labels, dtype=torch.long)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    done = {"calls": 0}

    def step_fn(model, batch):
        x, y = batch
        loss = criterion(model(x), y) / EVERY
        loss.backward()
        done["calls"] += 1
        if done["calls"] % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach() * EVERY

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn}
