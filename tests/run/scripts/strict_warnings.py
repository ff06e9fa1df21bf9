"""Every warning is an error, deterministic algorithms are demanded, anomalies are not looked for."""

import warnings

warnings.simplefilter("error")

import torch  # noqa: E402
from task import batches, ending  # noqa: E402
from torch import nn  # noqa: E402

torch.use_deterministic_algorithms(True)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=50)
for x, y in batches():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x.double()), y.double())
    loss.backward()
    optimizer.step()
    scheduler.step()
plateau.step(0.5)
ending(model)
