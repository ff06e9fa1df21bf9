"""C51 as in cleanrl: the distribution of returns over fixed atoms, a projected target, a target network."""

import random

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from shapes_common import CartPole, ending, start

total_updates, seed = start()
n_atoms, v_min, v_max, gamma = 41, 0.0, 60.0, 0.97
learning_starts, train_frequency, target_network_frequency, batch_size = 300, 3, 200, 48


class QNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.n = env.num_actions
        self.register_buffer("atoms", torch.linspace(v_min, v_max, steps=n_atoms))
        self.network = nn.Sequential(nn.Linear(env.num_obs, 64), nn.ReLU(), nn.Linear(64, self.n * n_atoms))

    def get_action(self, x, action=None):
        logits = self.network(x)
        pmfs = torch.softmax(logits.view(len(x), self.n, n_atoms), dim=2)
        q_values = (pmfs * self.atoms).sum(2)
        if action is None:
            action = torch.argmax(q_values, 1)
        return action, pmfs[torch.arange(len(x)), action]


env = CartPole(1, limit=200, seed=seed)
q_network, target_network = QNetwork(env), QNetwork(env)
target_network.load_state_dict(q_network.state_dict())
optimizer = optim.Adam(q_network.parameters(), lr=1e-3, eps=0.01 / batch_size)
memory, updates, global_step = [], 0, 0
total_timesteps = learning_starts + total_updates * train_frequency
obs = env.reset()
while updates < total_updates:
    global_step += 1
    epsilon = max(0.05, 1 - global_step / (0.4 * total_timesteps))
    if random.random() < epsilon:
        actions = np.array([random.randrange(env.num_actions)])
    else:
        with torch.no_grad():
            actions = q_network.get_action(torch.from_numpy(obs))[0].numpy()
    next_obs, rewards, _, real_next_obs, terminated = env.step(actions)
    memory.append((obs[0], real_next_obs[0], actions[0], rewards[0], float(terminated[0])))
    obs = next_obs

    if global_step > learning_starts and global_step % train_frequency == 0:
        o, no, a, r, d = (
            torch.from_numpy(np.array(part)) for part in zip(*random.choices(memory, k=batch_size), strict=True)
        )
        with torch.no_grad():
            _, next_pmfs = target_network.get_action(no)
            next_atoms = r.unsqueeze(1) + gamma * target_network.atoms * (1 - d.float().unsqueeze(1))
            delta_z = target_network.atoms[1] - target_network.atoms[0]
            tz = next_atoms.clamp(v_min, v_max)
            b = (tz - v_min) / delta_z
            low, up = b.floor().clamp(0, n_atoms - 1), b.ceil().clamp(0, n_atoms - 1)
            d_m_l = (up + (low == up).float() - b) * next_pmfs
            d_m_u = (b - low) * next_pmfs
            target_pmfs = torch.zeros_like(next_pmfs)
            target_pmfs.scatter_add_(1, low.long(), d_m_l)
            target_pmfs.scatter_add_(1, up.long(), d_m_u)
        _, old_pmfs = q_network.get_action(o, a)
        loss = (-(target_pmfs * old_pmfs.clamp(min=1e-5, max=1 - 1e-5).log()).sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updates += 1
        if updates % 100 == 0:
            old_val = (old_pmfs * q_network.atoms).sum(1)
            recent = np.mean(env.finished[-10:])
            print(f"updates {updates} loss {loss.item():.4f} q_values {old_val.mean().item():.2f} return {recent:.1f}")
    if global_step % target_network_frequency == 0:
        target_network.load_state_dict(q_network.state_dict())

early, late = np.mean(env.finished[:20]), np.mean(env.finished[-10:])
print(f"return {early:.1f} -> {late:.1f}")
ending(total_updates, late > 2 * early, q_network, target_network, optimizer, final=late)
