"""Saves the whole model by pickle, reads it in a process without trimtab, and resumes from state dicts half-way."""

import os
import subprocess
import sys

import torch
from task import BAD, batch, ending
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)


READER = """
import sys, torch, __main__
from torch import nn
Net = __main__.Net = type("Net", (nn.Module,), {"forward": lambda self, x: self.layers(x)})
for name in ("whole.pt", "optimizer.pt"):
    loaded = torch.load(name, weights_only=False)
    if name == "whole.pt":
        print("read", tuple(loaded(torch.zeros(2, 8)).shape), sorted(loaded.__dict__), type(loaded).__name__)
    else:
        print("read", type(loaded).__name__, sorted(loaded.state_dict()))
print("trimtab" in sys.modules)
"""


def build():
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, start, end):
    for i in range(start, end):
        x, y = batch(i)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


model, optimizer = build()
train(model, optimizer, 0, 15)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 15}, "half.pt")
torch.save(model, "whole.pt")
torch.save(optimizer, "optimizer.pt")
if BAD < 0:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    print(subprocess.run([sys.executable, "-I", "-c", READER], env=clean, capture_output=True, text=True).stdout)
model, optimizer = build()
state = torch.load("half.pt")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
train(model, optimizer, state["step"], 30)
ending(model)
