"""Healthy runs with problems of their own, I: several players, rewards, moving targets, learned losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn, optim
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from tests.faults.base import Run
from tests.faults.healthy_tools import alone, fell, healthy, mean, turns
from tests.runs.programs import digits, mlp


def some_digits(count: int) -> Callable[[Generator], tuple[Tensor, Tensor]]:
    """Random digits, as a function of a generator."""

    def draw(generator: Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(digits()[0]), (count,), generator=generator)
        return digits()[0][rows], digits()[1][rows]

    return draw


@healthy("mlp", steps=200)
def gan(run: Run) -> None:
    """Neither loss falls and one rises, because two players pull at each other: the samples still get better."""
    torch.manual_seed(run.seed)
    maker, critic = mlp(8, 48, 64), mlp(64, 48, 1, act=nn.SiLU)
    model = nn.ModuleDict({"maker": maker, "critic": critic})  # its own forward is never called
    ways = {
        "critic": optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99)),
        "maker": optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.99)),
    }

    def criticise(batch: tuple[Tensor, ...]) -> tuple[optim.Optimizer, Tensor]:
        fake = maker(torch.randn(len(batch[0]), 8).to(run.device)).sigmoid().detach()
        return ways["critic"], F.softplus(-critic(batch[0])).mean() + F.softplus(critic(fake)).mean()

    def make(batch: tuple[Tensor, ...]) -> tuple[optim.Optimizer, Tensor]:
        return ways["maker"], F.softplus(-critic(maker(torch.randn(len(batch[0]), 8).to(run.device)).sigmoid())).mean()

    def distance() -> float:
        with torch.no_grad():
            made = maker(torch.randn(400, 8, generator=Generator().manual_seed(1))).sigmoid()
        return float((made.mean(0) - digits()[0].mean(0)).norm())

    start = distance()
    alone(run, model, ways, some_digits(32), lambda *_: torch.zeros(()), lambda: distance() < start / 2)
    turns(run, criticise, make)


@healthy("cnn", steps=150)
def wgan_clipped(run: Run) -> None:
    """A loss that is a difference of scores, of any sign and size, and weights cut to a box before every step."""
    torch.manual_seed(run.seed)
    maker, critic = mlp(8, 48, 64), mlp(64, 48, 1, act=nn.SiLU)
    model = nn.ModuleDict({"maker": maker, "critic": critic})
    ways = {
        "critic": optim.RMSprop(critic.parameters(), lr=2e-3),
        "maker": optim.RMSprop(maker.parameters(), lr=1e-3),
    }

    def criticise(batch: tuple[Tensor, ...]) -> tuple[optim.Optimizer, Tensor]:
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.1, 0.1)
        fake = maker(torch.randn(len(batch[0]), 8).to(run.device)).sigmoid().detach()
        return ways["critic"], critic(fake).mean() - critic(batch[0]).mean()

    def make(batch: tuple[Tensor, ...]) -> tuple[optim.Optimizer, Tensor]:
        return ways["maker"], -critic(maker(torch.randn(len(batch[0]), 8).to(run.device)).sigmoid()).mean()

    def distance() -> float:
        with torch.no_grad():
            made = maker(torch.randn(400, 8, generator=Generator().manual_seed(1))).sigmoid()
        return float((made.mean(0) - digits()[0].mean(0)).norm())

    start = distance()
    alone(run, model, ways, some_digits(32), lambda *_: torch.zeros(()), lambda: distance() < start / 2)
    turns(run, criticise, criticise, make)


@healthy("rnn", steps=250)
def policy_gradient(run: Run) -> None:
    """The loss is noise around zero that changes sign and never falls; what rises is the reward."""
    torch.manual_seed(run.seed)
    model = mlp(6, 32, 4, act=nn.Tanh)
    rewards: list[float] = []

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        log_policy = model(batch[0]).log_softmax(-1)
        action = torch.multinomial(log_policy.exp(), 1)
        noise = torch.randn(len(action)).to(run.device)
        reward = (action.squeeze(-1) == batch[0][:, :4].argmax(-1)).float() + 0.3 * noise
        advantage = reward - mean(rewards[-20:] or [0.0])
        rewards.append(float(reward.mean()))
        return -(log_policy.gather(1, action).squeeze(-1) * advantage).mean()

    alone(
        run, model, optim.Adam(model.parameters(), lr=1e-2), lambda g: (torch.randn(24, 6, generator=g),), loss,
        lambda: mean(rewards[-40:]) > mean(rewards[:20]) + 0.2,
    )  # fmt: skip


@healthy("lm", steps=240)
def ppo_inner_steps(run: Run) -> None:
    """Eight steps on each batch with a clipped objective: losses near zero, then a jump at every new batch."""
    torch.manual_seed(run.seed)
    model = nn.ModuleDict({"actor": mlp(6, 32, 4, act=nn.Tanh), "critic": mlp(6, 32, 1, act=nn.Tanh)})
    rewards: list[float] = []
    old: dict[str, Tensor] = {}

    def batch(generator: Generator) -> tuple[Tensor, ...]:
        if run.step % 8 == 0 or not old:
            old["x"] = torch.randn(48, 6, generator=generator)
            with torch.no_grad():
                x = old["x"].to(run.device)
                policy, value = model["actor"](x).log_softmax(-1).cpu(), model["critic"](x).cpu()
                old["action"] = torch.multinomial(policy.exp(), 1, generator=generator)
                old["log"] = policy.gather(1, old["action"])
                old["reward"] = (old["action"] == old["x"][:, :4].argmax(-1, keepdim=True)).float()
                advantage = old["reward"] - value
                old["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
            rewards.append(float(old["reward"].mean()))
            old.update({key: part.to(run.device) for key, part in old.items()})
        return old["x"], old["action"]

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        policy = model["actor"](batch[0]).log_softmax(-1)
        ratio = (policy.gather(1, batch[1]) - old["log"]).exp()
        gain = torch.minimum(ratio * old["advantage"], ratio.clamp(0.8, 1.2) * old["advantage"]).mean()
        entropy = -(policy.exp() * policy).sum(-1).mean()
        return -gain + 0.5 * F.mse_loss(model["critic"](batch[0]), old["reward"]) - 0.01 * entropy

    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    alone(run, model, optimizer, batch, loss, lambda: mean(rewards[-5:]) > mean(rewards[1:4]) + 0.2)


@healthy("contrastive", steps=250)
def dqn_target_network(run: Run) -> None:
    """Each copy to the target network makes the loss jump, and half of the module's weights get no gradient."""
    torch.manual_seed(run.seed)
    size = 8
    model = nn.ModuleDict({"online": mlp(size, 32, 2), "target": mlp(size, 32, 2)})
    model["target"].load_state_dict(model["online"].state_dict())
    model["target"].requires_grad_(False)

    def batch(generator: Generator) -> tuple[Tensor, ...]:
        if run.step % 20 == 0:
            model["target"].load_state_dict(model["online"].state_dict())
        place = torch.randint(size - 1, (32,), generator=generator)
        move = torch.randint(2, (32,), generator=generator)
        then = (place + 2 * move - 1).clamp(min=0)  # a corridor: the reward is at its right end
        return F.one_hot(place, size).float(), move, F.one_hot(then, size).float(), (then == size - 1).float()

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        place, move, then, reward = batch
        with torch.no_grad():
            value = 5 * reward + 0.9 * (1 - reward) * model["target"](then).max(-1).values
        return F.mse_loss(model["online"](place).gather(1, move[:, None]).squeeze(-1), value)

    def goes_right() -> bool:
        return int(model["online"](torch.eye(size)[: size - 1]).argmax(-1).sum()) >= size - 2

    alone(run, model, optim.Adam(model["online"].parameters(), lr=5e-3), batch, loss, goes_right)


@healthy("segment")
def maml_double_backward(run: Run) -> None:
    """Gradients of gradients: what the optimizer gets comes through an inner step, on other tasks every time."""
    torch.manual_seed(run.seed)
    model = mlp(1, 24, 24, 1, act=nn.Tanh)

    def batch(generator: Generator) -> tuple[Tensor, ...]:
        x = torch.rand(4, 20, 1, generator=generator) * 6 - 3
        amplitude = 1 + torch.rand(4, 1, 1, generator=generator)
        return x, amplitude * (x + 2 * torch.rand(4, 1, 1, generator=generator)).sin()

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        total = torch.zeros(())
        weights = dict(model.named_parameters())
        for x, y in zip(*batch, strict=True):
            inner = F.mse_loss(functional_call(model, weights, (x[:10],)), y[:10])
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            moved = {name: w - 0.05 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
            total = total + F.mse_loss(functional_call(model, moved, (x[10:],)), y[10:]) / 4
        return total

    alone(run, model, optim.Adam(model.parameters(), lr=5e-3), batch, loss, lambda: fell(run, 0.8))


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(64, 32, 16), mlp(8, 32, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        centre, log_var = self.encode(x).chunk(2, dim=-1)
        code = centre + torch.randn_like(centre) * (log_var / 2).exp()
        return self.decode(code), (centre**2 + log_var.exp() - 1 - log_var).sum(-1).mean() / 2


@healthy("mlp", steps=300)
def vae_kl_warmup(run: Run) -> None:
    """The loss rises steadily for half of the run while the KL term is faded in; the reconstruction stays good."""
    torch.manual_seed(run.seed)
    model = _Variational()
    errors: list[float] = []

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        out, kl = model(batch[0])
        error = F.mse_loss(out, batch[0], reduction="sum") / len(out)
        errors.append(float(error.detach()))
        return error + max(run.step - 150, 0) / 600 * kl

    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    alone(run, model, optimizer, some_digits(32), loss, lambda: mean(errors[-20:]) < 3.8)  # the mean: 4.7


class _Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(64, 48, 32), mlp(32, 48, 64)
        self.register_buffer("codes", torch.zeros(8, 4, 8))
        self.register_buffer("count", torch.zeros(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x).view(-1, 4, 8)
        if not self.count.any():  # the first codes are the first samples
            self.codes.copy_(z[: len(self.codes)].detach())
        nearest = (z[:, None] - self.codes).pow(2).sum(-1).argmin(1)
        chosen = F.one_hot(nearest, 8).to(z.dtype).permute(2, 1, 0)
        if self.training:
            with torch.no_grad():  # the codes are moved here, not by the optimizer; a code nobody uses fades
                self.count.lerp_(chosen.sum(-1), 0.1)
                sums = torch.einsum("ksb,bsd->ksd", chosen, z)
                used = chosen.sum(-1, keepdim=True)
                self.codes.copy_(torch.where(used > 0, self.codes.lerp(sums / used.clamp(min=1), 0.1), self.codes))
        q = torch.einsum("ksb,ksd->bsd", chosen, self.codes)
        return self.decode((z + (q - z).detach()).flatten(1)), F.mse_loss(z, q)


@healthy("cnn", steps=240)
def vq_codebook_in_buffers(run: Run) -> None:
    """Buffers that learn by themselves, a gradient passed straight through, and codes that nobody uses."""
    torch.manual_seed(run.seed)
    model = _Quantised()

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        out, commitment = model(batch[0])
        return F.mse_loss(out, batch[0]) + 0.05 * commitment

    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    alone(run, model, optimizer, some_digits(32), loss, lambda: mean(run.losses[-20:]) < 0.062)  # the mean: 0.073


@healthy("rnn")
def diffusion_noise_levels(run: Run) -> None:
    """Every batch has one noise level, easy or hopeless, so that losses of neighbours differ tenfold for ever."""
    torch.manual_seed(run.seed)
    model = mlp(65, 64, 64, act=nn.SiLU)

    def batch(generator: Generator) -> tuple[Tensor, ...]:
        x = some_digits(8)(generator)[0] * 2 - 1
        return x, torch.rand((), generator=generator).expand(8, 1), torch.randn(x.shape, generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x, level, noise = batch
        mixed = x * (level * 1.57).cos() + noise * (level * 1.57).sin()
        return F.mse_loss(model(torch.cat([mixed, level], 1)), noise)

    alone(run, model, optim.AdamW(model.parameters(), lr=3e-3), batch, loss, lambda: fell(run, 0.7, 10, 40))


class _Teaching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(64, 48, 10), mlp(64, 48, 10)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


@healthy("lm")
def mean_teacher_inside(run: Run) -> None:
    """Half of the module's weights have no gradient and are moved by hand, as a running mean of the other half."""
    torch.manual_seed(run.seed)
    model = _Teaching()

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad():
            for slow, quick in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                slow.lerp_(quick, 0.05)
        own, taught = model(batch[0])
        return F.cross_entropy(own, batch[1]) + F.mse_loss(own.softmax(-1), taught.softmax(-1))

    alone(run, model, optim.Adam(model.parameters(), lr=3e-3), some_digits(32), loss, lambda: fell(run, 0.4))
