"""TD3 in the author's style: a class with `train`, twin critics, delayed policy updates, smoothed target actions."""

import copy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from shapes_common import Pendulum, ending, start


class Actor(nn.Module):
    def __init__(self, state_dim, action_dim, max_action):
        super().__init__()
        self.l1 = nn.Linear(state_dim, 64)
        self.l2 = nn.Linear(64, 64)
        self.l3 = nn.Linear(64, action_dim)
        self.max_action = max_action

    def forward(self, state):
        a = F.relu(self.l2(F.relu(self.l1(state))))
        return self.max_action * torch.tanh(self.l3(a))


class Critic(nn.Module):
    def __init__(self, state_dim, action_dim):
        super().__init__()
        self.l1, self.l4 = (nn.Linear(state_dim + action_dim, 64) for _ in range(2))
        self.l2, self.l5 = (nn.Linear(64, 64) for _ in range(2))
        self.l3, self.l6 = (nn.Linear(64, 1) for _ in range(2))

    def forward(self, state, action):
        sa = torch.cat([state, action], 1)
        q2 = self.l6(F.relu(self.l5(F.relu(self.l4(sa)))))
        return self.Q1(state, action), q2

    def Q1(self, state, action):
        sa = torch.cat([state, action], 1)
        return self.l3(F.relu(self.l2(F.relu(self.l1(sa)))))


class TD3:
    def __init__(self, state_dim, action_dim, max_action, discount=0.95, tau=0.02, policy_noise=0.2, noise_clip=0.5):
        self.actor = Actor(state_dim, action_dim, max_action)
        self.actor_target = copy.deepcopy(self.actor)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.critic = Critic(state_dim, action_dim)
        self.critic_target = copy.deepcopy(self.critic)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=2e-3)
        self.max_action, self.discount, self.tau = max_action, discount, tau
        self.policy_noise, self.noise_clip, self.policy_freq = policy_noise, noise_clip, 2
        self.total_it = 0

    def select_action(self, state):
        with torch.no_grad():
            return self.actor(torch.from_numpy(state.reshape(1, -1))).numpy().flatten()

    def train(self, replay_buffer, batch_size=64):
        self.total_it += 1
        state, action, next_state, reward, not_done = replay_buffer.sample(batch_size)
        with torch.no_grad():
            noise = (torch.randn_like(action) * self.policy_noise).clamp(-self.noise_clip, self.noise_clip)
            next_action = (self.actor_target(next_state) + noise).clamp(-self.max_action, self.max_action)
            target_Q1, target_Q2 = self.critic_target(next_state, next_action)
            target_Q = reward + not_done * self.discount * torch.min(target_Q1, target_Q2)
        current_Q1, current_Q2 = self.critic(state, action)
        critic_loss = F.mse_loss(current_Q1, target_Q) + F.mse_loss(current_Q2, target_Q)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()
        if self.total_it % self.policy_freq == 0:
            actor_loss = -self.critic.Q1(state, self.actor(state)).mean()
            self.actor_optimizer.zero_grad()
            actor_loss.backward()
            self.actor_optimizer.step()
            for net, target in ((self.critic, self.critic_target), (self.actor, self.actor_target)):
                for param, target_param in zip(net.parameters(), target.parameters(), strict=True):
                    target_param.data.copy_(self.tau * param.data + (1 - self.tau) * target_param.data)
        return critic_loss.item()


class ReplayBuffer:
    def __init__(self, state_dim, action_dim, max_size):
        widths = {"state": state_dim, "action": action_dim, "next_state": state_dim, "reward": 1, "not_done": 1}
        self.parts = {name: np.zeros((max_size, width), np.float32) for name, width in widths.items()}
        self.size = 0

    def add(self, *values):
        for part, value in zip(self.parts.values(), values, strict=True):
            part[self.size] = value
        self.size += 1

    def sample(self, batch_size):
        ind = np.random.randint(0, self.size, size=batch_size)
        return [torch.from_numpy(part[ind]) for part in self.parts.values()]


if __name__ == "__main__":
    max_timesteps, seed = start()
    start_timesteps, expl_noise = 200, 0.15
    env = Pendulum(limit=100, seed=seed)
    policy = TD3(env.num_obs, env.num_actions, 1.0)
    replay_buffer = ReplayBuffer(env.num_obs, env.num_actions, start_timesteps + max_timesteps)
    state, episode_num = env.reset(), 0
    for t in range(start_timesteps + max_timesteps):
        if t < start_timesteps:
            action = np.random.uniform(-1, 1, 1)
        else:
            action = (policy.select_action(state) + np.random.normal(0, expl_noise, size=1)).clip(-1, 1)
        next_state, reward, done = env.step(action[0])
        replay_buffer.add(state, action, next_state, reward, 1.0)
        state = next_state
        if t >= start_timesteps:
            critic_loss = policy.train(replay_buffer)
        if done:
            print(f"Total T: {t + 1} Episode Num: {episode_num + 1} Reward: {env.finished[-1]:.3f}")
            state = env.reset()
            episode_num += 1
    early, late = np.mean(env.finished[:5]), np.mean(env.finished[-5:])
    print(f"critic loss {critic_loss:.4f} return {early:.1f} -> {late:.1f}")
    nets = policy.actor, policy.actor_target, policy.critic, policy.critic_target
    ending(max_timesteps, late > 0.5 * early, *nets, policy.actor_optimizer, policy.critic_optimizer, final=late)
