"""An endless stream of samples instead of a data set; the step drops a batch it cannot use."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trimtab.data import load_digits


class Stream(IterableDataset):
    def __init__(self, seed=0):
        images, labels = load_digits()
        self.x = torch.tensor(images, dtype=torch.float32) / 16.0
        self.y = torch.tensor(labels, dtype=torch.long)
        self.seed = seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            i = int(torch.randint(0, len(self.y), (1,), generator=generator))
            yield self.x[i] + 0.05 * torch.randn(64, generator=generator), self.y[i]


def build():
    torch.manual_seed(0)
    loader = DataLoader(Stream(), batch_size=32)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Mish(), nn.Linear(64, 10))
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
    return {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": nn.CrossEntropyLoss()}
