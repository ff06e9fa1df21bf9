"""Digits under bfloat16 autocast, without a scaler, as it should be; batches are dicts."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trimtab.data import load_digits


class Digits(Dataset):
    def __init__(self):
        images, labels = load_digits()
        self.images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
        self.labels = torch.tensor(labels, dtype=torch.long)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"image": self.images[i], "label": self.labels[i], "id": i}


def build():
    torch.manual_seed(0)
    loader = DataLoader(Digits(), batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.SiLU(),
        nn.Linear(32, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step_fn(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch["image"])
        loss = nn.functional.cross_entropy(logits.float(), batch["label"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn}
