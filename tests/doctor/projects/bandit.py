"""A policy gradient: the number that is minimised is no measure of progress, and may rise."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    y = torch.tensor(labels, dtype=torch.long)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    policy = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)

    def step_fn(policy, batch):
        x, y = batch
        choice = torch.distributions.Categorical(logits=policy(x))
        action = choice.sample()
        reward = (action == y).float()
        advantage = reward - reward.mean()
        return -(choice.log_prob(action) * advantage).mean() - 0.01 * choice.entropy().mean()

    return {"model": policy, "optimizer": optimizer, "loader": loader, "step_fn": step_fn}
