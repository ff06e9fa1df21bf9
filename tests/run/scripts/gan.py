"""Two models that train against each other."""

import torch
from task import batches, ending
from torch import nn

generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
noise = torch.Generator().manual_seed(5)
for real, _ in batches():
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    fake = generator(torch.randn(len(real), 4, generator=noise))
    opt_d.zero_grad()
    loss_d = bce(critic(real), ones) + bce(critic(fake.detach()), zeros)
    loss_d.backward()
    opt_d.step()
    opt_g.zero_grad()
    loss_g = bce(critic(fake), ones)
    loss_g.backward()
    opt_g.step()
ending(generator, critic)
