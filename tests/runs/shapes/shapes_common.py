"""What the programs of this folder share: seeded data, small environments, and the last lines that each prints.

Every program is plain PyTorch and is started as `python NAME.py [STEPS] [SEED]`.
"""

import hashlib
import math
import random
import sys

import numpy as np
import torch

ENOUGH = 1500
"""A program that makes this number of steps or more says at its end whether it learned."""


def start(default=150):
    """The number of optimizer steps and the seed from the command line; everything is seeded with the latter."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else default
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    torch.set_num_threads(1)
    torch.manual_seed(1337 + seed)
    np.random.seed(seed)
    random.seed(seed)
    return steps, seed


# ------------------------------------------------------------------------------------------------------------- ending


def leaves(thing):
    """Every tensor and number in a nested state, in order."""
    if isinstance(thing, torch.Tensor | int | float):
        yield thing
    elif isinstance(thing, dict):
        for key in thing:
            yield from leaves(thing[key])
    elif isinstance(thing, list | tuple):
        for one in thing:
            yield from leaves(one)
    elif hasattr(thing, "state_dict"):
        yield from leaves(thing.state_dict())


def digest(*things):
    """A digest of all tensors and numbers, and whether all of them are finite."""
    found, finite = hashlib.sha256(), True
    for leaf in leaves(list(things)):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            finite = finite and bool(torch.isfinite(flat).all())
            found.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            finite = finite and math.isfinite(leaf)
            found.update(repr(leaf).encode())
    return found.hexdigest(), finite


def ending(steps, learned, *trained, final):
    """The last lines: a digest of what was trained and of the random states, whether all is finite, whether it learned.

    `learned` is asked only after enough steps to tell. `final` says how well the trained model does at its task, not by
    the loss that was trained on where there is another figure; more is better.
    """
    chance = [torch.get_rng_state(), np.random.get_state()[1].tolist(), list(random.getstate()[1])]
    found, finite = digest(*trained)
    print("sha256", digest(chance)[0][:16], found)
    print("finite", finite)
    print("final", float(final))
    if steps >= ENOUGH:
        print("learned", bool(learned() if callable(learned) else learned))


# --------------------------------------------------------------------------------------------------------------- text

WHO = ["the cat", "a dog", "the old man", "my sister", "a small bird", "the king", "our friend", "the captain"]
DOES = ["sees", "likes", "follows", "finds", "helps", "calls", "waits for"]
WHERE = ["in the garden", "by the river", "at night", "on the ship", "in winter", "near the wall"]


def sentences(num, seed=0):
    """Sentences of a small grammar: enough regularity to be learned, enough choice to keep the loss above zero."""
    rng = random.Random(seed)
    out = []
    for _ in range(num):
        words = f"{rng.choice(WHO)} {rng.choice(DOES)} {rng.choice(WHO)}"
        if rng.random() < 0.5:
            words += f" {rng.choice(WHERE)}"
        out.append(words + rng.choice([".", ".", "!", "?"]))
    return out


def names(num, seed=0):
    """Names of two to three syllables."""
    rng = random.Random(seed)
    first, second, last = "an bel ka ma jo ri so el", "la ri na do mi ve", "n a ra lin s o ta"
    out = []
    for _ in range(num):
        middle = rng.choice(second.split()) if rng.random() < 0.5 else ""
        out.append(rng.choice(first.split()) + middle + rng.choice(last.split()))
    return out


# ------------------------------------------------------------------------------------------------------------- images

DIGITS = """
01110 00100 01110 11110 00010 11111 00110 11111 01110 01110
10001 01100 10001 00001 00110 10000 01000 00001 10001 10001
10011 00100 00001 00001 01010 11110 10000 00010 10001 10001
10101 00100 00010 01110 10010 00001 11110 00100 01110 01111
11001 00100 00100 00001 11111 00001 10001 00100 10001 00001
10001 00100 01000 00001 00010 10001 10001 00100 10001 00010
01110 01110 11111 11110 00010 01110 01110 00100 01110 01100
"""


def glyphs(num, size=12, noise=0.1, seed=0, classes=10):
    """Pictures of digits in [0, 1] at random places, with noise: `[num, 1, size, size]`, and their labels."""
    rng = np.random.default_rng(seed)
    rows = [line.split() for line in DIGITS.split("\n") if line]
    bitmaps = np.array([[[int(c) for c in row[d]] for row in rows] for d in range(10)], np.float32)
    y = rng.integers(0, classes, num)
    x = np.zeros((num, 1, size, size), np.float32)
    for i, label in enumerate(y):
        top, left = rng.integers(0, size - 7 + 1), rng.integers(0, size - 5 + 1)
        x[i, 0, top : top + 7, left : left + 5] = bitmaps[label] * rng.uniform(0.7, 1.0)
    x = np.clip(x + noise * rng.standard_normal(x.shape).astype(np.float32), 0, 1)
    return torch.from_numpy(x), torch.from_numpy(y)


# ------------------------------------------------------------------------------------------------------------- points


def moons(num, seed=0):
    """Two half moons, scaled to about unit variance."""
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, math.pi, num)
    which = rng.integers(0, 2, num)
    x = np.where(which == 0, np.cos(angle), 1 - np.cos(angle)) - 0.5
    y = np.where(which == 0, np.sin(angle), 0.5 - np.sin(angle)) - 0.25
    points = np.stack([x, y], 1) * 1.4 + 0.05 * rng.standard_normal((num, 2))
    return torch.from_numpy(points.astype(np.float32))


def ring(num, centres=8, seed=0):
    """Gaussians on a ring of radius 2."""
    rng = np.random.default_rng(seed)
    angle = 2 * math.pi * rng.integers(0, centres, num) / centres
    points = 2 * np.stack([np.cos(angle), np.sin(angle)], 1) + 0.1 * rng.standard_normal((num, 2))
    return torch.from_numpy(points.astype(np.float32))


def energy_distance(x, y):
    """How far two sets of samples are apart; 0 where they come from the same distribution."""
    x, y = x.flatten(1), y.flatten(1)
    return float(2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean())


def nearest_accuracy(train_x, train_y, test_x, test_y):
    """The accuracy of the nearest neighbour by cosine similarity: what a representation is worth."""
    normal = torch.nn.functional.normalize
    nearest = (normal(test_x, dim=1) @ normal(train_x, dim=1).T).argmax(1)
    return float((train_y[nearest] == test_y).float().mean())


# ------------------------------------------------------------------------------------------------------- environments


class CartPole:
    """The classic pole on a cart, for `num` environments at once; a finished one starts again by itself."""

    num_actions, num_obs = 2, 4

    def __init__(self, num=1, limit=200, seed=0, tau=0.02):
        self.num, self.limit, self.tau = num, limit, tau
        self.rng = np.random.default_rng(seed)
        self.finished = []

    def reset(self):
        self.state = self.rng.uniform(-0.05, 0.05, (self.num, 4))
        self.age = np.zeros(self.num, np.int64)
        return self.state.astype(np.float32)

    def step(self, action):
        """Returns the observation, rewards, whether each ended, and the observation before a new start."""
        x, speed, angle, spin = self.state.T
        force = np.where(np.asarray(action) == 1, 10.0, -10.0)
        cos, sin = np.cos(angle), np.sin(angle)
        push = (force + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        move = push - 0.05 * turn * cos / 1.1
        tau = self.tau
        self.state = np.stack([x + tau * speed, speed + tau * move, angle + tau * spin, spin + tau * turn], 1)
        self.age += 1
        fallen = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.2095)
        done = fallen | (self.age >= self.limit)
        last = self.state.astype(np.float32)
        if done.any():
            self.finished += [int(age) for age in self.age[done]]
            self.state = np.where(done[:, None], self.rng.uniform(-0.05, 0.05, (self.num, 4)), self.state)
            self.age[done] = 0
        return self.state.astype(np.float32), np.ones(self.num, np.float32), done, last, fallen


class Pendulum:
    """A pendulum to be swung up and held with a limited torque in [-1, 1] (times 2); an episode has `limit` steps."""

    num_actions, num_obs = 1, 3

    def __init__(self, limit=100, seed=0):
        self.limit, self.rng = limit, np.random.default_rng(seed)
        self.finished = []

    def _obs(self):
        return np.array([math.cos(self.angle), math.sin(self.angle), self.spin / 4], np.float32)

    def reset(self):
        self.angle, self.spin = self.rng.uniform(-math.pi, math.pi), self.rng.uniform(-1, 1)
        self.age, self.total = 0, 0.0
        return self._obs()

    def step(self, action):
        torque = 2.0 * float(np.clip(action, -1, 1))
        angle = (self.angle + math.pi) % (2 * math.pi) - math.pi
        reward = -(angle**2 + 0.1 * self.spin**2 + 0.001 * torque**2)
        self.spin = min(max(self.spin + (5.0 * math.sin(self.angle) + 3.0 * torque) * 0.05, -8.0), 8.0)
        self.angle += self.spin * 0.05
        self.age += 1
        self.total += reward
        done = self.age >= self.limit
        if done:
            self.finished.append(self.total)
        return self._obs(), reward, done


class Catch:
    """A ball falls through a grid of `rows` x `columns`; the paddle at the bottom is to be below it at the end."""

    num_actions = 3

    def __init__(self, rows=7, columns=5, seed=0):
        self.rows, self.columns, self.rng = rows, columns, np.random.default_rng(seed)
        self.num_obs = rows * columns

    def _obs(self):
        grid = np.zeros((self.rows, self.columns), np.float32)
        grid[self.row, self.ball] = grid[-1, self.paddle] = 1
        return grid.reshape(-1)

    def reset(self):
        self.row, self.ball, self.paddle = 0, int(self.rng.integers(self.columns)), self.columns // 2
        return self._obs()

    def step(self, action):
        self.paddle = min(max(self.paddle + int(action) - 1, 0), self.columns - 1)
        self.row += 1
        done = self.row == self.rows - 1
        return self._obs(), (1.0 if self.ball == self.paddle else -1.0) if done else 0.0, done
