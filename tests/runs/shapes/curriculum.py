"""The copy task with a curriculum: as soon as a length is mastered a longer one comes, and the loss jumps up again."""

import random

import torch
from shapes_common import ending, start
from torch import nn

steps, seed = start()
SYMBOLS, LONGEST = 6, 8
random_lengths = random.Random(seed)


class CopyNet(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS + 1, 16)  # the last one says: now repeat what you heard
        self.controller = nn.GRU(16, hidden)
        self.read = nn.Linear(hidden, SYMBOLS)

    def forward(self, seq):
        ask = torch.full_like(seq, SYMBOLS)
        out, _ = self.controller(self.embed(torch.cat([seq, ask])))
        return self.read(out[len(seq) :])


def dataloader(level, batch_size=24):
    length = level if random_lengths.random() < 0.8 else random_lengths.randint(1, level)
    return torch.randint(SYMBOLS, (length, batch_size))


def train_batch(net, criterion, optimizer, X):
    optimizer.zero_grad()
    y_out = net(X)
    loss = criterion(y_out.flatten(0, 1), X.flatten())
    loss.backward()
    nn.utils.clip_grad_value_(net.parameters(), 10)
    optimizer.step()
    return loss.item(), float((y_out.argmax(-1) == X).float().mean())


net = CopyNet()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, alpha=0.95, momentum=0.5)
level, since, running, best = 1, 0, 0.0, {}
for batch_num in range(1, steps + 1):
    loss, right = train_batch(net, criterion, optimizer, dataloader(level))
    since, running = since + 1, 0.95 * running + 0.05 * right
    if running > 0.93 and since > 60 and level < LONGEST:
        print(f"level {level} mastered after {since} batches")
        level, since = level + 1, 0
    if batch_num % 50 == 0:
        print(f"batch {batch_num} level {level} loss {loss:.5f} right {running:.3f}")

with torch.no_grad():
    X = torch.randint(SYMBOLS, (max(level - 1, 1), 200))
    right = float((net(X).argmax(-1) == X).float().mean())
print(f"level {level}, right at the level before it: {right:.3f}")
ending(steps, level >= 4 and right > 0.7, net, optimizer, final=level + right)
