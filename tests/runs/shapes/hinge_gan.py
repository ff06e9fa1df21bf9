"""A hinge GAN with spectral norm and two time scales: the generator's loss rises for long while its samples improve."""

import torch
import torch.nn as nn
import torch.optim as optim
from shapes_common import ending, energy_distance, glyphs, start
from torch.nn.utils import spectral_norm

steps, seed = start()
z_dim, batch_size, disc_iters = 12, 24, 1


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(z_dim, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()
        )
        self.final = nn.Linear(64, 64)
        nn.init.xavier_uniform_(self.final.weight, 1.0)

    def forward(self, z):
        return torch.tanh(self.final(self.model(z)))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = spectral_norm(nn.Linear(64, 128))
        self.layer2 = spectral_norm(nn.Linear(128, 64))
        self.fc = spectral_norm(nn.Linear(64, 1))
        self.act = nn.LeakyReLU(0.1)

    def forward(self, x):
        return self.fc(self.act(self.layer2(self.act(self.layer1(x)))))


images, _ = glyphs(1000, size=8, noise=0.02, seed=seed, classes=6)
data = images.flatten(1) * 2 - 1
loader = torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)
discriminator, generator = Discriminator(), Generator()
optim_disc = optim.Adam(filter(lambda p: p.requires_grad, discriminator.parameters()), lr=1e-4, betas=(0.0, 0.9))
optim_gen = optim.Adam(generator.parameters(), lr=5e-5, betas=(0.0, 0.9))
scheduler_d = optim.lr_scheduler.ExponentialLR(optim_disc, gamma=0.99)
scheduler_g = optim.lr_scheduler.ExponentialLR(optim_gen, gamma=0.99)
fixed_z = torch.randn(200, z_dim)


def distance():
    generator.eval()
    with torch.no_grad():
        found = energy_distance(generator(fixed_z), data[:200])
    generator.train()
    return found


def train(epoch, done):
    for batch_idx, real in enumerate(loader):
        for _ in range(disc_iters):
            z = torch.randn(batch_size, z_dim)
            optim_disc.zero_grad()
            optim_gen.zero_grad()
            fake_loss = nn.ReLU()(1.0 + discriminator(generator(z).detach())).mean()
            disc_loss = nn.ReLU()(1.0 - discriminator(real)).mean() + fake_loss
            disc_loss.backward()
            optim_disc.step()
        z = torch.randn(batch_size, z_dim)
        optim_disc.zero_grad()
        optim_gen.zero_grad()
        gen_loss = -discriminator(generator(z)).mean()
        gen_loss.backward()
        optim_gen.step()
        done += 1
        if done % 50 == 0:
            print(f"epoch {epoch} [{batch_idx}] disc loss {disc_loss.item():.4f} gen loss {gen_loss.item():.4f}")
        if done == steps:
            break
    scheduler_d.step()
    scheduler_g.step()
    return done


first, done, epoch = distance(), 0, 0
while done < steps:
    done = train(epoch, done)
    epoch += 1
last = distance()
print(f"distance {first:.4f} -> {last:.4f}")
ending(steps, last < 0.5 * first, generator, discriminator, optim_gen, optim_disc, final=-last)
