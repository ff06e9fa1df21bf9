"""`python -m bundle.train`: relative imports, options of its own."""

import argparse
import sys

import torch
from task import batches, ending
from torch import nn

from .parts import build
from .parts.net import build as same

parser = argparse.ArgumentParser()
parser.add_argument("-m", "--module_width", type=int, default=8)
args = parser.parse_args()
print(__name__, __package__, __spec__.name, sys.argv[0].rpartition("/")[2], same is build)
model = build(args.module_width)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
for x, y in batches():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
ending(model)
