"""A forked child process trains and sends the weights back; so do two members of a pool."""

import multiprocessing as mp

import torch
from task import batches, ending
from torch import nn


def train(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return {k: v.numpy() for k, v in model.state_dict().items()}


def child(queue, seed):
    queue.put(train(seed))


if __name__ == "__main__":
    context = mp.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue, 0))
    process.start()
    states = [queue.get()]
    process.join()
    print("exit code of the child:", process.exitcode)
    with context.Pool(2) as pool:
        states += pool.map(train, [1, 2])
    ending([{k: torch.from_numpy(v) for k, v in s.items()} for s in states])
