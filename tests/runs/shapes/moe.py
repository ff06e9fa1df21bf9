"""A mixture of experts with noisy top-2 gating and a load balancing loss, in the style of lucidrains."""

import torch
import torch.nn.functional as F
from shapes_common import ending, start
from torch import nn

steps, seed = start()


def exists(val):
    return val is not None


def default(val, d):
    return val if exists(val) else d


class Experts(nn.Module):
    def __init__(self, dim, num_experts=4, hidden_dim=None):
        super().__init__()
        hidden_dim = default(hidden_dim, dim * 4)
        std = 1 / dim**0.5
        self.w1 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim).uniform_(-std, std))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim).uniform_(-std, std))

    def forward(self, x):
        hidden = F.gelu(torch.einsum("nd,edh->enh", x, self.w1))
        return torch.einsum("enh,ehd->end", hidden, self.w2)


class Top2Gating(nn.Module):
    def __init__(self, dim, num_gates, noise=1e-1):
        super().__init__()
        self.num_gates, self.noise = num_gates, noise
        self.w_gating = nn.Parameter(torch.randn(dim, num_gates) * 0.1)

    def forward(self, x):
        raw_gates = x @ self.w_gating
        if self.training:
            raw_gates = raw_gates + self.noise * torch.randn_like(raw_gates)
        gates = raw_gates.softmax(dim=-1)
        top, index = gates.topk(2, dim=-1)
        combine = torch.zeros_like(gates).scatter(1, index, top / top.sum(-1, keepdim=True))
        density_1 = F.one_hot(index[:, 0], self.num_gates).float().mean(0)
        density_1_proxy = gates.mean(0)
        loss = (density_1_proxy * density_1).mean() * float(self.num_gates**2)
        return combine, loss


class MoE(nn.Module):
    def __init__(self, dim, num_experts=4, hidden_dim=None, loss_coef=1e-2):
        super().__init__()
        self.gate, self.experts = Top2Gating(dim, num_experts), Experts(dim, num_experts, hidden_dim)
        self.loss_coef = loss_coef

    def forward(self, inputs):
        combine, loss = self.gate(inputs)
        output = torch.einsum("ne,end->nd", combine, self.experts(inputs))
        return output, loss * self.loss_coef


class Model(nn.Module):
    def __init__(self, dim_in, dim, dim_out):
        super().__init__()
        self.proj_in, self.norm, self.moe = nn.Linear(dim_in, dim), nn.LayerNorm(dim), MoE(dim, 4, 48)
        self.to_out = nn.Linear(dim, dim_out)

    def forward(self, x):
        x = self.proj_in(x)
        out, aux_loss = self.moe(self.norm(x))
        return self.to_out(x + out), aux_loss


class Clusters:
    """Points of four clusters; in each of them another linear rule says what belongs to a point."""

    def __init__(self):
        self.centres, self.rules = torch.randn(4, 8) * 2, torch.randn(4, 8, 3)

    def batch(self, num):
        which = torch.randint(4, (num,))
        offset = torch.randn(num, 8)
        y = torch.einsum("nd,ndo->no", offset, self.rules[which]).argmax(-1)
        return self.centres[which] + offset, y


def cycle(data):
    while True:
        yield data.batch(32)


data = Clusters()
loader = cycle(data)
model = Model(8, 24, 3)
optim = torch.optim.Adam(model.parameters(), lr=2e-3)
for i in range(steps):
    model.train()
    x, y = next(loader)
    out, aux_loss = model(x)
    loss = F.cross_entropy(out, y) + aux_loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optim.step()
    optim.zero_grad()
    if i % 50 == 0:
        print(f"training loss: {loss.item():.4f} aux {aux_loss.item():.4f}")

model.eval()
with torch.no_grad():
    x, y = data.batch(500)
    accuracy = float((model(x)[0].argmax(-1) == y).float().mean())
    load = model.moe.gate(model.norm(model.proj_in(x)))[0].mean(0)
print(f"validation accuracy {accuracy:.3f}, load {[round(v, 2) for v in load.tolist()]}")
ending(steps, accuracy > 0.75, model, optim, final=accuracy)
