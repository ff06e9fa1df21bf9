"""A module with complex parameters and a complex buffer."""

import torch
from task import batches, ending
from torch import nn


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64) / 5)
        self.register_buffer("mean", torch.zeros(5, dtype=torch.complex64))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        self.mean = 0.9 * self.mean + 0.1 * spectrum.detach().mean(0)
        return self.head(torch.fft.irfft(spectrum * self.weight, n=8))


model = Spectral()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for x, y in batches():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
ending(model)
