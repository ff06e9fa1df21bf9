"""The script replaces `optimizer.step` by a wrapper of its own, in an asyncio program."""

import asyncio
import functools

import torch
from task import batches, ending
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
calls = 0


def counted(step):
    @functools.wraps(step)
    def wrapper(*args, **kwargs):
        global calls
        calls += 1
        return step(*args, **kwargs)

    return wrapper


optimizer.step = counted(optimizer.step)


async def train():
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        await asyncio.sleep(0)
        optimizer.step()


asyncio.run(train())
print(calls, optimizer.step.__name__)
ending(model)
