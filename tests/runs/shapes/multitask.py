"""Three tasks weighted by learned uncertainty: with exact tasks the log-variances fall, and the loss goes negative."""

import torch
from shapes_common import ending, start
from torch import nn, optim


class MultiTaskLossWrapper(nn.Module):
    def __init__(self, task_num, model):
        super().__init__()
        self.model = model
        self.task_num = task_num
        self.log_vars = nn.Parameter(torch.zeros(task_num))

    def forward(self, input, targets):
        depth, normal, semantic = self.model(input)
        losses = (
            nn.functional.mse_loss(depth, targets[0]),
            nn.functional.mse_loss(normal, targets[1]),
            nn.functional.cross_entropy(semantic, targets[2]),
        )
        loss = sum(torch.exp(-self.log_vars[i]) * losses[i] + self.log_vars[i] for i in range(self.task_num))
        return loss, losses, self.log_vars.detach().tolist()


class MTLModel(nn.Module):
    def __init__(self, n_hidden=48):
        super().__init__()
        self.net1 = nn.Sequential(nn.Linear(6, n_hidden), nn.SiLU(), nn.Linear(n_hidden, n_hidden), nn.SiLU())
        self.net2, self.net3, self.net4 = nn.Linear(n_hidden, 1), nn.Linear(n_hidden, 3), nn.Linear(n_hidden, 4)

    def forward(self, x):
        h = self.net1(x)
        return self.net2(h), self.net3(h), self.net4(h)


def gen_data(num, rules):
    x = torch.randn(num, 6)
    depth = (x @ rules[0]).sin() + 0.02 * torch.randn(num, 1)
    normal = torch.tanh(x @ rules[1]) + 0.3 * torch.randn(num, 3)
    return x, (depth, normal, (x @ rules[2]).argmax(-1))


steps, seed = start()
rules = torch.randn(6, 1) * 0.5, torch.randn(6, 3) * 0.5, torch.randn(6, 4)
model = MTLModel()
mtl = MultiTaskLossWrapper(3, model)
optimizer = optim.Adam(mtl.parameters(), lr=2e-3, eps=1e-07)
test = gen_data(500, rules)
with torch.no_grad():
    first = [float(one) for one in mtl(*test)[1]]
for t in range(steps):
    x, targets = gen_data(32, rules)
    loss, losses, log_vars = mtl(x, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if t % 100 == 0:
        print(t, f"loss {loss.item():.4f}", *(f"{one.item():.4f}" for one in losses), *(f"{v:.3f}" for v in log_vars))
with torch.no_grad():
    last = [float(one) for one in mtl(*test)[1]]
print("tasks", *(f"{a:.4f} -> {b:.4f}" for a, b in zip(first, last, strict=True)))
learned = last[0] < 0.1 * first[0] and last[1] < 0.7 * first[1] and last[2] < 0.5 * first[2]
ending(steps, learned, mtl, optimizer, final=-sum(last))
