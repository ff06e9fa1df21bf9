"""Logistic regression with LBFGS, which calls a closure several times per step, on one batch of all data."""

import torch
from torch import nn

from trimtab.data import load_digits


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    x = torch.tensor(images[:600], dtype=torch.float32) / 16.0
    y = torch.tensor(labels[:600], dtype=torch.long)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    criterion = nn.CrossEntropyLoss()

    def step_fn(model, batch):
        x, y = batch

        def closure():
            optimizer.zero_grad()
            loss = criterion(model(x), y) + 1e-4 * model.weight.square().sum()
            loss.backward()
            return loss

        return optimizer.step(closure)

    return {"model": model, "optimizer": optimizer, "loader": [(x, y)], "step_fn": step_fn}
