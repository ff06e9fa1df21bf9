"""Complex weights: a filter in the frequency domain that learns to smooth a signal."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Filter(nn.Module):
    def __init__(self, length=32):
        super().__init__()
        self.response = nn.Parameter(torch.randn(length // 2 + 1, dtype=torch.cfloat) * 0.1)
        self.gain = nn.Parameter(torch.ones(()))
        self.length = length

    def forward(self, x):
        return self.gain * torch.fft.irfft(torch.fft.rfft(x) * self.response, n=self.length)


def build():
    torch.manual_seed(0)
    clean = torch.sin(torch.linspace(0, 12, 32) * (0.5 + torch.rand(640, 1)) + 6 * torch.rand(640, 1))
    noisy = clean + 0.3 * torch.randn(640, 32)
    loader = DataLoader(TensorDataset(noisy, clean), batch_size=32, shuffle=True)
    model = Filter()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": nn.L1Loss()}
