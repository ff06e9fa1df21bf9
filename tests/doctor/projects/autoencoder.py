"""A variational autoencoder: no labels, random numbers inside the model, two terms in the loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from trimtab.data import load_digits


class VAE(nn.Module):
    def __init__(self, code=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.mean, self.log_var = nn.Linear(48, code), nn.Linear(48, code)
        self.decoder = nn.Sequential(nn.Linear(code, 48), nn.ReLU(), nn.Linear(48, 64), nn.Sigmoid())

    def forward(self, x):
        h = self.encoder(x)
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var


def loss_fn(output, x):
    rebuilt, mean, log_var = output
    apart = nn.functional.mse_loss(rebuilt, x, reduction="sum") / len(x)
    prior = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(-1).mean()
    return apart + 0.01 * prior


def build():
    torch.manual_seed(0)
    images, _ = load_digits()
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    loader = DataLoader(x, batch_size=64, shuffle=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": loss_fn}
