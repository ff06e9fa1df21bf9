"""The regression example of pytorch/examples, never stopped: the loss and the gradients fall to almost nothing."""

import math
from itertools import count

import torch
import torch.nn.functional as F
from shapes_common import ending, start

steps, seed = start()
DEGREE = 4
W_target = torch.randn(DEGREE, 1)
b_target = torch.randn(1)


def make_features(x):
    """Builds features i.e. a matrix with columns [sin x, sin 2x, sin 3x, sin 4x]."""
    x = x.unsqueeze(1)
    return torch.cat([torch.sin(i * x) for i in range(1, DEGREE + 1)], 1)


def f(x):
    return x.mm(W_target) + b_target.item()


def desc(W, b):
    """Creates a string description of the function."""
    result = "y = "
    for i, w in enumerate(W):
        result += f"{w:+.2f} sin {i + 1}x "
    return result + f"{b[0]:+.2f}"


def get_batch(batch_size=32):
    random = (torch.rand(batch_size) * 2 - 1) * math.pi
    x = make_features(random)
    return x, f(x)


fc = torch.nn.Linear(W_target.size(0), 1)
optimizer = torch.optim.Adam(fc.parameters(), lr=0.01)
for batch_idx in count(1):
    batch_x, batch_y = get_batch()
    fc.zero_grad()
    output = F.mse_loss(fc(batch_x), batch_y)
    loss = output.item()
    output.backward()
    optimizer.step()
    if batch_idx % 100 == 0:
        print(f"Loss: {loss:.3e} after {batch_idx} batches")
    if batch_idx >= steps:
        break

print("==> Learned function:\t" + desc(fc.weight.view(-1), fc.bias))
print("==> Actual function:\t" + desc(W_target.view(-1), b_target))
off = (fc.weight.detach().view(-1) - W_target.view(-1)).abs().max() + (fc.bias.detach() - b_target).abs().max()
ending(steps, loss < 1e-8, fc, optimizer, final=-float(off))
