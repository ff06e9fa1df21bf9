"""DistributedDataParallel with one process over gloo, and no_sync for accumulation."""

import os
import tempfile

import torch
import torch.distributed as dist
from task import batches, ending
from torch import nn

where = os.path.join(tempfile.mkdtemp(), "meeting")
dist.init_process_group("gloo", init_method=f"file://{where}", rank=0, world_size=1)
inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
model = nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for i, (x, y) in enumerate(batches(40)):
    if i % 2 == 0:
        with model.no_sync():
            (nn.functional.mse_loss(model(x), y) / 2).backward()
        continue
    (nn.functional.mse_loss(model(x), y) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
ending(model)
