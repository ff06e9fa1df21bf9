"""BYOL as a wrapper around any network (lucidrains): an online and a momentum target encoder, no negatives."""

import copy

import torch
import torch.nn.functional as F
from shapes_common import ending, glyphs, nearest_accuracy, start
from torch import nn


def loss_fn(x, y):
    x, y = F.normalize(x, dim=-1, p=2), F.normalize(y, dim=-1, p=2)
    return 2 - 2 * (x * y).sum(dim=-1)


class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_average(self, old, new):
        return old * self.beta + (1 - self.beta) * new


def update_moving_average(ema_updater, ma_model, current_model):
    for current_params, ma_params in zip(current_model.parameters(), ma_model.parameters(), strict=True):
        ma_params.data = ema_updater.update_average(ma_params.data, current_params.data)


def MLP(dim, projection_size, hidden_size=64):
    return nn.Sequential(
        nn.Linear(dim, hidden_size),
        nn.BatchNorm1d(hidden_size),
        nn.ReLU(inplace=True),
        nn.Linear(hidden_size, projection_size),
    )


def augment(x):
    """A random shift by one pixel, noise, and a random strength."""
    dy, dx = torch.randint(-1, 2, (2,)).tolist()
    x = torch.roll(x, (dy, dx), (2, 3))
    return x * (0.7 + 0.6 * torch.rand(len(x), 1, 1, 1)) + 0.1 * torch.randn_like(x)


class BYOL(nn.Module):
    def __init__(self, net, dim, projection_size=16, moving_average_decay=0.99):
        super().__init__()
        self.net = net
        self.online_encoder = nn.Sequential(net, MLP(dim, projection_size))
        self.online_predictor = MLP(projection_size, projection_size)
        self.target_encoder = None
        self.target_ema_updater = EMA(moving_average_decay)

    def _get_target_encoder(self):
        if self.target_encoder is None:  # made when first needed, after the optimizer
            self.target_encoder = copy.deepcopy(self.online_encoder)
            self.target_encoder.requires_grad_(False)
        return self.target_encoder

    def update_moving_average(self):
        assert self.target_encoder is not None, "target encoder has not been created yet"
        update_moving_average(self.target_ema_updater, self.target_encoder, self.online_encoder)

    def forward(self, x, return_embedding=False):
        if return_embedding:
            return self.net(x)
        images = torch.cat((augment(x), augment(x)), dim=0)
        online_pred_one, online_pred_two = self.online_predictor(self.online_encoder(images)).chunk(2, dim=0)
        with torch.no_grad():
            target_encoder = self._get_target_encoder()
            target_proj_one, target_proj_two = target_encoder(images).detach().chunk(2, dim=0)
        loss_one = loss_fn(online_pred_one, target_proj_two)
        loss_two = loss_fn(online_pred_two, target_proj_one)
        return (loss_one + loss_two).mean()


def main():
    steps, seed = start()
    images, labels = glyphs(1000, size=8, noise=0.1, seed=seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU())
    learner = BYOL(net, dim=48)
    opt = torch.optim.Adam(learner.parameters(), lr=3e-4)
    losses = []
    for i in range(steps):
        batch = images[torch.randint(800, (48,))]
        loss = learner(batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
        learner.update_moving_average()
        losses.append(loss.item())
        if i % 50 == 0:
            print(f"{i}: {loss.item():.4f}")
    learner.eval()
    with torch.no_grad():
        found = learner(images, return_embedding=True)
    accuracy = nearest_accuracy(found[:800], labels[:800], found[800:], labels[800:])
    spread = float(F.normalize(found, dim=1).std(0).mean())
    print(f"nearest neighbour {accuracy:.3f}, spread {spread:.3f}")
    learned = sum(losses[-50:]) < 0.6 * sum(losses[:50]) and accuracy > 0.7 and spread > 0.02
    ending(steps, learned, learner, opt, final=accuracy)


if __name__ == "__main__":
    main()
