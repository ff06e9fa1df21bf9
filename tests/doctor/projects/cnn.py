"""Digits with convolutions, BatchNorm (biases before it are useless, and stay) and Dropout."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Block(1, 12)
        self.second = Block(12, 24)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(24 * 4, 10)

    def forward(self, x):
        h = nn.functional.max_pool2d(self.first(x), 2)
        h = nn.functional.max_pool2d(self.second(h), 2)
        h = self.drop(h.flatten(1))
        return self.head(h)


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    x = (torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) - 5.0) / 6.0
    y = torch.tensor(labels, dtype=torch.long)
    train, val = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    val_loader = DataLoader(val, batch_size=64)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()
    return {"model": model, "optimizer": optimizer, "loader": loader, "val_loader": val_loader, "loss_fn": criterion}
