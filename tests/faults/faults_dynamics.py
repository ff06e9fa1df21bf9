"""Faults of the dynamics: rates, scales, signs, depth and regularisation that make training diverge or stand still."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from tests.faults.base import Case, Run, set_lr
from tests.faults.inject import (
    ONSET,
    REAL,
    alter,
    alter_once,
    body,
    fault,
    head,
    inputs,
    rebuild,
    replace_head,
    scale_lr,
)  # fmt: skip

DYNAMICS: dict[str, Case] = {}
TOO_FAST = (
    "learning-rate", "update-ratio", "loss-spike", "diverging-loss", "exploding-gradient", "weight-jump",
    "oscillating-loss", "nonfinite-loss", "nonfinite-gradient", "nonfinite-weight",
)  # fmt: skip
TOO_SLOW = ("learning-rate", "update-ratio", "weights-unchanged", "not-learning")
DOWNHILL = ("not-learning", "dead-units", "saturated-units", "collapsed-output")


# ------------------------------------------------------------------------------------------------------------- rates


@fault(DYNAMICS, "dynamics", "drift", *TOO_FAST, at=ONSET)
def rate_tenfold(run: Run) -> None:
    """The rate is ten times as high from now on."""
    scale_lr(run, 10)


@fault(DYNAMICS, "dynamics", "abrupt", *TOO_FAST, at=ONSET)
def rate_hundredfold(run: Run) -> None:
    """The rate is a hundred times as high from now on."""
    scale_lr(run, 100)


@fault(DYNAMICS, "dynamics", "abrupt", *TOO_FAST, at=ONSET)
def rate_thousandfold(run: Run) -> None:
    """The rate is a thousand times as high from now on: a 1e-3 that lost its exponent."""
    scale_lr(run, 1000)


@fault(DYNAMICS, "dynamics", "abrupt", *TOO_FAST, since=ONSET)
def rate_spike(run: Run) -> None:
    """The rate is three hundred times as high for one step."""
    scale_lr(run, {ONSET: 300.0, ONSET + 1: 1 / 300}.get(run.step, 1.0))


@fault(DYNAMICS, "dynamics", "drift", *TOO_FAST, "not-learning", "dead-units", "collapsed-output", "saturated-units")
def warmup_forgotten(run: Run) -> None:
    """The rate is thirty times too high from the first step on (more where the model shrugs that off)."""
    scale_lr(run, {"lm": 100, "contrastive": 100, "segment": 1000}.get(run.task.family, 30))


@fault(DYNAMICS, "dynamics", "wiring", "weights-unchanged", *TOO_SLOW)
def rate_zero(run: Run) -> None:
    """The rate is zero from the first step on."""
    set_lr(run.optimizer, 0.0)


@fault(DYNAMICS, "dynamics", "wiring", "learning-rate", "weights-unchanged", "update-ratio", at=ONSET, silent=True)
def schedule_ends_too_early(run: Run) -> None:
    """A schedule counted in epochs but stepped in batches is at zero long before the end."""
    run.scheduler = lr_scheduler.LambdaLR(run.optimizer, lambda i: 0.0)


@fault(DYNAMICS, "dynamics", "drift", "not-learning", *TOO_SLOW)
def rate_far_too_small(run: Run) -> None:
    """The rate is ten thousand times too small."""
    scale_lr(run, 1e-4)


@fault(DYNAMICS, "dynamics", "drift", *TOO_SLOW, onset=1)
def decay_stepped_every_batch(run: Run) -> None:
    """A decay meant for every epoch is made after every batch."""
    run.scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.7)


def freeze(run: Run) -> None:
    """Freeze the trunk, as is done on purpose."""
    body(run).requires_grad_(False)


@fault(DYNAMICS, "dynamics", "abrupt", *TOO_FAST, at=ONSET, setup=freeze)
def trunk_unfrozen_too_fast(run: Run) -> None:
    """A trunk that was frozen by intent is let go at a rate a hundred times too high."""
    scale_lr(run, 100)
    body(run).requires_grad_(True)


@fault(DYNAMICS, "dynamics", "drift", "oscillating-loss", *TOO_FAST, "not-learning")
def momentum_oscillates(run: Run) -> None:
    """Plain SGD with a momentum of 0.99 at a rate that swings around every valley."""
    rates = {"mlp": 0.1, "cnn": 0.1, "rnn": 0.5, "lm": 0.15, "contrastive": 0.05, "segment": 1.0}
    rebuild(run, optim.SGD, lr=rates[run.task.family], momentum=0.99)


# ----------------------------------------------------------------------------------------------- gradients and signs


@fault(DYNAMICS, "dynamics", "abrupt", "exploding-gradient", *TOO_FAST, at=ONSET)
def gradient_thousandfold(run: Run) -> None:
    """The loss of one batch weighs a thousand times as much."""
    alter_once(run, "forward", lambda loss: loss * 1000)


@fault(DYNAMICS, "dynamics", "abrupt", "outlier-batch", *TOO_FAST, at=ONSET, families=REAL, silent=True)
def batch_thousandfold(run: Run) -> None:
    """The inputs of one batch are a thousand times as large (BatchNorm hides it until evaluation)."""
    alter_once(run, "draw", inputs(lambda x: x * 1000))


@fault(DYNAMICS, "dynamics", "abrupt", "loss-spike", "exploding-gradient", *TOO_FAST, at=ONSET, silent=True)
def sum_instead_of_mean(run: Run) -> None:
    """The loss is a sum over the batch from now on, no more its mean."""
    size = run.task.batch(0, 0)[-1].numel()
    alter(run, "forward", lambda loss: loss * size)


@fault(
    DYNAMICS, "dynamics", "drift", "vanishing-gradient", "not-learning", "update-ratio", "weights-unchanged",
    "learning-rate", families=("cnn",), silent=True,
)  # fmt: skip
def loss_weighs_nothing(run: Run) -> None:
    """The loss is multiplied by 1e-6, and nothing in plain SGD makes up for it."""
    alter(run, "forward", lambda loss: loss * 1e-6)


def ascend(run: Run) -> None:
    """Climb instead of descending."""
    for group in run.optimizer.param_groups:
        group["maximize"] = True


@fault(DYNAMICS, "dynamics", "drift", "diverging-loss", *TOO_FAST, "not-learning")
def sign_wrong_from_the_start(run: Run) -> None:
    """The optimizer climbs."""
    ascend(run)


@fault(DYNAMICS, "dynamics", "drift", "diverging-loss", *TOO_FAST, at=ONSET)
def sign_flips(run: Run) -> None:
    """The optimizer climbs from now on."""
    ascend(run)


@fault(DYNAMICS, "dynamics", "drift", "diverging-loss", *TOO_FAST, silent=True)
def loss_negated(run: Run) -> None:
    """What is minimised is minus the loss: it falls without end."""
    alter(run, "forward", lambda loss: -loss)


@fault(DYNAMICS, "dynamics", "drift", "diverging-loss", *TOO_FAST, at=ONSET)
def negative_weight_decay(run: Run) -> None:
    """Weight decay with the wrong sign lets every weight grow."""
    for group in run.optimizer.param_groups:
        group["weight_decay"] = -0.05 / group["lr"] if isinstance(run.optimizer, optim.AdamW) else -1.0


@fault(DYNAMICS, "dynamics", "drift", "chronic-clipping", "not-learning", "update-ratio", silent=True)
def clipped_to_nothing(run: Run) -> None:
    """The loop clips every gradient to a norm of 0.001."""
    run.clip = 1e-3


@fault(
    DYNAMICS,
    "dynamics",
    "drift",
    "chronic-clipping",
    "not-learning",
    config={"clip": 1e-3, "mode": "advise"},
    silent=True,
)
def clipped_to_nothing_by_the_guard(run: Run) -> None:
    """The guard is told to clip every gradient to a norm of 0.001."""


# ----------------------------------------------------------------------------------------------- units, depth, outputs


@fault(DYNAMICS, "dynamics", "wiring", "dead-units", "zero-gradient", "vanishing-gradient", *DOWNHILL, families=REAL)
def dead_rectifiers(run: Run) -> None:
    """The biases before the rectifiers are so low that none of them ever fires."""
    norms = [m for m in run.model.modules() if isinstance(m, nn.BatchNorm2d)]
    linear = [m for m in run.model.modules() if isinstance(m, nn.Linear)]
    last = {head(run), run.model.get_submodule("left.2")} if run.task.family == "contrastive" else {head(run)}
    for module in norms or [m for m in linear if m not in last]:
        nn.init.constant_(module.bias, -10.0)


def stack_before_head(run: Run, depth: int, act: type[nn.Module], gain: float = 1.0) -> None:
    """Put a stack of layers as wide as the last one's input in front of it."""
    last = head(run)
    wide = last.weight.shape[1] if isinstance(last, nn.Linear | nn.Conv2d) else 0
    layers: list[nn.Module] = []
    for _ in range(depth):
        layer = nn.Conv2d(wide, wide, 1) if isinstance(last, nn.Conv2d) else nn.Linear(wide, wide)
        nn.init.xavier_uniform_(layer.weight, gain)
        layers += [layer, act()]
    replace_head(run, nn.Sequential(*layers, last).to(run.device))
    rebuild(run)


@fault(DYNAMICS, "dynamics", "wiring", "vanishing-gradient", "zero-gradient", *DOWNHILL, "update-ratio")
def deep_sigmoids(run: Run) -> None:
    """Twelve layers of sigmoids: a quarter of the gradient is left after each, at best."""
    stack_before_head(run, 12, nn.Sigmoid)


@fault(DYNAMICS, "dynamics", "wiring", "vanishing-gradient", "zero-gradient", *DOWNHILL, "update-ratio")
def deep_thin_tanh(run: Run) -> None:
    """Twenty layers of tanh, begun so small that neither signal nor gradient comes through."""
    stack_before_head(run, 20, nn.Tanh, gain=0.2)


@fault(
    DYNAMICS, "dynamics", "wiring", "saturated-units", "vanishing-gradient", "exploding-gradient", "zero-gradient",
    *DOWNHILL, "update-ratio", "loss-spike",
)  # fmt: skip
def saturated_tanh(run: Run) -> None:
    """Three layers of tanh, begun so large that every unit sits at its end."""
    stack_before_head(run, 3, nn.Tanh, gain=300.0)


@fault(
    DYNAMICS, "dynamics", "abrupt", "collapsed-output", "zero-gradient", "missing-gradient", "loss-spike",
    "vanishing-gradient", "dead-units", at=ONSET, families=("cnn", "rnn"),
)  # fmt: skip
def dropout_drops_all(run: Run) -> None:
    """The rate of dropout is set to 1.0 where 0.1 was meant: the last layer sees zeros."""
    for module in run.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 1.0


@fault(
    DYNAMICS, "dynamics", "abrupt", "collapsed-output", "zero-gradient", "loss-spike", "vanishing-gradient",
    "constant-batch", "modality-collapse", at=ONSET,
)  # fmt: skip
def output_collapses(run: Run) -> None:
    """A layer's output no longer depends on its input: the last layer sees the same for every sample."""
    head(run).register_forward_pre_hook(lambda module, args: (args[0] * 0 + 0.5,))


@fault(DYNAMICS, "dynamics", "drift", "overfitting", "data-replayed", "repeated-batch", silent=True, steps=400,
       families=("mlp", "rnn", "lm", "contrastive", "segment"))  # fmt: skip
def overfitting(run: Run) -> None:
    """A training set of two batches, seen again and again."""
    run.validate_every = 10
    small = [torch.cat(pair) for pair in zip(run.task.batch(0, 0), run.task.batch(1, 0), strict=True)]

    def draw() -> tuple[Tensor, ...]:
        order = torch.randperm(len(small[0]), generator=torch.Generator().manual_seed(run.step))
        return tuple(part[order[: len(order) // 2]] for part in small)

    run.draw = draw  # type: ignore[method-assign]


@fault(DYNAMICS, "dynamics", "drift", "softmax-twice", "not-learning", silent=True, families=("mlp", "cnn"))
def softmax_twice(run: Run) -> None:
    """The model ends in a softmax, and the loss applies another one."""
    replace_head(run, nn.Sequential(head(run), nn.Softmax(-1)))


@fault(DYNAMICS, "dynamics", "drift", "logits-out-of-range", *TOO_FAST, "not-learning", families=("cnn", "lm"))
def head_too_large(run: Run) -> None:
    """The last layer begins two hundred times too large: the first answers are sure and wrong."""
    with torch.no_grad():
        for param in head(run).parameters():
            param.mul_(200.0)


@fault(DYNAMICS, "dynamics", "drift", "loss-unbounded", *TOO_FAST, silent=True)
def penalty_turned_round(run: Run) -> None:
    """The weight penalty has the wrong sign: the loss can be lowered endlessly without learning anything."""
    alter(run, "forward", lambda loss: loss - 0.1 * sum(p.square().sum() for p in run.model.parameters()))


# ------------------------------------------------------------------------------------------------------- contrastive


def temperature_group(run: Run) -> None:
    """Give the temperature a group of its own."""
    scale = run.model.get_parameter("logit_scale")
    others = [p for p in run.model.parameters() if p is not scale]
    rebuild(run, params=[{"params": others}, {"params": [scale], "weight_decay": 0.0}])


@fault(
    DYNAMICS, "dynamics", "drift", "temperature-runaway", "loss-spike", "diverging-loss", "update-ratio",
    "learning-rate", "exploding-gradient", "nonfinite-loss",
    at=ONSET, setup=temperature_group, families=("contrastive",),
)  # fmt: skip
def temperature_runs_away(run: Run) -> None:
    """The logarithm of the temperature is taught at the rate of a bias, with the wrong sign and no bound."""
    run.optimizer.param_groups[1].update(lr=0.1, maximize=True)


@fault(
    DYNAMICS, "dynamics", "drift", "temperature-runaway", "vanishing-gradient", "not-learning", "learning-rate",
    "update-ratio", at=ONSET, setup=temperature_group, families=("contrastive",),
)  # fmt: skip
def temperature_decays(run: Run) -> None:
    """Weight decay on the temperature pulls it to where all pairs look alike."""
    run.optimizer.param_groups[1].update(lr=0.1, weight_decay=2.0)


@fault(
    DYNAMICS, "dynamics", "drift", "modality-collapse", "collapsed-output", "zero-gradient", "missing-gradient",
    "constant-batch", "not-learning", "loss-spike", at=ONSET, families=("contrastive",),
)  # fmt: skip
def one_tower_constant(run: Run) -> None:
    """One tower gives the same embedding for every sample from now on."""
    run.model.get_submodule("right").register_forward_hook(lambda module, args, out: out[:1].expand_as(out))


@fault(
    DYNAMICS, "data", "abrupt", "modality-collapse", "constant-batch", "collapsed-output", "loss-spike",
    at=ONSET, families=("contrastive",),
)  # fmt: skip
def one_modality_blank(run: Run) -> None:
    """One side's decoder fails from now on and gives blanks."""
    alter(run, "draw", lambda batch: (batch[0], torch.zeros_like(batch[1])))
