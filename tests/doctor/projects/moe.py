"""Top-1 routing among eight experts, some of which see no sample of a batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


class Mixture(nn.Module):
    def __init__(self, width=32, num_experts=8):
        super().__init__()
        self.inner = nn.Linear(64, width)
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, width)) for _ in range(num_experts)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        h = torch.relu(self.inner(x))
        probs = torch.softmax(self.gate(h), dim=-1)
        weight, choice = probs.max(dim=-1)
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            mine = choice == i
            if mine.any():
                out[mine] = weight[mine, None] * expert(h[mine])
        return self.head(h + out), probs


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    y = torch.tensor(labels, dtype=torch.long)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step_fn(model, batch):
        x, y = batch
        logits, probs = model(x)
        share = probs.mean(0)
        balance = (share * share).sum() * len(share)
        return nn.functional.cross_entropy(logits, y) + 0.01 * balance

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn}
