"""Two views without labels: a target network that is never trained, only averaged, and a stopped gradient."""

import copy

import torch
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader

from trimtab.data import load_digits


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 16))
        self.predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, a, b):
        guess = normalize(self.predictor(self.online(a)), dim=-1)
        with torch.no_grad():
            seen = normalize(self.target(b), dim=-1)
        return 2 - 2 * (guess * seen).sum(-1).mean()

    @torch.no_grad()
    def follow(self, rate=0.99):
        for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.lerp_(theirs, 1 - rate)


def build():
    torch.manual_seed(0)
    images, _ = load_digits()
    loader = DataLoader(torch.tensor(images, dtype=torch.float32) / 16.0, batch_size=64, shuffle=True, drop_last=True)
    model = Learner()
    params = [*model.online.parameters(), *model.predictor.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step_fn(model, x):
        a, b = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
        loss = model(a, b) + model(b, a)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.follow()
        return loss

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn}
