"""Healthy oddities of the model and of what moves it: frozen parts, adapters, constraints, averages, extra passes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.faults.base import Run
from tests.faults.healthy_tools import (
    HEADED,
    after,
    at_step,
    before,
    head_of,
    healthy,
    pretrain,
    rate,
    rebuild,
    use,
)

MATRICES = ("mlp", "cnn", "contrastive", "segment")  # plain layers, none of whose weights is shared
NORMED = ("cnn", "segment")  # with BatchNorm


def layers(model: nn.Module) -> list[nn.Module]:
    """The linear and convolutional layers."""
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]


def trunk_of(run: Run) -> Iterator[nn.Parameter]:
    """All parameters but the head's."""
    head = {id(p) for p in head_of(run.model).parameters()}
    return (p for p in run.model.parameters() if id(p) not in head)


def freeze(run: Run, frozen: bool = True) -> None:
    """Take the trunk's gradients away, or give them back."""
    for p in trunk_of(run):
        p.requires_grad_(not frozen)


@healthy(*HEADED)
def trunk_frozen_but_held(run: Run) -> None:
    """Most of what the optimizer holds never has a gradient: a trained trunk, frozen, under a new head."""
    pretrain(run, 60)
    head_of(run.model).reset_parameters()  # type: ignore[operator]
    freeze(run)


@healthy(*HEADED)
def trunk_left_out(run: Run) -> None:
    """The optimizer holds the head alone, as in linear probing: nine of ten weights are in no group."""
    pretrain(run, 60)
    head_of(run.model).reset_parameters()  # type: ignore[operator]
    freeze(run)
    rebuild(run, head_of(run.model).parameters())


@healthy(*HEADED)
def thawed_in_the_middle(run: Run) -> None:
    """Weights that stood still begin to move, as new groups of the optimizer, with a jump of the gradient norm."""
    freeze(run)
    rebuild(run, head_of(run.model).parameters())

    def thaw() -> None:
        freeze(run, frozen=False)
        run.optimizer.add_param_group({"params": list(trunk_of(run)), "lr": rate(run) / 2})

    at_step(run, 70, thaw)


@healthy(*HEADED)
def frozen_from_the_middle(run: Run) -> None:
    """Most of the weights stop for good in the middle of the run: only the head is trained on."""
    at_step(run, 90, lambda: freeze(run))


class _LowRank(nn.Module):
    def __init__(self, weight: Tensor, rank: int = 4) -> None:
        super().__init__()
        self.down = nn.Parameter((torch.randn(rank, weight[0].numel()) * 0.1).to(weight.device))
        self.up = nn.Parameter(weight.new_zeros(len(weight), rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down).view_as(weight)


@healthy("mlp", "cnn", "contrastive", "segment", "rnn")
def adapters_from_zero(run: Run) -> None:
    """LoRA: nearly all weights are frozen; half of the rest are zeros, the other half has no slope at first."""
    pretrain(run, 30)
    run.model.requires_grad_(False)
    for layer in layers(run.model):
        parametrize.register_parametrization(layer, "weight", _LowRank(layer.weight))
    rebuild(run, [p for p in run.model.parameters() if p.requires_grad])


@healthy("rnn")
def table_mostly_unused(run: Run) -> None:
    """A vocabulary of two thousand of which fifty occur: almost all rows have gradients of exactly zero."""
    run.model.embed = nn.Embedding(2_000, run.model.embed.embedding_dim).to(run.device)  # type: ignore[union-attr, arg-type]
    rebuild(run)


@healthy(*NORMED)
def bias_before_batchnorm(run: Run) -> None:
    """Biases that BatchNorm subtracts again: their gradients are rounding errors around zero."""
    for layer in layers(run.model):
        if isinstance(layer, nn.Conv2d) and layer.bias is None:
            layer.bias = nn.Parameter(torch.zeros(layer.out_channels, device=run.device))
    rebuild(run)


@healthy(*NORMED)
def batchnorm_kept_in_eval(run: Run) -> None:
    """Some modules are in eval mode while the root is in training: the statistics are kept on purpose."""
    pretrain(run, 80)
    for module in run.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


@healthy("mlp", "contrastive")
def trained_in_eval_mode(run: Run) -> None:
    """The whole model is in eval mode, which changes nothing, as it has no dropout and no BatchNorm."""
    run.model.eval()


@healthy(*MATRICES)
def weights_normed(run: Run) -> None:
    """Weights are computed from a direction and a length: neither is a weight by itself."""
    for layer in layers(run.model):
        parametrizations.weight_norm(layer)
    rebuild(run)


@healthy(*MATRICES, steps=200)
def spectra_normed(run: Run) -> None:
    """Every forward moves buffers, and weights grow without any effect on what is computed."""
    for layer in layers(run.model)[:-1]:  # a head of norm one could not be sure of anything
        parametrizations.spectral_norm(layer)
    rebuild(run)


class _Coarse(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        size = weight.abs().max() / 7
        return weight + ((weight / size).round() * size - weight).detach()


@healthy(*MATRICES)
def weights_quantised(run: Run) -> None:
    """Training for four bits: the weights in use move in jumps, and the gradient does not know of it."""
    for layer in layers(run.model):
        parametrize.register_parametrization(layer, "weight", _Coarse())
    rebuild(run)


@healthy(steps=120)
def weights_clamped(run: Run) -> None:
    """Every weight is cut to a box after each step, so that many stand at its wall."""

    def clamp() -> None:
        with torch.no_grad():
            for p in run.model.parameters():
                if p.dim() > 1:
                    p.clamp_(-0.3, 0.3)

    after(run, "update", clamp)


@healthy("mlp", "cnn", "contrastive", "segment", "rnn")
def rows_renormed(run: Run) -> None:
    """Max-norm: rows that grew too long are shortened after each step, which is not the optimizer's doing."""

    def shorten() -> None:
        with torch.no_grad():
            for p in run.model.parameters():
                if p.dim() > 1:
                    p.copy_(p.renorm(2, 0, 1.5))

    after(run, "update", shorten)


@healthy(*MATRICES)
def weights_pruned(run: Run) -> None:
    """Two thirds of all weights are zero and stay zero, as are their gradients."""
    pretrain(run, 40)
    masks = {p: p.abs() > p.abs().flatten().quantile(0.66) for p in run.model.parameters() if p.dim() > 1}

    def prune() -> None:
        with torch.no_grad():
            for p, mask in masks.items():
                p.mul_(mask)

    def hide() -> None:
        for p, mask in masks.items():
            if p.grad is not None:
                p.grad.mul_(mask)

    prune()
    before(run, "after_backward", hide)
    after(run, "update", prune)


@healthy("contrastive", steps=200)
def temperature_at_its_limit(run: Run) -> None:
    """The temperature is pushed against its limit at every step and put back, as in CLIP."""

    def clamp() -> None:
        with torch.no_grad():
            run.model.logit_scale.clamp_(0, math.log(15))  # type: ignore[union-attr, operator]

    after(run, "update", clamp)


@healthy(steps=120)
def averages_swapped_in(run: Run) -> None:
    """For each validation the weights are exchanged for their running mean, and back again."""
    run.ema = optim.swa_utils.AveragedModel(run.model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9))
    run.validate_every = 10
    validate = run.validate

    def swapped() -> None:
        own = {k: v.clone() for k, v in run.model.state_dict().items()}
        run.model.load_state_dict(run.ema.module.state_dict())
        validate()
        run.model.load_state_dict(own)

    run.validate = swapped  # type: ignore[method-assign]


@healthy()
def average_begins_late(run: Run) -> None:
    """SWA: the averaged copy is never touched before step 100, and lags far behind by then."""

    class Late(optim.swa_utils.AveragedModel):
        def update_parameters(self, model: nn.Module) -> None:
            if run.step >= 100:
                super().update_parameters(model)

    run.ema = Late(run.model)


@healthy(steps=120)
def lookahead(run: Run) -> None:
    """Every five steps the weights go back half of the way they came."""
    params = list(run.model.parameters())
    slow = [p.detach().clone() for p in params]

    def pull() -> None:
        if run.step % 5 == 4:
            with torch.no_grad():
                for p, s in zip(params, slow, strict=True):
                    s.lerp_(p, 0.5)
                    p.copy_(s)

    after(run, "update", pull)


@healthy(steps=120)
def checkpointed_activations(run: Run) -> None:
    """The forward runs again inside of the backward: twice as many calls as there are steps."""
    forward = run.forward
    run.forward = lambda batch: checkpoint(forward, batch, use_reentrant=False)  # type: ignore[method-assign]


@healthy("mlp", "cnn", "rnn", "segment")
def two_optimizers(run: Run) -> None:
    """One loss and two optimizers: neither moves more than a part of the model."""
    trunk = optim.AdamW(list(trunk_of(run)), lr=2e-3)
    rebuild(run, head_of(run.model).parameters())
    run.optimizer = {"trunk": trunk, "head": run.optimizer}

    def each(name: str) -> Any:
        return lambda: [getattr(one, name)() for one in run.optimizer.values()]

    run.update, run.zero_grad = each("step"), each("zero_grad")  # type: ignore[method-assign]


@healthy("mlp", "contrastive", "segment", "cnn")
def slope_penalised(run: Run) -> None:
    """The length of the loss's slope in the input is part of the loss: a second backward through everything."""
    loss_of = run.task.loss

    def forward(batch: tuple[Tensor, ...]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        loss = loss_of(run.model, (x, batch[1]))
        (slope,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
        return loss + 0.05 * slope.square().sum() / len(x)

    run.forward = forward  # type: ignore[method-assign]


@healthy(steps=120)
def sharpness_aware(run: Run) -> None:
    """SAM: two passes a step, the second with weights moved uphill, and the gradient taken there."""

    def one_step() -> None:
        batch = run.next_batch()
        run.backward(run.forward(batch))
        params = [p for p in run.model.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()  # type: ignore[union-attr]
        uphill = [0.05 / norm * p.grad for p in params]  # type: ignore[operator]
        with torch.no_grad():
            for p, move in zip(params, uphill, strict=True):
                p.add_(move)
        run.zero_grad()
        loss = run.forward(batch)
        run.backward(loss)
        with torch.no_grad():
            for p, move in zip(params, uphill, strict=True):
                p.sub_(move)
        run.tell(loss, batch)
        run.losses.append(float(loss.detach()))
        run.update()
        run.zero_grad()
        run.after_update()

    run.one_step = one_step  # type: ignore[method-assign]


@healthy("mlp", "cnn", "rnn", "lm", "contrastive")
def half_dropped_out(run: Run) -> None:
    """Half of the activations are dropped: the training loss stays far above what the model can do."""
    for module in list(run.model.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.5
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ReLU) and run.task.family != "cnn":
                setattr(module, name, nn.Sequential(child, nn.Dropout(0.5)))


@healthy("mlp", "rnn", "lm", "contrastive")
def decayed_hard(run: Run) -> None:
    """Weight decay so strong that weights shrink all the time and the loss stays above its floor."""
    use(run, optim.AdamW, lr=rate(run), weight_decay=1.0)


@healthy(*HEADED)
def head_from_zero(run: Run) -> None:
    """The head begins with zeros, so that the first gradient of everything below it is exactly zero."""
    nn.init.zeros_(head_of(run.model).weight)  # type: ignore[arg-type]


class Equalised(nn.Linear):
    """A linear layer whose weights begin with a deviation of 1 and are rescaled when they are used."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight / math.sqrt(self.in_features), self.bias)


@healthy("mlp")
def weights_rescaled_when_used(run: Run) -> None:
    """Weights of size 1 in every layer, whatever its width, as in StyleGAN: the layers divide by the root of it."""
    for index, module in list(enumerate(run.model)):  # type: ignore[arg-type]
        if isinstance(module, nn.Linear):
            made = Equalised(module.in_features, module.out_features)
            nn.init.normal_(made.weight)
            run.model[index] = made.to(run.device)  # type: ignore[index]
    rebuild(run, run.model.parameters(), lr=0.02)


class Conditioned(nn.Module):
    """A trunk with a branch that is given the same condition for every sample."""

    def __init__(self, trunk: nn.Sequential, width: int) -> None:
        super().__init__()
        self.first, self.rest = trunk[0], trunk[1:]
        self.branch = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.rest(hidden + self.branch(torch.ones(len(x), 8, device=x.device)))
        return out


@healthy("mlp")
def one_condition_for_all(run: Run) -> None:
    """A branch for tasks or time steps gets the same condition all the time: there is only one task so far."""
    assert isinstance(run.model, nn.Sequential)
    run.model = run.task.model = Conditioned(run.model, run.model[0].out_features).to(run.device)  # type: ignore[arg-type]
    rebuild(run, run.model.parameters())


@healthy("mlp", "cnn", steps=240)
def decay_of_a_long_run(run: Run) -> None:
    """AdamW at a weight decay of 1, as it is used where a model should generalise late."""
    use(run, optim.AdamW, lr=1e-3, weight_decay=1.0)


@healthy("mlp", "contrastive")
def half_the_units_asleep(run: Run) -> None:
    """A ReLU network in which half of the units of a layer never wake up: the others do the work."""
    for module in layers(run.model)[:1]:
        with torch.no_grad():
            module.bias[: len(module.bias) // 2] = -20.0  # type: ignore[arg-type, index]


@healthy("mlp", "cnn")
def eps_of_a_recipe(run: Run) -> None:
    """Adam with an eps of 1e-3, as some recipes have it: above the gradients of most weights."""
    use(run, optim.Adam, lr=0.01, eps=1e-3)
