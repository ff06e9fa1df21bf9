"""Two classes, one of which is in one sample of fifty: most batches have hardly any; one logit, normed weights."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset


def build():
    torch.manual_seed(0)
    x = torch.randn(3000, 10)
    y = ((x[:, 0] + x[:, 1] * x[:, 2]) > 3.2).float()[:, None]
    model = nn.Sequential(
        weight_norm(nn.Linear(10, 32)), nn.LeakyReLU(), spectral_norm(nn.Linear(32, 16)), nn.ReLU(), nn.Linear(16, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    return {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": nn.BCEWithLogitsLoss()}
