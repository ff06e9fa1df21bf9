"""Which of twelve properties does a picture have? Several may hold at once, most do not."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    d = torch.tensor(labels, dtype=torch.long)
    rules = [d % 2 == 0, d % 3 == 0, d < 2, d > 7, d == 5, (d == 0) | (d == 6) | (d == 8) | (d == 9)]
    rules += [x[:, i].mul(2).gt(1) for i in (10, 13, 20, 35, 43, 60)]
    y = torch.stack(rules, dim=1).float()
    model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.full((12,), 3.0))
    return {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": criterion}
