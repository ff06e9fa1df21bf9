"""Sparse embeddings of which most rows are never looked up, two optimizers, ratings as a regression."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Taste(nn.Module):
    def __init__(self, users=400, items=300, width=8):
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=True)
        self.items = nn.Embedding(items, width, sparse=True)
        self.mix = nn.Sequential(nn.Linear(2 * width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user, item):
        u, i = self.users(user), self.items(item)
        return (u * i).sum(-1) + self.mix(torch.cat([u, i], dim=-1)).squeeze(-1)


def build():
    torch.manual_seed(0)
    likes, kinds = torch.randn(60, 3), torch.randn(50, 3)
    user, item = torch.randint(0, 60, (2000,)), torch.randint(0, 50, (2000,))
    rating = 3.0 + (likes[user] * kinds[item]).sum(-1)
    loader = DataLoader(TensorDataset(user, item, rating), batch_size=100, shuffle=True)
    model = Taste()
    tables = [*model.users.parameters(), *model.items.parameters()]
    sparse = torch.optim.SparseAdam(tables, lr=0.02)
    dense = torch.optim.Adam(model.mix.parameters(), lr=0.005)
    criterion = nn.MSELoss()

    def step_fn(model, batch):
        user, item, rating = batch
        loss = criterion(model(user, item), rating)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        return loss

    return {"model": model, "optimizer": [sparse, dense], "loader": loader, "step_fn": step_fn}
