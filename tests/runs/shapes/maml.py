"""MAML on sinusoids: an inner step of gradient descent by functional calls, the outer loss goes through it."""

import math

import torch
from shapes_common import ending, start
from torch import nn
from torch.func import functional_call

steps, seed = start()
K, meta_batch, inner_lr = 10, 3, 0.05


class Sine(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))

    def forward(self, x):
        return self.net(x)


class Tasks:
    def __init__(self, seed):
        self.rng = torch.Generator().manual_seed(seed)

    def sample(self):
        amplitude, phase = 0.5 + 2 * torch.rand(1, generator=self.rng), math.pi * torch.rand(1, generator=self.rng)
        x = torch.rand(2 * K, 1, generator=self.rng) * 10 - 5
        y = amplitude * torch.sin(x + phase)
        return x[:K], y[:K], x[K:], y[K:]


def adapt(model, params, x, y, create_graph):
    loss = nn.functional.mse_loss(functional_call(model, params, (x,)), y)
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph)
    return {name: p - inner_lr * g for (name, p), g in zip(params.items(), grads, strict=True)}


def evaluate(model, tasks):
    total = 0.0
    for x, y, xq, yq in tasks:
        fast = adapt(model, dict(model.named_parameters()), x, y, create_graph=False)
        with torch.no_grad():
            total += nn.functional.mse_loss(functional_call(model, fast, (xq,)), yq).item()
    return total / len(tasks)


model = Sine()
meta_optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
train_tasks, test_source = Tasks(seed), Tasks(seed + 99)
test_tasks = [test_source.sample() for _ in range(50)]
first = evaluate(model, test_tasks)
for step in range(steps):
    meta_optimizer.zero_grad()
    outer_loss = torch.tensor(0.0)
    for _ in range(meta_batch):
        x, y, xq, yq = train_tasks.sample()
        fast = adapt(model, dict(model.named_parameters()), x, y, create_graph=True)
        outer_loss = outer_loss + nn.functional.mse_loss(functional_call(model, fast, (xq,)), yq)
    outer_loss = outer_loss / meta_batch
    outer_loss.backward()
    meta_optimizer.step()
    if step % 100 == 0:
        print(f"[Step {step}] meta loss {outer_loss.item():.4f}")
last = evaluate(model, test_tasks)
print(f"loss after adaptation {first:.4f} -> {last:.4f}")
ending(steps, last < 0.7 * first, model, meta_optimizer, final=-last)
