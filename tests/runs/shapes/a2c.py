"""A2C as in stable-baselines3: an algorithm class with `learn`, short rollouts, RMSprop, clipping at 0.5."""

import numpy as np
import torch as th
from shapes_common import CartPole, ending, start
from torch import nn
from torch.nn import functional as F


class ActorCriticPolicy(nn.Module):
    def __init__(self, num_obs, num_actions, lr_schedule):
        super().__init__()
        self.policy_net = nn.Sequential(nn.Linear(num_obs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.value_net_body = nn.Sequential(nn.Linear(num_obs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.action_net = nn.Linear(64, num_actions)
        self.value_net = nn.Linear(64, 1)
        gains = {self.policy_net: np.sqrt(2), self.value_net_body: np.sqrt(2), self.action_net: 0.01, self.value_net: 1}
        for module, gain in gains.items():
            for layer in module.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.orthogonal_(layer.weight, gain=gain)
                    layer.bias.data.fill_(0.0)
        self.optimizer = th.optim.RMSprop(self.parameters(), lr=lr_schedule(1), alpha=0.99, eps=1e-5, weight_decay=0)

    def set_training_mode(self, mode):
        self.train(mode)

    def _distribution(self, obs):
        return th.distributions.Categorical(logits=self.action_net(self.policy_net(obs)), validate_args=False)

    def forward(self, obs):
        distribution = self._distribution(obs)
        actions = distribution.sample()
        return actions, self.predict_values(obs), distribution.log_prob(actions)

    def predict_values(self, obs):
        return self.value_net(self.value_net_body(obs))

    def evaluate_actions(self, obs, actions):
        distribution = self._distribution(obs)
        return self.predict_values(obs), distribution.log_prob(actions), distribution.entropy()


class RolloutBuffer:
    def __init__(self, gamma):
        self.gamma = gamma

    def reset(self):
        self.parts = []

    def add(self, obs, action, reward, value):
        self.parts.append((obs, action, reward, value))

    def compute_returns_and_advantage(self, last_values, dones):
        returns, run = [], last_values
        for (_, _, reward, _), done in zip(reversed(self.parts), reversed(dones), strict=True):
            run = reward + self.gamma * run * (1.0 - done)
            returns.append(run)
        self.returns = np.stack(returns[::-1])

    def get(self):
        obs = th.from_numpy(np.concatenate([part[0] for part in self.parts]))
        actions = th.cat([part[1] for part in self.parts])
        values = th.cat([part[3] for part in self.parts]).flatten()
        returns = th.from_numpy(self.returns.astype(np.float32).reshape(-1))
        return obs, actions, returns, returns - values


class A2C:
    def __init__(self, env, learning_rate=7e-4, n_steps=5, gamma=0.99, ent_coef=0.0, vf_coef=0.5, max_grad_norm=0.5):
        self.env, self.lr_schedule, self.n_steps = env, lambda progress: learning_rate, n_steps
        self.ent_coef, self.vf_coef, self.max_grad_norm = ent_coef, vf_coef, max_grad_norm
        self.policy = ActorCriticPolicy(env.num_obs, env.num_actions, self.lr_schedule)
        self.rollout_buffer = RolloutBuffer(gamma)
        self.num_timesteps, self._n_updates, self._last_obs = 0, 0, env.reset()

    def collect_rollouts(self):
        self.policy.set_training_mode(False)
        self.rollout_buffer.reset()
        dones = []
        for _ in range(self.n_steps):
            with th.no_grad():
                actions, values, _ = self.policy(th.from_numpy(self._last_obs))
            new_obs, rewards, done, last_obs, fallen = self.env.step(actions.numpy())
            if (done & ~fallen).any():  # cut by time: add the value of what would have come
                with th.no_grad():
                    terminal_value = self.policy.predict_values(th.from_numpy(last_obs)).numpy().flatten()
                rewards = rewards + 0.99 * terminal_value * (done & ~fallen)
            self.num_timesteps += self.env.num
            self.rollout_buffer.add(self._last_obs, actions, rewards, values)
            dones.append(done.astype(np.float32))
            self._last_obs = new_obs
        with th.no_grad():
            values = self.policy.predict_values(th.from_numpy(new_obs))
        self.rollout_buffer.compute_returns_and_advantage(values.numpy().flatten(), dones)

    def train(self):
        self.policy.set_training_mode(True)
        for param_group in self.policy.optimizer.param_groups:
            param_group["lr"] = self.lr_schedule(1)
        observations, actions, returns, advantages = self.rollout_buffer.get()
        values, log_prob, entropy = self.policy.evaluate_actions(observations, actions)
        policy_loss = -(advantages * log_prob).mean()
        value_loss = F.mse_loss(returns, values.flatten())
        loss = policy_loss + self.ent_coef * -th.mean(entropy) + self.vf_coef * value_loss
        self.policy.optimizer.zero_grad()
        loss.backward()
        th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
        self.policy.optimizer.step()
        self._n_updates += 1
        self.logged = {"value_loss": value_loss.item(), "policy_loss": policy_loss.item()}

    def learn(self, total_updates):
        while self._n_updates < total_updates:
            self.collect_rollouts()
            self.train()
            if self._n_updates % 100 == 0:
                mean = np.mean(self.env.finished[-50:] or [0])
                print(f"| updates {self._n_updates} | ep_rew_mean {mean:.1f} | value {self.logged['value_loss']:.3f} |")
        return self


steps, seed = start()
env = CartPole(8, limit=200, seed=seed)
model = A2C(env).learn(steps)
early, late = np.mean(env.finished[:50]), np.mean(env.finished[-50:])
print(f"return {early:.1f} -> {late:.1f}")
ending(steps, late > 2 * early, model.policy, model.policy.optimizer, final=late)
