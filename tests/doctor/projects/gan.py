"""Two players and two optimizers, each of which steps its own part; the step does it all."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits

NOISE = 16


def build():
    torch.manual_seed(0)
    images, _ = load_digits()
    x = torch.tensor(images, dtype=torch.float32) / 8.0 - 1.0
    loader = DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True)
    maker = nn.Sequential(nn.Linear(NOISE, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
    judge = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    model = nn.ModuleDict({"maker": maker, "judge": judge})
    maker_opt = torch.optim.Adam(maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
    judge_opt = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def step_fn(model, batch):
        (real,) = batch
        n = len(real)
        fake = model["maker"](torch.randn(n, NOISE))

        judge_opt.zero_grad()
        true_loss = bce(model["judge"](real), torch.ones(n, 1))
        fake_loss = bce(model["judge"](fake.detach()), torch.zeros(n, 1))
        judge_loss = true_loss + fake_loss
        judge_loss.backward()
        judge_opt.step()

        maker_opt.zero_grad()
        maker_loss = bce(model["judge"](fake), torch.ones(n, 1))
        maker_loss.backward()
        maker_opt.step()
        return (judge_loss + maker_loss).detach()

    return {"model": model, "optimizer": {"maker": maker_opt, "judge": judge_opt}, "loader": loader, "step_fn": step_fn}
