"""The root logger writes to stdout, with everything; stdout is redirected for a while; a bar is drawn by hand."""

import contextlib
import io
import logging
import sys

import torch
from task import batches, ending
from torch import nn

logging.basicConfig(stream=sys.stdout, level=logging.DEBUG, format="%(name)s %(levelname)s %(message)s", force=True)
log = logging.getLogger("train")
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
held = io.StringIO()
for i, (x, y) in enumerate(batches()):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    with contextlib.redirect_stdout(held), contextlib.redirect_stderr(held):
        optimizer.step()
        print("inside", i)
    sys.stdout.write(f"\r[{'#' * i}{'.' * (29 - i)}] ✓")
    if i % 10 == 0:
        log.info("step %d", i)
sys.stdout.write("\n")
print(sum(line.startswith("inside") for line in held.getvalue().splitlines()), "lines were held back")
print("of ours:", "trimtab" in held.getvalue())
ending(model)
