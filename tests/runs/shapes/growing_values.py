"""Values of a policy that gets better and better, by TD with a target network: returns grow, and so does the loss."""

import numpy as np
import torch
import torch.nn as nn
from shapes_common import CartPole, ending, start


class ValueNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, obs):
        return self.layers(obs).squeeze(-1)


def behaviour(obs, skill, rng):
    """A controller that holds the pole, disturbed by random actions where its `skill` fails."""
    good = (obs @ np.array([0.1, 0.3, 1.5, 1.0]) > 0).astype(np.int64)
    return np.where(rng.random(len(obs)) < skill, good, rng.integers(0, 2, len(obs)))


def evaluate(value, gamma, seed, skill=0.62):
    """How far the values of fresh starts are from the returns that come of them."""
    rng, env = np.random.default_rng(seed + 1), CartPole(64, limit=300, seed=seed + 1)
    first = obs = env.reset()
    returns, alive, weight = np.zeros(64), np.ones(64, bool), 1.0
    while alive.any():
        obs, reward, done, _, _ = env.step(behaviour(obs, skill, rng))
        returns += weight * reward * alive
        alive, weight = alive & ~done, weight * gamma
    with torch.no_grad():
        return float(np.abs(value(torch.from_numpy(first)).numpy() - returns.mean()).mean())


def main():
    steps, seed = start()
    rng = np.random.default_rng(seed)
    env = CartPole(8, limit=300, seed=seed)
    value, target = ValueNet(), ValueNet()
    target.load_state_dict(value.state_dict())
    optimizer = torch.optim.Adam(value.parameters(), lr=1e-3)
    gamma, n_step, obs = 0.99, 10, env.reset()
    recent, losses = [], []
    for step in range(steps):
        skill = 0.62 * step / steps
        path = []
        for _ in range(3):
            next_obs, reward, _, last, fallen = env.step(behaviour(obs, skill, rng))
            path.append((obs, reward, last, fallen.astype(np.float32)))
            obs = next_obs
        recent = [*recent, *path][-200:]
        parts = [np.concatenate([recent[i][k] for i in rng.integers(0, len(recent), n_step)]) for k in range(4)]
        s, r, s2, ended = (torch.from_numpy(part) for part in parts)
        with torch.no_grad():
            wanted = r + gamma * (1 - ended) * target(s2)
        loss = nn.functional.mse_loss(value(s), wanted)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 25 == 0:
            target.load_state_dict(value.state_dict())
        if (step + 1) % 50 == 0:
            ages = np.mean(env.finished[-20:] or [0])
            print(
                f"update {step + 1} loss {np.mean(losses[-50:]):.4f} value {wanted.mean().item():.2f} return {ages:.1f}"
            )
    early, late = np.mean(env.finished[:20]), np.mean(env.finished[-20:])
    with torch.no_grad():
        upright = value(torch.zeros(1, 4)).item()
        fallen = value(torch.tensor([[0.0, 0.0, 0.2, 1.5]])).item()
    print(f"return {early:.1f} -> {late:.1f}, value of an upright pole {upright:.1f}, of a falling one {fallen:.1f}")
    learned = late > 3 * early and upright > 30
    ending(steps, learned, value, target, optimizer, final=-evaluate(value, gamma, seed))


if __name__ == "__main__":
    main()
