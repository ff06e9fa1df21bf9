"""A GAN trained as StyleGAN2: logistic losses, a lazy R1 penalty on real samples, Adam without momentum, an EMA."""

import torch
from shapes_common import ending, energy_distance, glyphs, start
from torch import autograd, nn, optim
from torch.nn import functional as F


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def accumulate(model1, model2, decay=0.98):
    par1, par2 = dict(model1.named_parameters()), dict(model2.named_parameters())
    for k in par1:
        par1[k].data.mul_(decay).add_(par2[k].data, alpha=1 - decay)


def sample_data(data, batch):
    while True:
        yield data[torch.randint(len(data), (batch,))]


def d_logistic_loss(real_pred, fake_pred):
    return F.softplus(-real_pred).mean() + F.softplus(fake_pred).mean()


def g_nonsaturating_loss(fake_pred):
    return F.softplus(-fake_pred).mean()


def d_r1_loss(real_pred, real_img):
    (grad_real,) = autograd.grad(outputs=real_pred.sum(), inputs=real_img, create_graph=True)
    return grad_real.pow(2).reshape(grad_real.shape[0], -1).sum(1).mean()


class PixelNorm(nn.Module):
    def forward(self, input):
        return input * torch.rsqrt(torch.mean(input**2, dim=1, keepdim=True) + 1e-8)


class Generator(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.style = nn.Sequential(PixelNorm(), nn.Linear(latent, 32), nn.LeakyReLU(0.2))
        self.constant = nn.Parameter(torch.randn(1, 64))
        self.modulate, self.middle = nn.Linear(32, 64), nn.Linear(64, 64)
        self.to_rgb = nn.Linear(64, 56)
        nn.init.ones_(self.modulate.bias)

    def forward(self, z):
        x = F.leaky_relu(self.middle(self.constant * self.modulate(self.style(z))), 0.2)
        return torch.sigmoid(self.to_rgb(x))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(nn.Linear(56, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2))
        self.final_linear = nn.Linear(65, 1)

    def forward(self, x):
        out = self.convs(x)
        stddev = torch.sqrt(out.var(0, unbiased=False) + 1e-8).mean().expand(out.shape[0], 1)
        return self.final_linear(torch.cat([out, stddev], 1))


def train(steps, seed, batch=24, latent=12, r1=2.0, d_reg_every=8, lr=0.002):
    images, _ = glyphs(1000, size=8, noise=0.02, seed=seed, classes=5)
    data = images[:, 0, :, :7].reshape(1000, 56)
    loader = sample_data(data, batch)
    generator, discriminator, g_ema = Generator(latent), Discriminator(), Generator(latent)
    g_ema.eval()
    accumulate(g_ema, generator, 0)
    d_reg_ratio = d_reg_every / (d_reg_every + 1)
    g_optim = optim.Adam(generator.parameters(), lr=lr, betas=(0.0, 0.99))
    d_optim = optim.Adam(discriminator.parameters(), lr=lr * d_reg_ratio, betas=(0.0, 0.99**d_reg_ratio))
    sample_z = torch.randn(200, latent)

    def distance():
        with torch.no_grad():
            return energy_distance(g_ema(sample_z), data[:200])

    first, r1_loss = distance(), torch.tensor(0.0)
    for i in range(steps):
        real_img = next(loader)
        requires_grad(generator, False)
        requires_grad(discriminator, True)
        fake_img = generator(torch.randn(batch, latent))
        d_loss = d_logistic_loss(discriminator(real_img), discriminator(fake_img))
        discriminator.zero_grad()
        d_loss.backward()
        d_optim.step()
        if i % d_reg_every == 0:
            real_img.requires_grad = True
            real_pred = discriminator(real_img)
            r1_loss = d_r1_loss(real_pred, real_img)
            discriminator.zero_grad()
            (r1 / 2 * r1_loss * d_reg_every + 0 * real_pred[0]).backward()
            d_optim.step()
        requires_grad(generator, True)
        requires_grad(discriminator, False)
        g_loss = g_nonsaturating_loss(discriminator(generator(torch.randn(batch, latent))))
        generator.zero_grad()
        g_loss.backward()
        g_optim.step()
        accumulate(g_ema, generator)
        if i % 50 == 0:
            print(f"{i}: d: {d_loss.item():.4f}; g: {g_loss.item():.4f}; r1: {r1_loss.item():.4f}")
    last = distance()
    print(f"distance {first:.4f} -> {last:.4f}")
    ending(steps, last < 0.3 * first, generator, discriminator, g_ema, g_optim, d_optim, final=-last)


if __name__ == "__main__":
    train(*start())
