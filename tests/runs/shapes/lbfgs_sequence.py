"""L-BFGS in double precision, as the time-series example: it converges completely, and is stepped on all the same."""

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from shapes_common import ending, start

STEPS, seed = start()
T, L, N, LAGS = 20, 120, 12, 8


class Sequence(nn.Module):
    """Predicts the next value of a wave from the last eight, and repeats that into the future."""

    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(LAGS, 6)
        self.linear2 = nn.Linear(6, 1)

    def forward(self, windows):
        return self.linear2(torch.tanh(self.linear1(windows)))


if __name__ == "__main__":
    rng = np.random.default_rng(seed)
    x = np.arange(L) + rng.integers(-4 * T, 4 * T, N).reshape(N, 1)
    data = torch.from_numpy(np.sin(x / 1.0 / T).astype("float64"))
    windows = data.unfold(1, LAGS + 1, 4).reshape(-1, LAGS + 1)
    inputs, target = windows[:, :LAGS], windows[:, LAGS:]
    seq = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4, line_search_fn="strong_wolfe")
    first = criterion(seq(inputs), target).item()

    for i in range(STEPS):

        def closure():
            optimizer.zero_grad()
            # a little decay makes the problem one that has a bottom to arrive at
            loss = criterion(seq(inputs), target) + 1e-4 * sum(p.square().sum() for p in seq.parameters())
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        if i % 50 == 0:
            print("STEP: ", i, "loss:", loss.item())
            with torch.no_grad():
                print("test loss:", criterion(seq(inputs), target).item())
    with torch.no_grad():
        last = criterion(seq(inputs), target).item()
    print(f"loss {first:.6f} -> {last:.8f}")
    ending(STEPS, last < 0.01 * first, seq, optimizer, final=-last)
