"""Digits with a multilayer perceptron: the plainest training there is."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 64)
        self.middle = nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        h = torch.relu(self.hidden(x))
        h = torch.relu(self.middle(h))
        return self.head(h)


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    y = torch.tensor(labels, dtype=torch.long)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    return {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": criterion}
