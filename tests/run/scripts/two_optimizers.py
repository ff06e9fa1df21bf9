"""One model, one optimizer for its body and another for its head, stepped on the same backward pass."""

import torch
from task import batches, ending
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(torch.relu(self.embed(x)))


net = Net()
slow = torch.optim.SGD(net.embed.parameters(), lr=0.01, momentum=0.9, nesterov=True)
fast = torch.optim.Adam(net.head.parameters(), lr=0.01)
for x, y in batches():
    loss = nn.functional.l1_loss(net(x), y)
    loss.backward()
    for one in (slow, fast):
        one.step()
    for one in (slow, fast):
        one.zero_grad()
ending(net)
