"""The mutations: each changes sound programs in one way, says what names it rightly, and whether it stays silent.

Every second operator of a group is held out: nobody looks at how rules do on it while they are made.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from tests.mutants import sites
from tests.mutants.sites import Finder, Site

Edit = Callable[[Site], str]
"""What stands at a site afterwards, as source text; an empty text removes the statement."""

GROUPS = ("loop", "data", "model", "optimizer", "precision")
NONFINITE = frozenset({
    "nonfinite-loss", "nonfinite-gradient", "nonfinite-weight", "nonfinite-input", "nonfinite-buffer", "nonfinite-ema",
    "nonfinite-optimizer-state",
})  # fmt: skip
BLOWS_UP = frozenset({
    "diverging-loss", "exploding-gradient", "loss-spike", "oscillating-loss", "weight-jump", "update-ratio",
    "loss-unbounded",
})  # fmt: skip
TOO_FAST = BLOWS_UP | NONFINITE | {"learning-rate", "rate-too-high"}
NO_GRADIENT = frozenset({"missing-gradient", "zero-gradient", "no-grad", "unused-part", "weights-unchanged"})
STANDS_STILL = frozenset({"not-learning", "weights-unchanged", "learning-rate", "rate-too-low", "update-ratio"})
NO_SENSE = frozenset({"targets-do-not-predict", "targets-fresh-noise", "not-learning", "collapsed-output"})
SATURATES = frozenset({"saturated-units", "dead-units", "logits-out-of-range", "zero-gradient", "vanishing-gradient"})


@dataclass(frozen=True)
class Operator:
    """One kind of mutation. `every`: at all of its sites, otherwise at one of them. `late`: not from the first step on.

    `also` are edits elsewhere that belong to it.
    """

    name: str
    group: str
    silent: bool
    names: frozenset[str]
    find: Finder
    edit: Edit
    every: bool = False
    late: bool = False
    also: tuple[tuple[Finder, Edit], ...] = ()


# ------------------------------------------------------------------------------------------------------------- edits


def step_with(effect: str) -> Edit:
    def edit(site: Site) -> str:
        call = site.node
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Attribute)
        words = [repr(effect), ast.unparse(call.func.value), *map(ast.unparse, call.args)]
        return f"mutant.step({', '.join(words)})"

    return edit


def _backward(effect: str) -> Edit:
    def edit(site: Site) -> str:
        call = site.node
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Attribute)
        words = [repr(effect), ast.unparse(call.func.value), *map(ast.unparse, call.keywords)]
        return f"mutant.backward({', '.join(words)})"

    return edit


def _called(seam: str, effect: str) -> Edit:
    """The function that was called, and its arguments, are handed on."""

    def edit(site: Site) -> str:
        call = site.node
        assert isinstance(call, ast.Call)
        arguments = [*map(ast.unparse, call.args), *map(ast.unparse, call.keywords)]
        if seam == "made" and not call.args:  # all by name: the parameters first
            arguments = [ast.unparse(k.value) if k.arg == "params" else ast.unparse(k) for k in call.keywords]
        return f"mutant.{seam}({', '.join([repr(effect), ast.unparse(call.func), *arguments])})"

    return edit


def _value(seam: str, effect: str) -> Edit:
    return lambda site: f"mutant.{seam}({effect!r}, {site.text})"


def _part(effect: str) -> Edit:
    return lambda site: f"mutant.part({effect!r}, lambda: {site.text})"


def _batch(effect: str) -> Edit:
    def edit(site: Site) -> str:
        iterated = any(isinstance(one, ast.For) and site.node in ast.walk(one.iter) for one in site.around)
        return f"mutant.{'each' if iterated else 'drawn'}({effect!r}, {site.text})"

    return edit


def _gone(site: Site) -> str:
    return ""


def _left(site: Site) -> str:
    assert isinstance(site.node, ast.BinOp)
    return ast.unparse(site.node.left)


def _linear(site: Site) -> str:
    """Without the activation or norm: the identity, or what it was called with."""
    call = site.node
    assert isinstance(call, ast.Call)
    if sites.name_of(call.func)[0].isupper():
        return "mutant.nn.Identity()"
    if call.args:
        return ast.unparse(call.args[0])
    assert isinstance(call.func, ast.Attribute)
    return ast.unparse(call.func.value)


def _dropped(site: Site) -> str:
    call = site.node
    assert isinstance(call, ast.Call)
    if sites.name_of(call.func) == "Dropout":
        return f"{ast.unparse(call.func)}(0.99)"
    others = [ast.unparse(k) for k in call.keywords if k.arg != "p"]
    return f"{ast.unparse(call.func)}({', '.join([ast.unparse(call.args[0]), 'p=0.99', *others])})"


def _clipped(site: Site) -> str:
    call = site.node
    assert isinstance(call, ast.Call)
    return f"{ast.unparse(call.func)}({ast.unparse(call.args[0])}, 1e-6 * ({ast.unparse(call.args[1])}))"


def _ten_times(site: Site) -> str:
    return f"for _ in range(10):\n    {site.text}"


def _evaluating(site: Site) -> str:
    return site.text.replace(".train()", ".eval()")


def _subtracted(site: Site) -> str:
    assert isinstance(site.node, ast.BinOp)
    return f"{ast.unparse(site.node.left)} - {ast.unparse(site.node.right)}"


def _one_of_several(tree: ast.Module) -> list[Site]:
    """The steps of optimizers in a program that has more than one."""
    found = sites.optimizer_steps(tree)
    return found if len({site.text for site in found}) > 1 else []


def _rectified(tree: ast.Module) -> list[Site]:
    text = ast.unparse(tree)
    return sites.optimizers(tree) if "nn.ReLU" in text or "F.relu" in text else []


# ------------------------------------------------------------------------------------------------------- the catalogue

OPERATORS: tuple[Operator, ...] = (
    # loop
    Operator(
        "no-zero-grad",
        "loop",
        True,
        frozenset({"stale-gradient", "exploding-gradient"}),
        sites.zero_grads,
        _gone,
        every=True,
    ),
    Operator(
        "zero-grad-before-step",
        "loop",
        True,
        NO_GRADIENT | {"not-learning", "optimizer-never-stepped"},
        sites.optimizer_steps,
        step_with("zero_first"),
        every=True,
    ),
    Operator(
        "step-seldom",
        "loop",
        True,
        STANDS_STILL | {"updates-skipped", "stale-optimizer"},
        sites.optimizer_steps,
        step_with("seldom"),
        every=True,
    ),
    Operator(
        "step-twice", "loop", True, frozenset({"double-step"}), sites.optimizer_steps, step_with("twice"), every=True
    ),
    Operator(
        "backward-twice",
        "loop",
        True,
        frozenset({"stale-gradient", "accumulation-not-divided", "double-backward"}),
        sites.backwards,
        _backward("backward_twice"),
    ),
    Operator(
        "half-the-parameters",
        "loop",
        True,
        frozenset({"optimizer-misses-parameters", "parameters-not-held", "unused-part"}),
        sites.optimizers,
        _called("made", "half_of_the_parameters"),
    ),
    Operator(
        "copies-of-parameters",
        "loop",
        True,
        NO_GRADIENT | {"optimizer-misses-parameters", "parameters-not-held", "not-learning", "optimizer-never-stepped"},
        sites.optimizers,
        _called("made", "copies_of_the_parameters"),
    ),
    Operator(
        "one-optimizer-never-steps",
        "loop",
        True,
        frozenset(
            {
                "stale-optimizer",
                "optimizer-never-stepped",
                "weights-unchanged",
                "unused-part",
                "updates-skipped",
                "stale-gradient",
            }
        ),
        _one_of_several,
        step_with("never"),
    ),
    Operator(
        "accumulation-not-divided",
        "loop",
        True,
        frozenset({"accumulation-not-divided", "exploding-gradient"}),
        sites.divisions,
        _left,
        every=True,
    ),
    Operator(
        "scheduler-too-often",
        "loop",
        True,
        STANDS_STILL | {"stale-optimizer"},
        sites.scheduler_steps,
        _ten_times,
        every=True,
    ),
    Operator(
        "term-detached",
        "loop",
        True,
        NO_GRADIENT | {"optimizer-misses-parameters"},
        sites.loss_terms,
        _value("term", "term_detached"),
    ),
    Operator(
        "part-detached",
        "loop",
        True,
        NO_GRADIENT | {"optimizer-misses-parameters"},
        sites.parts,
        _part("part_detached"),
    ),
    Operator(
        "part-without-grad",
        "loop",
        True,
        NO_GRADIENT | {"optimizer-misses-parameters"},
        sites.parts,
        _part("part_without_grad"),
    ),
    Operator(
        "part-freezes",
        "loop",
        True,
        NO_GRADIENT | {"stale-gradient"},
        sites.optimizer_steps,
        step_with("part_freezes"),
        every=True,
        late=True,
    ),
    Operator("eval-mode", "loop", True, frozenset({"eval-mode"}), sites.train_modes, _evaluating, every=True),
    Operator(
        "average-not-updated",
        "loop",
        True,
        frozenset({"ema-not-moving", "target-not-moving"}),
        sites.averages,
        _gone,
        every=True,
    ),
    Operator(
        "clipped-to-nothing",
        "loop",
        True,
        STANDS_STILL | {"chronic-clipping", "vanishing-gradient"},
        sites.clips,
        _clipped,
        every=True,
    ),
    Operator(
        "step-without-effect-later",
        "loop",
        True,
        STANDS_STILL | {"updates-skipped", "stale-optimizer", "optimizer-never-stepped", "stale-gradient"},
        sites.optimizer_steps,
        step_with("never"),
        every=True,
        late=True,
    ),
    # data
    Operator("targets-shuffled", "data", True, NO_SENSE, sites.losses, _called("loss", "targets_shuffled")),
    Operator(
        "targets-shuffled-later",
        "data",
        True,
        NO_SENSE | BLOWS_UP,
        sites.losses,
        _called("loss", "targets_shuffled"),
        late=True,
    ),
    Operator("targets-shifted", "data", True, NO_SENSE, sites.losses, _called("loss", "targets_shifted")),
    Operator(
        "targets-constant",
        "data",
        True,
        frozenset(
            {
                "constant-batch",
                "collapsed-output",
                "targets-constant",
                "zero-gradient",
                "vanishing-gradient",
                "targets-do-not-predict",
                "representation-collapsed",
            }
        ),
        sites.losses,
        _called("loss", "targets_constant"),
    ),
    Operator("nan-rows", "data", False, NONFINITE, sites.batches, _batch("nan_rows"), every=True, late=True),
    Operator(
        "huge-rows",
        "data",
        False,
        BLOWS_UP | NONFINITE | {"outlier-batch"},
        sites.batches,
        _batch("huge_rows"),
        every=True,
        late=True,
    ),
    Operator(
        "inputs-zeroed",
        "data",
        True,
        NO_SENSE | NO_GRADIENT | {"constant-batch", "dead-units"},
        sites.batches,
        _batch("inputs_zeroed"),
        every=True,
    ),
    Operator(
        "inputs-unscaled",
        "data",
        False,
        BLOWS_UP | NONFINITE | SATURATES | {"outlier-batch", "inputs-out-of-range"},
        sites.batches,
        _batch("inputs_unscaled"),
        every=True,
    ),
    Operator(
        "rows-repeated",
        "data",
        True,
        frozenset(
            {"rows-repeated", "constant-batch", "repeated-batch", "collapsed-output", "representation-collapsed"}
        ),
        sites.draws,
        _batch("rows_repeated"),
        every=True,
    ),
    Operator(
        "same-batch",
        "data",
        True,
        frozenset({"repeated-batch", "data-replayed", "overfitting", "constant-batch"}),
        sites.draws,
        _batch("same_batch"),
        every=True,
    ),
    Operator(
        "inputs-drowned",
        "data",
        True,
        NO_SENSE | BLOWS_UP | {"outlier-batch", "inputs-out-of-range"},
        sites.batches,
        _batch("inputs_drowned"),
        every=True,
    ),
    Operator("inputs-mixed-up", "data", True, NO_SENSE, sites.batches, _batch("inputs_mixed_up"), every=True),
    Operator(
        "few-batches",
        "data",
        True,
        frozenset({"repeated-batch", "data-replayed", "overfitting"}),
        sites.draws,
        _batch("few_batches"),
        every=True,
    ),
    Operator(
        "inputs-wrongly-normalised",
        "data",
        True,
        BLOWS_UP | SATURATES | NO_SENSE | {"outlier-batch", "inputs-out-of-range"},
        sites.batches,
        _batch("inputs_shifted"),
        every=True,
    ),
    # model
    Operator(
        "start-too-large",
        "model",
        False,
        BLOWS_UP | SATURATES | NONFINITE | {"not-learning", "initial-weights"},
        sites.optimizers,
        _called("made", "start_too_large"),
    ),
    Operator(
        "start-too-small",
        "model",
        True,
        frozenset(
            {
                "vanishing-gradient",
                "not-learning",
                "dead-units",
                "zero-gradient",
                "collapsed-output",
                "update-ratio",
                "initial-weights",
            }
        ),
        sites.optimizers,
        _called("made", "start_too_small"),
    ),
    Operator(
        "start-dead",
        "model",
        True,
        SATURATES | {"collapsed-output", "missing-gradient", "not-learning"},
        _rectified,
        _called("made", "start_dead"),
        every=True,
    ),
    Operator(
        "softmax-twice",
        "model",
        True,
        SATURATES | {"not-learning", "collapsed-output"},
        sites.class_losses,
        _called("loss", "softmax_twice"),
        every=True,
    ),
    Operator(
        "logits-x100",
        "model",
        False,
        SATURATES | BLOWS_UP | {"temperature-runaway"},
        sites.class_losses,
        _called("loss", "logits_x100"),
        every=True,
    ),
    Operator(
        "sigmoid-twice",
        "model",
        True,
        SATURATES | NO_SENSE | {"softmax-twice", "wrong-output-activation"},
        sites.losses,
        _called("loss", "sigmoid_twice"),
    ),
    Operator(
        "activations-missing", "model", True, NO_SENSE | {"activation-missing"}, sites.activations, _linear, every=True
    ),
    Operator("norms-missing", "model", True, BLOWS_UP | SATURATES | NO_SENSE, sites.norms, _linear, every=True),
    Operator(
        "dropout-0.99",
        "model",
        True,
        NO_SENSE | SATURATES | NO_GRADIENT | {"dropout-too-high"},
        sites.dropouts,
        _dropped,
        every=True,
    ),
    Operator("residual-subtracted", "model", True, NO_SENSE | BLOWS_UP, sites.residuals, _subtracted, every=True),
    Operator(
        "collapsing-regulariser",
        "model",
        True,
        frozenset({"collapsed-output", "representation-collapsed", "not-learning", "vanishing-gradient"}),
        sites.losses,
        _called("loss", "collapsing"),
        every=True,
    ),
    Operator(
        "unbounded-regulariser",
        "model",
        False,
        BLOWS_UP | NONFINITE,
        sites.losses,
        _called("loss", "unbounded"),
        every=True,
    ),
    Operator("log-of-zero", "model", False, NONFINITE, sites.losses, _called("loss", "log_of_zero"), late=True),
    Operator(
        "term-x1000",
        "model",
        True,
        BLOWS_UP
        | {"collapsed-output", "representation-collapsed", "not-learning", "chronic-clipping", "modality-collapse"},
        sites.loss_terms,
        _value("term", "term_x1000"),
    ),
    Operator(
        "part-zeroed",
        "model",
        True,
        NO_GRADIENT | NO_SENSE | {"dead-units", "representation-collapsed"},
        sites.parts,
        _part("part_zeroed"),
    ),
    # optimizer
    Operator(
        "rate-x30",
        "optimizer",
        False,
        TOO_FAST | SATURATES | {"collapsed-output", "not-learning"},
        sites.optimizers,
        _called("made", "rate_x30"),
    ),
    Operator(
        "rate-x1000",
        "optimizer",
        False,
        TOO_FAST | SATURATES | {"collapsed-output", "not-learning"},
        sites.optimizers,
        _called("made", "rate_x1000"),
    ),
    Operator("rate-too-low", "optimizer", True, STANDS_STILL, sites.optimizers, _called("made", "rate_too_low")),
    Operator(
        "rate-grows",
        "optimizer",
        False,
        TOO_FAST | SATURATES | {"collapsed-output", "not-learning"},
        sites.optimizer_steps,
        step_with("rate_grows"),
        every=True,
        late=True,
    ),
    Operator(
        "decay-too-high",
        "optimizer",
        True,
        NO_SENSE | SATURATES | {"decay-too-high", "weights-vanish"},
        sites.optimizers,
        _called("made", "decay_too_high"),
    ),
    Operator(
        "momentum-too-high",
        "optimizer",
        True,
        TOO_FAST | {"not-learning", "optimizer-settings"},
        sites.optimizers,
        _called("made", "momentum_too_high"),
    ),
    Operator(
        "eps-too-high",
        "optimizer",
        True,
        STANDS_STILL | {"vanishing-gradient", "gradient-underflow", "optimizer-settings"},
        sites.optimizers,
        _called("made", "eps_too_high"),
    ),
    Operator(
        "ascends",
        "optimizer",
        False,
        BLOWS_UP | NONFINITE | {"not-learning"},
        sites.optimizers,
        _called("made", "ascends"),
    ),
    Operator(
        "moments-lost",
        "optimizer",
        True,
        frozenset({"optimizer-state-lost"}),
        sites.optimizer_steps,
        step_with("moments_lost"),
        every=True,
        late=True,
    ),
    Operator(
        "moments-shrunk",
        "optimizer",
        False,
        TOO_FAST | {"optimizer-state-lost", "dead-units"},
        sites.optimizer_steps,
        step_with("moments_shrunk"),
        every=True,
        late=True,
    ),
    Operator(
        "weights-disturbed",
        "optimizer",
        True,
        frozenset({"weight-corrupted", "weight-jump", "loss-spike"}),
        sites.optimizer_steps,
        step_with("weights_disturbed"),
        every=True,
        late=True,
    ),
    Operator(
        "weights-reloaded",
        "optimizer",
        True,
        frozenset({"weight-corrupted", "weight-jump", "loss-spike"}),
        sites.optimizer_steps,
        step_with("weights_reloaded"),
        every=True,
        late=True,
    ),
    Operator(
        "gradients-reversed",
        "optimizer",
        False,
        BLOWS_UP | NONFINITE | {"not-learning", "gradient-reversed"},
        sites.optimizer_steps,
        step_with("gradients_reversed"),
        late=True,
    ),
    # precision
    Operator(
        "half-overflow", "precision", False, NONFINITE, sites.losses, _called("loss", "half_overflow"), every=True
    ),
    Operator(
        "weights-rounded",
        "precision",
        True,
        STANDS_STILL | {"weight-corrupted", "precision-lost", "updates-lost"},
        sites.optimizer_steps,
        step_with("weights_rounded"),
        every=True,
    ),
    Operator(
        "gradients-flushed",
        "precision",
        True,
        frozenset(
            {"gradient-underflow", "zero-gradient", "vanishing-gradient", "missing-gradient", "weights-unchanged"}
        ),
        sites.optimizer_steps,
        step_with("gradients_flushed"),
        every=True,
    ),
    Operator(
        "loss-underflows",
        "precision",
        True,
        STANDS_STILL | {"gradient-underflow", "vanishing-gradient", "zero-gradient"},
        sites.backwards,
        _backward("backward_tiny"),
        every=True,
    ),
    Operator(
        "every-step-skipped",
        "precision",
        True,
        frozenset(
            {
                "scale-collapse",
                "updates-skipped",
                "weights-unchanged",
                "nonfinite-gradient",
                "not-learning",
                "exploding-gradient",
            }
        ),
        sites.optimizer_steps,
        step_with("scaled_step"),
        every=True,
        also=((sites.backwards, _backward("backward_scaled")),),
    ),
    Operator(
        "inputs-rounded",
        "precision",
        True,
        NO_SENSE | {"constant-batch", "precision-lost"},
        sites.batches,
        _batch("inputs_rounded"),
        every=True,
    ),
)

BY_NAME = {operator.name: operator for operator in OPERATORS}
HELD_OUT = frozenset(one.name for group in GROUPS for one in [o for o in OPERATORS if o.group == group][1::2])
