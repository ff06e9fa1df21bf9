"""Faults of wiring and of state: a loop, a graph or an optimizer put together wrongly; changes from outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.faults.base import Case, Run
from tests.faults.inject import (
    MOODY,
    ONSET,
    alter,
    before,
    body,
    fault,
    first_half,
    head,
    moments,
    rebuild,
    replace_head,
    squares,
    weight,
)  # fmt: skip

WIRING: dict[str, Case] = {}
HURT = ("loss-spike", "exploding-gradient", "diverging-loss")
LOST = ("nonfinite-loss", "nonfinite-gradient", "nonfinite-weight")


# -------------------------------------------------------------------------------------------------------- the loop


@fault(WIRING, "wiring", "wiring", "stale-gradient", *HURT, silent=True)
def zero_grad_forgotten(run: Run) -> None:
    """Gradients pile up from the first step on."""
    run.zero_grad = lambda: None  # type: ignore[method-assign]


@fault(WIRING, "wiring", "wiring", "stale-gradient", *HURT, at=ONSET, silent=True)
def zero_grad_lost_midway(run: Run) -> None:
    """Gradients pile up from now on."""
    run.zero_grad = lambda: None  # type: ignore[method-assign]


@fault(WIRING, "wiring", "wiring", "gradients-dropped", silent=True)
def zero_grad_inside_accumulation(run: Run) -> None:
    """Gradients are zeroed before each of four micro-batches: only the last one counts."""
    run.accumulate = 4
    before(run, "backward", run.zero_grad)


@fault(WIRING, "wiring", "wiring", "double-backward", "exploding-gradient", "accumulation-not-divided", silent=True)
def backward_twice(run: Run) -> None:
    """Every loss is taken back twice."""
    original = run.backward

    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        original(loss)

    run.backward = twice  # type: ignore[method-assign]


@fault(WIRING, "wiring", "wiring", "gradient-reversed", *HURT, at=ONSET)
def gradients_turned_round(run: Run) -> None:
    """From now on gradients are multiplied by -1 between the backward pass and the step."""

    def turn() -> None:
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.neg_()

    before(run, "update", turn)


@fault(WIRING, "wiring", "wiring", "missing-gradient", "zero-gradient", "weights-unchanged", "no-grad", "not-learning")
def zero_grad_before_step(run: Run) -> None:
    """Gradients are dropped after backward and before the step."""
    before(run, "update", run.optimizer.zero_grad)


@fault(WIRING, "wiring", "wiring", "zero-gradient", "weights-unchanged", "missing-gradient", "not-learning", at=ONSET,
       silent=True)  # fmt: skip
def gradients_zeroed_before_step(run: Run) -> None:
    """Gradients are filled with zeros after backward and before the step."""
    before(run, "update", lambda: run.optimizer.zero_grad(set_to_none=False))


@fault(WIRING, "wiring", "wiring", "double-step", silent=True)
def stepped_twice(run: Run) -> None:
    """`optimizer.step()` is called twice a batch."""
    before(run, "update", lambda: run.optimizer.step())


@fault(WIRING, "wiring", "wiring", "double-step", at=ONSET, silent=True)
def stepped_twice_from_midway(run: Run) -> None:
    """`optimizer.step()` is called twice a batch from now on, by the loop and by a callback."""
    before(run, "update", lambda: run.optimizer.step())


@fault(WIRING, "wiring", "wiring", "eval-mode", at=ONSET, families=MOODY, silent=True)
def eval_mode_left_on(run: Run) -> None:
    """The model stays in evaluation mode after a validation."""
    run.validate()
    run.model.eval()


@fault(WIRING, "wiring", "wiring", "eval-mode", families=MOODY, silent=True)
def eval_mode_from_the_start(run: Run) -> None:
    """The model was loaded in evaluation mode, and nobody calls `train()`."""
    run.model.eval()


@fault(WIRING, "wiring", "wiring", "accumulation-not-divided", *HURT, silent=True)
def accumulation_not_divided(run: Run) -> None:
    """Four micro-batches are added up, not averaged."""
    run.accumulate = 4
    run.backward = lambda loss: loss.backward()  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------------------- the graph


def without_gradient(module: nn.Module) -> None:
    """Run a module under `no_grad`."""
    module.forward = torch.no_grad()(module.forward)  # type: ignore[method-assign]


def detached(out: Any) -> Any:
    """The same values, cut off from what made them."""
    return out.detach() if isinstance(out, Tensor) else tuple(detached(one) for one in out)


@fault(WIRING, "wiring", "wiring", "no-grad", "missing-gradient", "weights-unchanged", silent=True)
def trunk_under_no_grad(run: Run) -> None:
    """A part of the model runs under `no_grad` and learns nothing."""
    without_gradient(body(run))


@fault(WIRING, "wiring", "wiring", "no-grad", "missing-gradient", "weights-unchanged", at=ONSET, silent=True)
def trunk_under_no_grad_midway(run: Run) -> None:
    """A part of the model runs under `no_grad` from now on."""
    without_gradient(body(run))


@fault(WIRING, "wiring", "wiring", "missing-gradient", "no-grad", "weights-unchanged", silent=True)
def detached_in_the_middle(run: Run) -> None:
    """A `detach()` cuts the graph: what lies before it gets no gradient."""
    body(run).register_forward_hook(lambda module, args, out: detached(out))


@fault(WIRING, "wiring", "wiring", "missing-gradient", "no-grad", "weights-unchanged", "not-learning")
def loss_detached(run: Run) -> None:
    """The loss is made anew from its value: backward runs, and reaches nothing."""
    alter(run, "forward", lambda loss: loss.detach().requires_grad_())


@fault(WIRING, "wiring", "wiring", "zero-gradient", "weights-unchanged", "not-learning", "missing-gradient", at=ONSET,
       silent=True)  # fmt: skip
def loss_weight_zero(run: Run) -> None:
    """The loss is multiplied by a weight that has run down to zero."""
    alter(run, "forward", lambda loss: loss * 0)


@fault(WIRING, "wiring", "wiring", "zero-gradient", "weights-unchanged", at=ONSET, silent=True)
def hook_zeroes_gradient(run: Run) -> None:
    """A gradient hook multiplies the trunk's gradients by a factor that is zero."""
    for param in body(run).parameters():
        param.register_hook(lambda grad: grad * 0)


@fault(WIRING, "wiring", "wiring", "missing-gradient", "no-grad", "weights-unchanged", at=ONSET, silent=True)
def gradients_set_to_none(run: Run) -> None:
    """Code meant for another phase sets the trunk's gradients to None before every step."""

    def freeze() -> None:
        for param in body(run).parameters():
            param.grad = None

    before(run, "after_backward", freeze)


# --------------------------------------------------------------------------------------------------- the optimizer


def fresh(module: nn.Module) -> nn.Module:
    """Another layer of the same shape."""
    if isinstance(module, nn.Conv2d):
        return nn.Conv2d(module.in_channels, module.out_channels, 1).to(module.weight.device)
    assert isinstance(module, nn.Linear)
    new = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
    return new.to(module.weight.device)


STALE = ("stale-optimizer", "optimizer-misses-parameters", "missing-gradient", "weights-unchanged", "untied-weights")


@fault(WIRING, "wiring", "wiring", *STALE, silent=True)
def optimizer_built_too_early(run: Run) -> None:
    """The last layer was replaced after the optimizer had been built: it moves the old one."""
    replace_head(run, fresh(head(run)))


@fault(WIRING, "wiring", "wiring", *STALE, *HURT, at=ONSET, silent=True)
def head_replaced_midway(run: Run) -> None:
    """The last layer is replaced during the run, and the optimizer is not told."""
    replace_head(run, fresh(head(run)))


@fault(WIRING, "wiring", "wiring", "optimizer-misses-parameters", silent=True)
def half_of_the_parameters(run: Run) -> None:
    """The optimizer is given the second half of the parameters only."""
    early = {id(p) for p in first_half(run)}
    rebuild(run, params=[p for p in run.model.parameters() if id(p) not in early])


@fault(WIRING, "wiring", "wiring", "optimizer-misses-parameters", silent=True)
def head_only_by_mistake(run: Run) -> None:
    """The optimizer is given the last layer only, and nothing else is frozen."""
    rebuild(run, params=head(run).parameters())


@fault(
    WIRING, "wiring", "wiring", "untied-weights", "stale-optimizer", "optimizer-misses-parameters",
    at=ONSET, families=("lm",), silent=True,
)  # fmt: skip
def tied_head_broken(run: Run) -> None:
    """The head gets a copy of the embedding: the same today, another one tomorrow."""
    run.model.get_submodule("head").weight = nn.Parameter(run.model.get_parameter("embed.weight").detach().clone())


# ---------------------------------------------------------------------------------------------------- the average


def averaged(run: Run, decay: float = 0.99) -> None:
    """Keep an exponential average beside the model."""
    run.ema = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(decay))


@fault(WIRING, "state", "wiring", "ema-not-moving", silent=True)
def ema_decay_one(run: Run) -> None:
    """The average decays at 1.0: it stays what it was at first."""
    averaged(run, 1.0)


@fault(WIRING, "state", "wiring", "ema-not-moving", at=ONSET, setup=averaged, silent=True)
def ema_not_updated(run: Run) -> None:
    """The average is not updated any more."""
    run.ema.update_parameters = lambda model: None


@fault(WIRING, "state", "nonfinite", "nonfinite-ema", at=ONSET, setup=averaged, silent=True)
def ema_poisoned(run: Run) -> None:
    """One NaN gets into the average and never leaves it; the model is well."""
    next(run.ema.module.parameters()).data.view(-1)[0] = torch.nan


# -------------------------------------------------------------------------------------------- changed from outside

CORRUPTED = ("weight-corrupted", "weight-jump", *HURT)


@fault(WIRING, "state", "abrupt", *CORRUPTED, at=ONSET, silent=True)
def weights_tenfold(run: Run) -> None:
    """All weights of the last layer are multiplied by ten between two steps."""
    with torch.no_grad():
        for param in head(run).parameters():
            param.mul_(10)


@fault(WIRING, "state", "abrupt", *CORRUPTED, at=ONSET, silent=True)
def layer_overwritten(run: Run) -> None:
    """A layer is overwritten with noise under `no_grad`."""
    with torch.no_grad():
        weight(run).copy_(torch.randn_like(weight(run)))


@fault(WIRING, "state", "abrupt", *CORRUPTED, at=ONSET, silent=True)
def layer_overwritten_through_data(run: Run) -> None:
    """A layer is replaced by noise through `.data`, behind autograd's back."""
    weight(run).data = torch.randn_like(weight(run))


@fault(WIRING, "state", "abrupt", *CORRUPTED, at=ONSET, silent=True)
def weights_reset(run: Run) -> None:
    """All weights go back to a new beginning: an initialiser is called again."""
    torch.manual_seed(run.seed + 1000)
    for module in run.model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding | nn.GRU):
            module.reset_parameters()


@fault(WIRING, "numerics", "abrupt", *CORRUPTED, *LOST, at=ONSET, silent=True)
def bit_flip(run: Run) -> None:
    """The highest bit of one weight's exponent flips."""
    bits = weight(run).data.view(torch.int32).view(-1)
    bits[11] ^= 1 << 30


@fault(WIRING, "state", "abrupt", "optimizer-state-lost", "update-ratio", "weight-jump", *HURT, at=ONSET, silent=True)
def optimizer_state_cleared(run: Run) -> None:
    """The optimizer's memory is cleared midway."""
    run.optimizer.state.clear()


@fault(WIRING, "state", "abrupt", "optimizer-state-lost", "update-ratio", "weight-jump", *HURT, at=ONSET, silent=True)
def moments_zeroed(run: Run) -> None:
    """All that the optimizer remembers is set to zero; its step count is not."""
    for moment in moments(run):
        moment.zero_()


@fault(WIRING, "state", "abrupt", "weight-jump", "update-ratio", "optimizer-state-lost", *HURT, at=ONSET)
def moments_scaled(run: Run) -> None:
    """What the optimizer divides by is a millionth of what it was (its momentum: a thousandfold)."""
    for moment in squares(run):
        moment.mul_(1e3 if "momentum_buffer" in next(iter(run.optimizer.state.values())) else 1e-6)


@fault(WIRING, "wiring", "wiring", "eval-mode", families=("cnn", "segment"))
def batch_norm_left_asleep(run: Run) -> None:
    """Every BatchNorm is in evaluation mode from the start, inside a model that is in training mode."""
    for module in run.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
