"""A Wasserstein critic with a gradient penalty: losses below zero, five steps of one player for one of the other."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


def build():
    torch.manual_seed(0)
    images, _ = load_digits()
    loader = DataLoader(
        TensorDataset(torch.tensor(images, dtype=torch.float32) / 8.0 - 1.0),
        batch_size=32,
        shuffle=True,
        drop_last=True,
    )
    maker = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 64), nn.Tanh())
    critic = nn.Sequential(nn.Linear(64, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    model = nn.ModuleList([maker, critic])
    maker_opt = torch.optim.RMSprop(maker.parameters(), lr=1e-4)
    critic_opt = torch.optim.RMSprop(critic.parameters(), lr=3e-4)
    counter = {"steps": 0}

    def penalty(real, fake):
        mix = torch.rand(len(real), 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def step_fn(model, batch):
        (real,) = batch
        maker, critic = model
        with torch.no_grad():
            fake = maker(torch.randn(len(real), 8))
        critic_opt.zero_grad()
        loss = critic(fake).mean() - critic(real).mean() + 10.0 * penalty(real, fake)
        loss.backward()
        critic_opt.step()
        counter["steps"] += 1
        if counter["steps"] % 5 == 0:
            maker_opt.zero_grad()
            (-critic(maker(torch.randn(len(real), 8))).mean()).backward()
            maker_opt.step()
        return loss.item()

    return {"model": model, "optimizer": [maker_opt, critic_opt], "loader": loader, "step_fn": step_fn}
