"""An average of the weights, and a loss that weighs rare classes more."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    keep = (labels < 3) | (torch.arange(len(labels)).numpy() % 4 == 0)
    x = torch.tensor(images[keep], dtype=torch.float32) / 16.0
    y = torch.tensor(labels[keep], dtype=torch.long)
    weight = 1.0 / torch.bincount(y).float()
    criterion = nn.CrossEntropyLoss(weight=weight / weight.mean())
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ELU(), nn.Linear(64, 10))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def step_fn(model, batch):
        x, y = batch
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        return loss

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn, "ema": ema}
