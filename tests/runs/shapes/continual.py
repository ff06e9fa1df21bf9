"""Online learning while the world changes: every 500 steps the classes get other names, which must be learned again."""

import argparse

import torch
from shapes_common import ending, glyphs, start
from torch import nn

steps, seed = start()
parser = argparse.ArgumentParser(description="continual learning")
parser.add_argument("rest", nargs="*", help="steps and seed")
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--task-length", type=int, default=500)
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()

images, labels = glyphs(1500, size=8, noise=0.1, seed=seed)
model = nn.Sequential(
    nn.Flatten(),
    nn.Linear(64, 96),
    nn.LayerNorm(96),
    nn.LeakyReLU(),
    nn.Linear(96, 48),
    nn.LayerNorm(48),
    nn.LeakyReLU(),
)
model.append(nn.Linear(48, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
criterion = nn.CrossEntropyLoss()
online, first_of_task, last_of_task = [], [], []
for step in range(steps):
    task = step // args.task_length
    if step % args.task_length == 0:
        names = torch.randperm(10, generator=torch.Generator().manual_seed(1000 * seed + task))
        print(f"--- task {task} begins")
    rows = torch.randint(len(images), (args.batch_size,))
    x, y = images[rows], names[labels[rows]]
    output = model(x)
    online.append(float((output.argmax(1) == y).float().mean()))  # tested first, trained on after
    loss = criterion(output, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % args.task_length == 20:
        first_of_task.append(sum(online[-20:]) / 20)
    if step % args.task_length == args.task_length - 1:
        last_of_task.append(sum(online[-100:]) / 100)
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f} online accuracy {sum(online[-50:]) / len(online[-50:]):.3f}")
print("start of each task", [round(a, 2) for a in first_of_task], "end", [round(a, 2) for a in last_of_task])
ending(steps, len(last_of_task) > 0 and min(last_of_task) > 0.9, model, optimizer, final=sum(online[-100:]) / 100)
