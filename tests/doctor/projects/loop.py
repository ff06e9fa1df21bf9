"""Digits again, with a loop that does everything by hand: zero_grad, backward, clip, step, schedule."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU())
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        h = self.body(x)
        h = self.drop(h)
        return self.head(h)


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    y = torch.tensor(labels, dtype=torch.long)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

    def step_fn(model, batch):
        x, y = batch
        model.train()
        optimizer.zero_grad(set_to_none=True)
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn, "scheduler": scheduler}
