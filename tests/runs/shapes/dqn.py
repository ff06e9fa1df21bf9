"""DQN as in cleanrl: CartPole, a replay buffer, epsilon-greedy exploration, a target network copied now and then."""

import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from shapes_common import CartPole, ending, start


class ReplayBuffer:
    def __init__(self, size, num_obs):
        self.observations = np.zeros((size, num_obs), np.float32)
        self.next_observations = np.zeros((size, num_obs), np.float32)
        self.actions = np.zeros((size, 1), np.int64)
        self.rewards, self.dones = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self.size, self.pos, self.full = size, 0, False

    def add(self, obs, next_obs, action, reward, done):
        i = self.pos
        self.observations[i], self.next_observations[i] = obs, next_obs
        self.actions[i], self.rewards[i], self.dones[i] = action, reward, done
        self.pos = (self.pos + 1) % self.size
        self.full = self.full or self.pos == 0

    def sample(self, batch_size):
        ix = np.random.randint(0, self.size if self.full else self.pos, batch_size)
        parts = self.observations, self.next_observations, self.actions, self.rewards, self.dones
        return [torch.from_numpy(part[ix]) for part in parts]


class QNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(env.num_obs, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, env.num_actions)
        )

    def forward(self, x):
        return self.network(x)


def linear_schedule(start_e, end_e, duration, t):
    return max((end_e - start_e) / duration * t + start_e, end_e)


if __name__ == "__main__":
    steps, seed = start()
    learning_starts, train_frequency, target_network_frequency = 1000, 4, 200
    batch_size, gamma, tau, start_e, end_e, exploration_fraction = 64, 0.99, 1.0, 1, 0.05, 0.4
    total_timesteps = learning_starts + steps * train_frequency

    env = CartPole(1, limit=300, seed=seed)
    q_network = QNetwork(env)
    optimizer = optim.Adam(q_network.parameters(), lr=2.5e-4)
    target_network = QNetwork(env)
    target_network.load_state_dict(q_network.state_dict())
    rb = ReplayBuffer(10000, env.num_obs)

    obs, updates = env.reset(), 0
    for global_step in range(1, total_timesteps + 1):
        epsilon = linear_schedule(start_e, end_e, exploration_fraction * total_timesteps, global_step)
        if random.random() < epsilon:
            actions = np.array([random.randrange(env.num_actions)])
        else:
            with torch.no_grad():
                actions = torch.argmax(q_network(torch.from_numpy(obs)), dim=1).numpy()
        next_obs, rewards, ends, real_next_obs, terminations = env.step(actions)
        rb.add(obs[0], real_next_obs[0], actions[0], rewards[0], terminations[0])
        obs = next_obs

        if global_step > learning_starts:
            if global_step % train_frequency == 0 and updates < steps:
                data_obs, data_next, data_actions, data_rewards, data_dones = rb.sample(batch_size)
                with torch.no_grad():
                    target_max, _ = target_network(data_next).max(dim=1)
                    td_target = data_rewards + gamma * target_max * (1 - data_dones)
                old_val = q_network(data_obs).gather(1, data_actions).squeeze()
                loss = F.mse_loss(td_target, old_val)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                updates += 1
                if updates % 50 == 0:
                    recent = np.mean(env.finished[-10:])
                    print(f"step {global_step} td_loss {loss.item():.4f} q {old_val.mean().item():.2f} return {recent}")
            if global_step % target_network_frequency == 0:
                for target_param, q_param in zip(target_network.parameters(), q_network.parameters(), strict=True):
                    target_param.data.copy_(tau * q_param.data + (1.0 - tau) * target_param.data)

    early, late = np.mean(env.finished[:20]), np.mean(env.finished[-10:])
    print(f"return {early:.1f} -> {late:.1f}")
    ending(steps, late > 2 * early, q_network, target_network, optimizer, final=late)
