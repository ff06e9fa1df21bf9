"""Changes its working directory before it trains, and imports from where it was."""

import os
import sys
import tempfile

home = os.getcwd()
work = tempfile.mkdtemp(dir=home, prefix="work")
os.chdir(work)
import torch  # noqa: E402
from task import batches, ending  # noqa: E402
from torch import nn  # noqa: E402

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for x, y in batches():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
torch.save(model.state_dict(), "final.pt")
print(os.listdir("."), os.path.basename(__file__), os.path.basename(sys.argv[0]))
ending(torch.load("final.pt"))
