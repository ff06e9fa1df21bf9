"""WGAN-GP on a ring of Gaussians: five steps of the critic per step of the generator, a penalty by double backward."""

import torch
import torch.autograd as autograd
import torch.nn as nn
import torch.optim as optim
from shapes_common import ending, energy_distance, ring, start

ITERS, seed = start()  # steps of the critic
DIM, LAMBDA, CRITIC_ITERS, BATCH_SIZE = 64, 0.1, 5, 64


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        main = nn.Sequential(nn.Linear(2, DIM), nn.ReLU(True), nn.Linear(DIM, DIM), nn.ReLU(True), nn.Linear(DIM, 2))
        self.main = main

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(2, DIM), nn.ReLU(True), nn.Linear(DIM, DIM), nn.ReLU(True), nn.Linear(DIM, 1)
        )

    def forward(self, inputs):
        return self.main(inputs).view(-1)


def weights_init(m):
    if isinstance(m, nn.Linear):
        nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
        m.bias.data.fill_(0)


def inf_train_gen():
    data = ring(20000, seed=seed)
    while True:
        for i in range(len(data) // BATCH_SIZE):
            yield data[i * BATCH_SIZE : (i + 1) * BATCH_SIZE]


def calc_gradient_penalty(netD, real_data, fake_data):
    alpha = torch.rand(BATCH_SIZE, 1).expand(real_data.size())
    interpolates = (alpha * real_data + (1 - alpha) * fake_data).requires_grad_(True)
    disc_interpolates = netD(interpolates)
    gradients = autograd.grad(
        outputs=disc_interpolates,
        inputs=interpolates,
        grad_outputs=torch.ones(disc_interpolates.size()),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * LAMBDA


netG, netD = Generator(), Discriminator()
netD.apply(weights_init)
netG.apply(weights_init)
optimizerD = optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.9))
optimizerG = optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.9))
fixed, truth = torch.randn(256, 2), ring(256, seed=seed + 1)


def distance():
    with torch.no_grad():
        return energy_distance(netG(fixed), truth)


data = inf_train_gen()
first = distance()
critic_steps, iteration = 0, 0
while critic_steps < ITERS:
    for p in netD.parameters():
        p.requires_grad = True
    for _ in range(min(CRITIC_ITERS, ITERS - critic_steps)):
        real_data = next(data)
        netD.zero_grad()
        D_real = netD(real_data).mean()
        noise = torch.randn(BATCH_SIZE, 2)
        with torch.no_grad():
            fake = netG(noise)
        D_fake = netD(fake).mean()
        gradient_penalty = calc_gradient_penalty(netD, real_data, fake)
        D_cost = D_fake - D_real + gradient_penalty
        D_cost.backward()
        Wasserstein_D = D_real - D_fake
        optimizerD.step()
        critic_steps += 1

    for p in netD.parameters():
        p.requires_grad = False  # to avoid computation
    netG.zero_grad()
    G = netD(netG(torch.randn(BATCH_SIZE, 2))).mean()
    G_cost = -G
    G_cost.backward()
    optimizerG.step()
    iteration += 1
    if iteration % 20 == 0:
        print(
            f"iter {iteration}\tdisc cost {D_cost.item():.4f}\tgen cost {G_cost.item():.4f}\t{Wasserstein_D.item():.4f}"
        )

last = distance()
print(f"distance {first:.4f} -> {last:.4f}")
ending(ITERS, last < 0.25 * first, netG, netD, optimizerG, optimizerD, final=-last)
