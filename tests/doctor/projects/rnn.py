"""Digits read row by row by an LSTM; the step trains and returns a plain float."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


class Reader(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.lstm = nn.LSTM(8, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, rows):
        states, _ = self.lstm(rows)
        return self.head(states[:, -1])


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    rows = torch.tensor(images, dtype=torch.float32).reshape(-1, 8, 8) / 16.0
    y = torch.tensor(labels, dtype=torch.long)
    loader = DataLoader(TensorDataset(rows, y), batch_size=32, shuffle=True)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()

    def step_fn(model, batch):
        rows, y = batch
        out = model(rows)
        loss = criterion(out, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn}
