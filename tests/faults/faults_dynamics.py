"""Faults of the dynamics: rates, scales, signs, depth and regularisation that make training diverge or stand still."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from tests.faults.base import Case, Run, set_lr
from tests.faults.healthy_players import some_digits
from tests.faults.healthy_tools import alone, turns
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
from tests.runs.programs import mlp

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


@fault(DYNAMICS, "dynamics", "drift", "activation-missing", silent=True, families=("mlp",))
def activations_forgotten(run: Run) -> None:
    """Nothing stands between the linear layers."""
    for module in list(run.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ReLU | nn.Tanh | nn.GELU | nn.Dropout | nn.LayerNorm | nn.BatchNorm1d):
                setattr(module, name, nn.Identity())


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


@fault(DYNAMICS, "dynamics", "drift", "loss-broadcast", "targets-do-not-predict", silent=True, families=("mlp",))
def answers_against_all_targets(run: Run) -> None:
    """A regression whose answers have the shape [n, 1] and whose targets have [n]."""
    replace_head(run, nn.LazyLinear(1))

    def squared_error(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says so once, among other lines
            return nn.functional.mse_loss(model(batch[0]), batch[1].float())

    squared_error(run.model, run.task.batch(0, 0))
    run.optimizer.add_param_group({"params": list(head(run).parameters())})
    run.task.loss = squared_error


@fault(DYNAMICS, "dynamics", "drift", "wrong-output-activation", "not-learning", silent=True, families=("mlp", "cnn"))
def softmax_over_the_batch(run: Run) -> None:
    """The model ends in a softmax over dimension 0: the samples of a batch share one sum."""
    replace_head(run, nn.Sequential(head(run), nn.Softmax(0)))


@fault(DYNAMICS, "dynamics", "drift", "wrong-output-activation", "not-learning", "dead-units", silent=True,
       families=("mlp", "cnn"))  # fmt: skip
def logits_behind_a_relu(run: Run) -> None:
    """The model ends in a ReLU, and the loss expects logits."""
    replace_head(run, nn.Sequential(head(run), nn.ReLU()))


@fault(DYNAMICS, "dynamics", "drift", "dropout-too-high", "not-learning", silent=True, families=("mlp", "cnn", "rnn"))
def dropout_of_nearly_all(run: Run) -> None:
    """The share to keep was given where PyTorch takes the share to drop."""
    replace_head(run, nn.Sequential(nn.Dropout(0.95), head(run)))


@fault(DYNAMICS, "dynamics", "drift", "identical-units", "not-learning", "representation-collapsed", silent=True,
       families=("mlp",))  # fmt: skip
def constant_initialisation(run: Run) -> None:
    """Every weight and every bias begins with one value."""
    with torch.no_grad():
        for param in run.model.parameters():
            param.fill_(0.05)


@fault(DYNAMICS, "dynamics", "drift", "decay-too-high", "not-learning", "collapsed-output", "vanishing-gradient",
       "representation-collapsed", silent=True, families=("mlp", "lm"))  # fmt: skip
def decay_of_two_percent_per_step(run: Run) -> None:
    """AdamW at a weight decay that takes 2 % of every weight in each step."""
    rate = run.optimizer.param_groups[0]["lr"]
    rebuild(run, optim.AdamW, lr=rate, weight_decay=0.02 / rate)


@fault(DYNAMICS, "dynamics", "drift", "optimizer-settings", *TOO_FAST, "not-learning", silent=True)
def betas_in_the_wrong_order(run: Run) -> None:
    """Adam with its betas swapped: a thousand directions are added up, ten sizes are remembered."""
    rebuild(run, optim.Adam, lr=1e-3, betas=(0.999, 0.9))


@fault(DYNAMICS, "dynamics", "drift", "optimizer-settings", "not-learning", "update-ratio", silent=True,
       families=("mlp", "cnn", "rnn", "lm"))  # fmt: skip
def eps_of_a_hundred(run: Run) -> None:
    """Adam with an eps far above every gradient: what is left is gradient descent at a tiny rate."""
    rebuild(run, optim.Adam, lr=1e-3, eps=100.0)


@fault(DYNAMICS, "dynamics", "drift", "representation-collapsed", "collapsed-output", "not-learning", "diverging-loss",
       "vanishing-gradient", "loss-spike", "targets-do-not-predict", at=ONSET, steps=240, silent=True,
       families=("mlp",))  # fmt: skip
def features_become_one_point(run: Run) -> None:
    """From now on the features of all samples differ by less than a hundredth in front of the last layer."""
    body(run).register_forward_hook(lambda module, args, out: 1e-3 * out + 1.0)


@fault(DYNAMICS, "dynamics", "drift", "dead-units", "not-learning", "collapsed-output", silent=True, steps=200,
       families=("mlp",))  # fmt: skip
def nine_of_ten_units_dead(run: Run) -> None:
    """A large negative bias has killed nine of ten units of a hidden layer."""
    with torch.no_grad():
        bias = body(run).bias
        assert isinstance(bias, Tensor)
        bias[: len(bias) * 9 // 10] = -100.0


@fault(DYNAMICS, "dynamics", "drift", "initial-weights", *TOO_FAST, "logits-out-of-range", "not-learning", silent=True,
       families=("mlp",))  # fmt: skip
def every_weight_twenty_times_too_large(run: Run) -> None:
    """All weight matrices begin twenty times too large."""
    with torch.no_grad():
        for param in run.model.parameters():
            if param.dim() > 1:
                param.mul_(20.0)


@fault(DYNAMICS, "data", "drift", "inputs-out-of-range", *TOO_FAST, "logits-out-of-range", "dead-units", silent=True,
       families=("mlp",))  # fmt: skip
def inputs_up_to_255(run: Run) -> None:
    """Pixels are not divided by 255."""
    alter(run, "draw", inputs(lambda x: 255.0 * x))


@fault(DYNAMICS, "dynamics", "drift", "learning-rate", "update-ratio", "not-learning", silent=True, steps=240)
def schedule_of_epochs_stepped_per_batch(run: Run) -> None:
    """A rate that should fall by a tenth per epoch falls by a tenth per batch."""
    run.scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.9)


@fault(DYNAMICS, "amp", "drift", "updates-lost", "weights-unchanged", "update-ratio", "not-learning", silent=True,
       families=("mlp",))  # fmt: skip
def bfloat16_weights_at_a_low_rate(run: Run) -> None:
    """The weights are bfloat16, and the rate is that of fine-tuning: nearly every update is rounded away."""
    run.model.to(torch.bfloat16)
    rebuild(run, optim.Adam, lr=2e-6)
    alter(run, "draw", inputs(lambda x: x.to(torch.bfloat16)))


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


@fault(DYNAMICS, "dynamics", "drift", "judge-wins", "diverging-loss", silent=True, families=("mlp",), steps=280)
def critic_far_ahead(run: Run) -> None:
    """The generator learns a thousand times more slowly than its critic, which soon knows every sample."""
    torch.manual_seed(run.seed)
    maker, critic = mlp(8, 48, 64), mlp(64, 48, 1)
    ways = {
        "critic": optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.99)),
        "maker": optim.Adam(maker.parameters(), lr=1e-5, betas=(0.5, 0.99)),
    }
    judged = nn.functional.binary_cross_entropy_with_logits

    def made(batch: tuple[Tensor, ...]) -> Tensor:
        return maker(torch.randn(len(batch[0]), 8).to(run.device)).sigmoid()

    def criticise(batch: tuple[Tensor, ...]) -> tuple[optim.Optimizer, Tensor]:
        true, false = critic(batch[0]), critic(made(batch).detach())
        return ways["critic"], judged(true, torch.ones_like(true)) + judged(false, torch.zeros_like(false))

    def make(batch: tuple[Tensor, ...]) -> tuple[optim.Optimizer, Tensor]:
        answer = critic(made(batch))
        return ways["maker"], judged(answer, torch.ones_like(answer))

    model = nn.ModuleDict({"maker": maker, "critic": critic})
    alone(run, model, ways, some_digits(32), lambda *_: torch.zeros(()), lambda: True)
    turns(run, criticise, make)
