"""Imports PyTorch and evaluates; the environment was set before the import, and counts."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
import torch
from torch import nn

model = nn.Linear(4, 2).eval()
with torch.inference_mode():
    print(model(torch.ones(1, 4)).shape, torch.get_num_threads())
print(torch.optim.Optimizer.__init__.__qualname__, torch.autograd.backward.__name__, torch.Tensor.backward.__name__)
