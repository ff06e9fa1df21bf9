"""REINFORCE as in pytorch/examples: one update per episode of CartPole, dropout in the policy, normalised returns."""

from collections import deque
from itertools import count

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from shapes_common import CartPole, ending, start

num_episodes, seed = start()
env = CartPole(1, limit=10, seed=seed, tau=0.07)  # coarse steps: short episodes, and still a task


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 48)
        self.dropout = nn.Dropout(p=0.4)
        self.affine2 = nn.Linear(48, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        x = self.affine1(x)
        x = self.dropout(x)
        x = F.relu(x)
        return F.softmax(self.affine2(x), dim=1)


policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=1e-3)
eps = np.finfo(np.float32).eps.item()


def select_action(state):
    probs = policy(torch.from_numpy(state))
    action = torch.multinomial(probs, 1)[0]
    policy.saved_log_probs.append(torch.log(probs[:, action[0]]))
    return action.numpy()


def finish_episode():
    R, policy_loss, returns = 0, [], deque()
    for r in policy.rewards[::-1]:
        R = r + 0.95 * R
        returns.appendleft(R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for log_prob, R in zip(policy.saved_log_probs, returns, strict=True):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]


def main():
    running_reward = 5
    state = env.reset()
    for i_episode in range(1, num_episodes + 1):
        ep_reward = 0
        for _t in count(1):
            state, reward, done, _, _ = env.step(select_action(state))
            policy.rewards.append(float(reward[0]))
            ep_reward += float(reward[0])
            if done[0]:
                break
        running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
        finish_episode()
        if i_episode % 50 == 0:
            print(f"Episode {i_episode}\tLast reward: {ep_reward:.2f}\tAverage reward: {running_reward:.2f}")
    early, late = np.mean(env.finished[:100]), np.mean(env.finished[-100:])
    print(f"return {early:.1f} -> {late:.1f}")
    ending(num_episodes, late > 1.4 * early, policy, optimizer, final=late)


if __name__ == "__main__":
    main()
