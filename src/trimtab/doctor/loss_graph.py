"""What the graph of a loss tells before it is freed: which loss it is, what it was given, and what lies before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.autograd.graph import Node

from trimtab.sample.transfer import number
from trimtab.torchutil.autograd_graph import JOINING, LOSS_NODES, GraphWalk, first_inputs, loss_kind

MAX_NODES = 20_000
MAX_LOOKS_NEAR_THE_END = 64
KINDS = tuple(dict.fromkeys(kind for kind in LOSS_NODES.values() if kind != "ctc"))
VIEWS = ("View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Transpose", "Permute", "T", "Alias", "Slice",
         "ToCopy", "Clone", "Expand", "Select", "Index")  # fmt: skip
PICKING = ("Gather", "Index", "TakeAlongDim")
BOUNDED = {"Relu": (0.0, None), "Sigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Softmax": (0.0, 1.0)}

FAR_FROM_CHANCE = 8.0
"""A first loss of this many times that of guessing is worth a warning even if it falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The outputs of one nonlinearity in the graph: which share of its units says nothing, over all samples."""

    kind: str
    shape: tuple[int, ...]
    dead_frac: float
    saturated_frac: float
    num_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """The loss function at the end of a graph, as autograd knows it.

    `kind` is nll, bce, bce-logits, mse, l1 or empty; `scores` and `target` are what it was given; `before` is the
    nonlinearity right before it. `picked` are the whole numbers that a hand-written loss picks its scores by (`gather`,
    indexing). `reduction` is mean, sum, none or empty. `custom` names gradients that are hand-made.
    """

    kind: str = ""
    reduction: str = ""
    scores: Tensor | None = None
    target: Tensor | None = None
    targets: tuple[Tensor, ...] = ()
    picked: tuple[Tensor, ...] = ()
    ignore_index: int = -100
    before: str = ""
    before_twice: str = ""
    normalised: bool = True
    weighted: bool = False
    node: Node | None = None
    num_losses: int = 0
    custom: tuple[str, ...] = ()
    activations: tuple[Activation, ...] = ()
    leaves: tuple[Tensor, ...] = ()
    num_nodes: int = 0

    @property
    def num_classes(self) -> int | None:
        """How many classes the scores have."""
        if self.kind != "nll" or self.scores is None:
            return None
        return int(self.scores.shape[1] if self.scores.dim() > 1 else self.scores.shape[0])


def read_graph(loss: Tensor, *, detailed: bool = True) -> LossFacts:
    """Read the graph behind a loss; nothing is computed and nothing is kept alive but what is needed.

    Example:
        >>> scores = torch.zeros(4, 3, requires_grad=True)
        >>> facts = read_graph(torch.nn.functional.cross_entropy(scores, torch.arange(4) % 3))
        >>> facts.kind, facts.num_classes, facts.reduction
        ('nll', 3, 'mean')
    """
    if loss.grad_fn is None:
        return LossFacts()
    ends = list(_ends(loss))
    custom: list[str] = []
    found: list[Activation] = []
    tensors: list[Tensor] = []
    num = 0
    if detailed:
        for node in islice(GraphWalk(loss), MAX_NODES):
            num += 1
            name = node.name()
            if isinstance(getattr(node, "variable", None), Tensor):
                tensors.append(node.variable)
            if not _is_builtin(node):
                custom.append(name)
            if (one := _activation(name, node)) is not None:
                found.append(one)
    kinds = {kind for kind, _ in ends}
    targets = tuple(t.detach() for _, node in ends if (t := _saved(node, "target")) is not None)
    if len(kinds) != 1:
        return LossFacts(
            targets=targets,
            picked=() if ends else tuple(_picked(loss)),
            num_losses=len(ends),
            custom=tuple(dict.fromkeys(custom)),
            activations=tuple(found),
            leaves=tuple(tensors),
            num_nodes=num,
        )
    kind, node = ends[0]
    scores, target = _saved(node, "self"), _saved(node, "target")
    before, inner = _before(node, through_log_softmax=kind == "nll")
    return LossFacts(
        kind=kind,
        reduction={0: "none", 1: "mean", 2: "sum"}.get(getattr(node, "_saved_reduction", -1), ""),
        scores=None if scores is None else scores.detach(),
        target=None if target is None else target.detach(),
        targets=targets,
        ignore_index=_signed(getattr(node, "_saved_ignore_index", -100)),
        before=before,
        before_twice=inner,
        normalised=kind != "nll" or _is_normalised(scores),
        weighted=_saved(node, "weight") is not None or _saved(node, "pos_weight") is not None,
        node=node,
        num_losses=len(ends),
        custom=tuple(dict.fromkeys(custom)),
        activations=tuple(found),
        leaves=tuple(tensors),
        num_nodes=num,
    )


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _is_builtin(node: Node) -> bool:
    made_by = getattr(type(node), "_forward_cls", None)  # only functions written in Python have one
    return made_by is None or str(made_by.__module__).startswith("torch.")


def _ends(loss: Tensor) -> Iterator[tuple[str, Node]]:
    """Known loss functions near the end, through nothing but what joins and scales them."""
    for node in _near_the_end(loss, until=lambda node: loss_kind(node) in KINDS):
        if (kind := loss_kind(node)) in KINDS:
            yield kind, node


def _picked(loss: Tensor) -> Iterator[Tensor]:
    """The whole numbers by which scores are picked near the end: the labels of a loss that is written by hand."""
    for node in _near_the_end(loss, until=_picks):
        if _picks(node):
            by = [t for t in getattr(node, "_saved_indices", None) or () if isinstance(t, Tensor)]
            index = (
                _saved(node, "index") if len(by) < 2 else by[-1]
            )  # scores[rows, labels]; scores[rows] picks no class
            if index is not None and _is_whole(index):
                yield index.detach()


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool


def _picks(node: Node) -> bool:
    return bool(node.name().startswith(PICKING))


def _near_the_end(loss: Tensor, until: Callable[[Node], bool]) -> Iterable[Node]:
    """The nodes behind a loss `until` those that are looked for, through nothing but what joins and scales losses."""
    return GraphWalk(
        loss,
        follow=lambda node: not until(node) and node.name().startswith(JOINING),
        nearest_first=True,
        max_looks=MAX_LOOKS_NEAR_THE_END,
    )


def _saved(node: Node, name: str) -> Tensor | None:
    try:
        value = getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # changed in place since, or freed
        return None
    return value if isinstance(value, Tensor) else None


def _before(node: Node, *, through_log_softmax: bool) -> tuple[str, str]:
    """The nonlinearity that made the scores, and, for a cross-entropy, the one before its log-softmax."""
    first = _source(node)
    if first is None:
        return "", ""
    name = _plain(first)
    if through_log_softmax and name == "LogSoftmax":
        inner = _source(first)
        return name, "" if inner is None else _plain(inner)
    return name, ""


def _source(node: Node) -> Node | None:
    before = islice(first_inputs(node, skip_constants=True), 1, 17)
    return next((one for one in before if not one.name().startswith(VIEWS)), None)


def _plain(node: Node) -> str:
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def _is_normalised(scores: Tensor | None) -> bool:
    """Whether these are logarithms of probabilities that add up to one."""
    if scores is None or not scores.numel():
        return True
    dim = 1 if scores.dim() > 1 else 0
    total = scores.detach().float().exp().sum(dim)
    total = total[torch.isfinite(total)]
    return not total.numel() or number((total - 1.0).abs().median()) < 0.05


def _activation(name: str, node: Node) -> Activation | None:
    kind = next((k for k in ("Relu", "Sigmoid", "Tanh") if name.startswith(f"{k}Backward")), None)
    result = None if kind is None else _saved(node, "result")
    if kind is None or result is None or result.dim() < 2 or result.numel() < 16 or not result.is_floating_point():
        return None
    values = result.detach()
    units = values.transpose(0, 1).flatten(1) if values.dim() == 4 else values.reshape(-1, values.shape[-1]).t()
    if kind == "Relu":
        return Activation(
            kind="relu",
            shape=tuple(values.shape),
            dead_frac=number((units == 0).all(1).float().mean()),
            saturated_frac=0.0,
            num_rows=units.shape[1],
        )
    ends = (values.abs() > 0.999) if kind == "Tanh" else ((values < 0.001) | (values > 0.999))
    return Activation(
        kind=kind.lower(), shape=tuple(values.shape), dead_frac=0.0, saturated_frac=number(ends.float().mean())
    )


def chance_of(facts: LossFacts) -> float | None:
    """The loss of guessing; None where it is not known."""
    if facts.kind == "nll" and facts.num_classes is not None and facts.num_classes > 1:
        return math.log(facts.num_classes)
    return math.log(2.0) if facts.kind in ("bce", "bce-logits") and not facts.weighted else None


def first_loss(facts: LossFacts) -> float | None:
    """The mean loss of the first batch, before any weight or factor."""
    scores, target = facts.scores, facts.target
    if scores is None or target is None or not target.numel():
        return None
    if facts.kind == "nll" and scores.dim() >= 1 and facts.normalised:
        flat = scores.movedim(1, -1).reshape(-1, scores.shape[1]) if scores.dim() > 1 else scores[None]
        labels = target.reshape(-1)
        fit = (labels >= 0) & (labels < flat.shape[1]) & (labels != facts.ignore_index)
        return -number(flat[fit].gather(1, labels[fit][:, None]).double().mean()) if bool(fit.any()) else None
    if facts.kind == "bce-logits" and scores.shape == target.shape:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores.double(), target.double())
        return number(loss)
    return None
