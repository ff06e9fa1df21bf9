"""SAC as in cleanrl: three optimizers (critics, actor, temperature), delayed policy updates, slowly moving targets."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from shapes_common import Pendulum, ending, start

LOG_STD_MAX, LOG_STD_MIN = 2, -5


class SoftQNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.fc1 = nn.Linear(env.num_obs + env.num_actions, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, 1)

    def forward(self, x, a):
        x = F.relu(self.fc1(torch.cat([x, a], 1)))
        return self.fc3(F.relu(self.fc2(x)))


class Actor(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.fc1 = nn.Linear(env.num_obs, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc_mean = nn.Linear(64, env.num_actions)
        self.fc_logstd = nn.Linear(64, env.num_actions)
        self.register_buffer("action_scale", torch.tensor(1.0))
        self.register_buffer("action_bias", torch.tensor(0.0))

    def forward(self, x):
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        log_std = torch.tanh(self.fc_logstd(x))
        return self.fc_mean(x), LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)

    def get_action(self, x):
        mean, log_std = self(x)
        normal = torch.distributions.Normal(mean, log_std.exp(), validate_args=False)
        x_t = normal.rsample()  # for the reparameterization trick
        y_t = torch.tanh(x_t)
        action = y_t * self.action_scale + self.action_bias
        log_prob = normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return action, log_prob.sum(1, keepdim=True)


if __name__ == "__main__":
    steps, seed = start()  # of the critics
    gamma, tau, batch_size, learning_starts, policy_frequency = 0.95, 0.02, 64, 200, 4
    policy_lr, q_lr = 1e-3, 2e-3
    env = Pendulum(limit=100, seed=seed)
    actor = Actor(env)
    qf1, qf2, qf1_target, qf2_target = (SoftQNetwork(env) for _ in range(4))
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    q_optimizer = optim.Adam(list(qf1.parameters()) + list(qf2.parameters()), lr=q_lr)
    actor_optimizer = optim.Adam(list(actor.parameters()), lr=policy_lr)
    target_entropy = -1.0
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha = log_alpha.exp().item()
    a_optimizer = optim.Adam([log_alpha], lr=q_lr)

    buffer = np.zeros((learning_starts + steps, 2 * env.num_obs + 2), np.float32)
    obs = env.reset()
    for global_step in range(learning_starts + steps):
        if global_step < learning_starts:
            action = np.random.uniform(-1, 1, 1).astype(np.float32)
        else:
            with torch.no_grad():
                action = actor.get_action(torch.from_numpy(obs).unsqueeze(0))[0][0].numpy()
        next_obs, reward, done = env.step(action[0])
        buffer[global_step] = np.concatenate([obs, next_obs, action, [reward]])
        obs = env.reset() if done else next_obs  # an episode ends by time only: no value is cut off

        if global_step >= learning_starts:
            rows = torch.from_numpy(buffer[np.random.randint(0, global_step + 1, batch_size)])
            data_obs, data_next, data_actions, data_rewards = rows.split([env.num_obs, env.num_obs, 1, 1], 1)
            with torch.no_grad():
                next_state_actions, next_state_log_pi = actor.get_action(data_next)
                qf1_next_target = qf1_target(data_next, next_state_actions)
                qf2_next_target = qf2_target(data_next, next_state_actions)
                min_qf_next_target = torch.min(qf1_next_target, qf2_next_target) - alpha * next_state_log_pi
                next_q_value = data_rewards.flatten() + gamma * min_qf_next_target.view(-1)
            qf1_a_values = qf1(data_obs, data_actions).view(-1)
            qf2_a_values = qf2(data_obs, data_actions).view(-1)
            qf1_loss = F.mse_loss(qf1_a_values, next_q_value)
            qf2_loss = F.mse_loss(qf2_a_values, next_q_value)
            qf_loss = qf1_loss + qf2_loss
            q_optimizer.zero_grad()
            qf_loss.backward()
            q_optimizer.step()

            if global_step % policy_frequency == 0:
                for _ in range(policy_frequency // 2):  # makes up for the delay, in part
                    pi, log_pi = actor.get_action(data_obs)
                    min_qf_pi = torch.min(qf1(data_obs, pi), qf2(data_obs, pi))
                    actor_loss = ((alpha * log_pi) - min_qf_pi).mean()
                    actor_optimizer.zero_grad()
                    actor_loss.backward()
                    actor_optimizer.step()

                    with torch.no_grad():
                        _, log_pi = actor.get_action(data_obs)
                    alpha_loss = (-log_alpha.exp() * (log_pi + target_entropy)).mean()
                    a_optimizer.zero_grad()
                    alpha_loss.backward()
                    a_optimizer.step()
                    alpha = log_alpha.exp().item()

            with torch.no_grad():
                for net, target in ((qf1, qf1_target), (qf2, qf2_target)):
                    torch._foreach_lerp_(list(target.parameters()), list(net.parameters()), tau)

            if global_step % 50 == 0:
                print(
                    f"step {global_step} qf_loss {qf_loss.item() / 2.0:.4f} q {qf1_a_values.mean().item():.3f} "
                    f"alpha {alpha:.4f} return {np.mean(env.finished[-5:]):.1f}"
                )

    early, late = np.mean(env.finished[:5]), np.mean(env.finished[-5:])
    print(f"return {early:.1f} -> {late:.1f}")
    nets = actor, qf1, qf2, qf1_target, qf2_target, log_alpha
    ending(steps, late > 0.6 * early, *nets, q_optimizer, actor_optimizer, a_optimizer, final=late)
