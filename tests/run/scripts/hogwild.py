"""Two processes move the same weights, which lie in shared memory, each with an optimizer of its own."""

import sys

import torch
import torch.multiprocessing as mp
from task import batches
from torch import nn


def train(model, rank):
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model.share_memory()
    context = mp.get_context(sys.argv[1])
    processes = [context.Process(target=train, args=(model, rank)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print("exit codes:", [process.exitcode for process in processes])
    print("finite", all(torch.isfinite(p).all().item() for p in model.parameters()))
