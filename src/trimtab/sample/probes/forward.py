"""What the calls of the root module show: how many, in which mode, on what. The one hook of the always-on path.

Nothing that is copied or pickled takes a hook of ours along (`trimtab.torchutil.patch`). Should one come into a pickle
by another way, it turns into an inert stand-in: a model that cannot be saved would be worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from trimtab.core.contain import Contained
from trimtab.core.errors import TrimtabError
from trimtab.sample.probes.batch import BatchProbe
from trimtab.sample.probes.linear_chain import linear_chain
from trimtab.sample.probes.output import OutputProbe
from trimtab.sample.probes.unstepped import WAIT_LATER, UnsteppedPasses
from trimtab.sample.rows import roots_of
from trimtab.sample.transfer import number
from trimtab.torchutil.autograd_graph import JOINING, LOSS_NODES, GraphWalk, first_inputs, loss_kind
from trimtab.torchutil.module_tree import ModuleTree
from trimtab.torchutil.patch import own_hook, plain_python

NUM_NAMED = 8
MAX_LISTENED = 8
"""Modules side by side whose answers are listened to."""
DROPS_MOST = 0.8
KIND_EVERY, BOUNDED_EVERY = 50, 5
"""Told losses between two looks at the loss function."""
_TYPES = {torch.float16: 1.0, torch.bfloat16: 2.0}
Called = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]
"""Hears of every call of a root module that records gradients, before it."""
_tracing_state, _transformations = torch._C._get_tracing_state, torch._C._functorch.peek_interpreter_stack
_grad_enabled, _autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled


def only_traced() -> bool:
    """Whether this call computes nothing: it is compiled, traced, or under a transformation of `torch.func`."""
    return torch.compiler.is_compiling() or _tracing_state() is not None or _transformations() is not None


def inert() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What is left of a hook in a copied or saved model: a call that does nothing, and loads without us."""
    return getattr, (nullcontext(), "__exit__")


class ForwardTap:
    """Counts the root's forwards between two steps and looks at what goes in and comes out."""

    def __init__(
        self,
        model: nn.Module,
        renew: Callable[[], None],
        contained: Contained,
        unstepped: UnsteppedPasses | None = None,
        called: Called | None = None,
    ) -> None:
        self._unstepped = unstepped
        self._waits: float = inf if unstepped is None else unstepped.wait  # from how many forwards on it is called
        self.batch, self.output = BatchProbe(), OutputProbe(contained)
        self.output.heard = self.batch.heard
        self._contained, self._called = contained, called
        self._exit_handles: list[Any] = []
        self.looks_at_output = False  # the next one, as things stand
        self._roots = roots_of(model)
        self._model, self._renew, self._tree = model, renew, ModuleTree(model)
        self._device = next(model.parameters()).device.type
        self._armed = True
        self._modal: list[nn.Module] = []
        self._droppers: list[nn.Module] = []
        self._names: dict[int, str] = {}  # of those
        self._trained: set[int] = set()  # those that were in training mode at some look
        self._seen = False
        self._num = self._num_eval = self._num_blind = 0
        self._autocast: float | None = None
        self._told = 0
        self._choices = 0
        self._detached = self._bounded = self._fixed = self._answers_itself = False
        self._chain = 0  # linear layers in a row, until it is told
        self._squashed = ""  # by which activation, in front of a loss that takes logits
        self.refresh()

    @property
    def num_forwards(self) -> int:
        """Forwards with gradients since the last step."""
        return self._num

    def refresh(self) -> None:
        """Look again for modules that behave differently in training and in evaluation."""
        self._tree.has_changed()
        named = [(n, m) for n, m in self._tree.named if _is_modal(m)]
        self._modal = [m for _, m in named]
        drops = [(n, m) for n, m in self._tree.named if _share_dropped(m) > 0]
        self._droppers, self._names = [m for _, m in drops], {id(m): n for n, m in (*named, *drops)}

    @plain_python
    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Runs before the root's forward, inside the user's own call: whatever happens, it must not raise there."""
        try:
            if only_traced():
                return
            if not _grad_enabled():
                self._num_blind += module.training
                return
            self._seen = True
            self._num += 1
            if module.training:
                if self._armed:
                    self._armed = False
                    self._renew()
                if self._num >= self._waits:
                    self._count()
            elif self._modal and not any(m.training for m in self._modal):
                self._num_eval += 1
            if _autocast_enabled(self._device):
                self._autocast = _TYPES.get(torch.get_autocast_dtype(self._device), 0.0)
            else:
                self._autocast = 0.0
            self.batch.inputs(args, kwargs)
            if self._called is not None:
                self._called(module, args, kwargs)
        except TrimtabError:  # a run that is stopped on purpose
            raise
        except Exception as error:
            self.failed(error)

    def modes(self) -> tuple[dict[str, float], dict[str, tuple[str, ...]]]:
        """Layers in evaluation mode inside a model that trains, where nobody can have meant it.

        That is a dropout that was on before, with all that is off beside it; and a BatchNorm that is trained, but has
        never seen a batch: its statistics are those it was built with. One that is frozen on purpose is neither.
        """
        asleep = [m for m in self._modal if not m.training]
        self._trained.update(id(m) for m in self._modal if m.training)
        if not asleep or not self._model.training:
            return self._drops()
        was_on = [m for m in asleep if id(m) in self._trained]
        found = was_on if any(isinstance(m, _DropoutNd) for m in was_on) else []
        found = found or [m for m in asleep if isinstance(m, _BatchNorm) and _has_seen_nothing(m)]
        names = tuple(self._names.get(id(m), "unnamed") for m in found)
        return ({"eval_parts": float(len(found))}, {"eval_parts": names[:NUM_NAMED]}) if found else ({}, {})

    def _drops(self) -> tuple[dict[str, float], dict[str, tuple[str, ...]]]:
        """Layers that drop nearly all of what they put out."""
        shares = {self._names.get(id(m), "unnamed"): _share_dropped(m) for m in self._droppers if m.training}
        high = {name: share for name, share in shares.items() if share >= DROPS_MOST}
        return ({"dropout": max(high.values())}, {"dropout": tuple(high)[:NUM_NAMED]}) if high else ({}, {})

    def left(self, output: object) -> None:
        """Runs after it."""
        if not only_traced() and _grad_enabled():
            self.output.look(output)

    def failed(self, error: Exception) -> None:
        """Something went wrong in one of the two halves."""
        self._contained.report("looking at a call of the model", error)

    def told(self, batch: object) -> None:
        """The loop told a batch."""
        self._contained.call("looking at a batch", self.batch.told, batch)

    def loss(self, loss: Tensor) -> None:
        """The loop told a loss: which function it came from, now and then, and whether anything leads back from it."""
        if self.output.wants_loss:
            self.output.told(loss)
        if loss.is_leaf:  # asked so, no Python object is made of its graph
            self._detached = True
        elif self._told % KIND_EVERY < 2:
            self.batch.loss_kind = kind_of(loss)
            self.output.loss_kind = self.batch.loss_kind or ("bce" if is_logistic(loss) else "")
            self._choices = choices_of(loss) if self.batch.loss_kind == "nll" else 0
            self._bounded = self.batch.loss_kind in ("nll", "bce") and is_bounded(loss)
            self._fixed = is_fixed(loss)
            self._squashed = squashed_by(loss)
            if self._told == 1:  # of the second one: some programs begin with a loss of their own
                self._chain = linear_chain(loss)
        self._told += 1

    @property
    def num_choices(self) -> int:
        """How many answers a cross-entropy chooses from: by its graph, else by the output; 0 where neither says."""
        return self._choices or self.output.num_answers

    def look_at_output(self, *, listen: bool, spread: bool) -> None:
        """Say what the next output is wanted for. A hook costs even when it does nothing: it is there when needed.

        Of several modules side by side all are listened to: the gradient shows which of them answers. Their spread is
        not looked at, because what a module inside gives may well be constant.
        """
        spread = spread and self._roots == [self._model]
        if listen or spread:
            self.output.listen, self.output.wanted = listen, spread
            if not self._exit_handles:
                self.looks_at_output = True
                exits = (root.register_forward_hook(_Exit(self)) for root in self._roots[:MAX_LISTENED])
                self._exit_handles = [own_hook(one, listed=False) for one in exits]
        elif self._exit_handles:
            self.output.listen = self.output.wanted = False
            self.remove()

    def remove(self) -> None:
        """Take the hooks behind the forwards off."""
        for handle in self._exit_handles:
            handle.remove()
        self._exit_handles = []
        self.looks_at_output = False

    def step_done(self) -> None:
        """The next training forward is the first of a new step."""
        self._armed = True
        if self._unstepped is not None and (self._unstepped.counts or self._waits < WAIT_LATER):
            self._unstepped.step_done()
            self._waits = self._unstepped.wait

    def _count(self) -> None:
        """No step for long: gradients may be thrown away."""
        if self._unstepped is not None:
            self._unstepped.forward(self._num)
            if self._unstepped.over:
                self._unstepped, self._waits = None, inf

    def take(self) -> dict[str, float | Tensor]:
        """What was seen since the last step that asked; each forward is told once."""
        # With the first loss told, and as often as other facts come: in the steps between, nothing but values is new.
        due = self._told % BOUNDED_EVERY == 1
        if self._num and not (due or self._num_blind or self._num_eval or self._detached or self._autocast):
            self._num = 0
            return {"autocast": 0.0}  # the usual case
        out: dict[str, float | Tensor] = {}
        if self._num_blind and not self._num:
            out["no_grad_forward"] = 1.0
        if not self._seen and not self._model.training and self._modal and not any(m.training for m in self._modal):
            self._num_eval += 1  # the root is never called itself: its parts are, and all of them are in eval mode
        if self._num_eval:
            out["eval_forward"] = 1.0
        if self._autocast is not None and self._num:
            out["autocast"] = self._autocast
        if self._bounded and due:
            out["bounded"] = 1.0
        if self._chain and due:
            out["linear_chain"], self._chain = float(self._chain), 0
        if self._squashed and due:
            out["normalised_twice" if self._squashed in ("softmax", "sigmoid") else f"logits_{self._squashed}"] = 1.0
        # A model that is also asked without gradients, in training, may set its own targets or collect its own data.
        self._answers_itself |= self._num > 0 and self._num_blind > 0
        if self._fixed and due and (self._bounded or not self._answers_itself):
            out["fixed"] = 1.0
        if self._detached:
            out["loss_detached"] = 1.0
        self._num = self._num_eval = self._num_blind = 0
        self._detached = False
        return out

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return inert()


class _Exit:
    """The half that runs after the root's forward."""

    def __init__(self, tap: ForwardTap) -> None:
        self._tap = tap

    @plain_python
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        try:
            self._tap.left(output)
        except Exception as error:
            self._tap.failed(error)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return inert()


def _is_modal(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm) and module.track_running_stats


def _share_dropped(module: nn.Module) -> float:
    given: object = 0.0
    if isinstance(module, _DropoutNd):
        given = module.p
    elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        given = module.dropout
    return float(given) if isinstance(given, int | float) else 0.0


def _has_seen_nothing(norm: _BatchNorm) -> bool:
    trained = norm.weight is None or norm.weight.requires_grad
    return trained and norm.num_batches_tracked is not None and number(norm.num_batches_tracked) == 0


NUM_NODES = 16
_KINDS = {"nll": "nll", "bce": "bce", "bce-logits": "bce", "mse": "mse"}
_LOGISTIC = ("Softplus", "LogSigmoid")
_SUPERVISED = tuple(prefix for prefix in LOSS_NODES if prefix != "L1Loss")
_RESHAPING = (
    "View", "Squeeze", "Unsqueeze", "Reshape", "Alias", "ToCopy", "UnsafeView", "Transpose", "TBackward", "Permute",
)  # fmt: skip
_CHOOSING = ("Gather", "Index", "Select", "Take", "Max", "Min", "Minimum", "Maximum")
_HEADS = ("LogSoftmax", "BinaryCrossEntropyWithLogits", "Softmax", "Sigmoid")
_SQUASHING = {"Softmax": "softmax", "Sigmoid": "sigmoid", "Relu": "relu", "Tanh": "tanh"}
_TO_LOGITS = (*JOINING, *_CHOOSING, *_RESHAPING, *LOSS_NODES, "KlDiv", "Log", "Clamp")


def _ends(loss: Tensor, *, through: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The known loss functions near the end of a graph, nearest first; `through` names what may lie in between."""

    def follow(node: Any) -> bool:
        return loss_kind(node) not in _KINDS and (not through or node.name().startswith(through))

    for node in GraphWalk(loss, follow=follow, nearest_first=True, max_looks=NUM_NODES, revisit=True):
        if (kind := _KINDS.get(loss_kind(node))) is not None:
            yield kind, node


def kind_of(loss: Tensor) -> str:
    """`nll`, `bce` or `mse` where exactly one of them is at the end of the graph; empty where it is not known."""
    found = {kind for kind, _ in _ends(loss, through=JOINING)}
    return found.pop() if len(found) == 1 else ""


def is_logistic(loss: Tensor) -> bool:
    """Whether a softplus or the logarithm of a sigmoid is at the end of the graph: a binary cross-entropy by hand.

    Both are activations as well: what such a loss is of is believed only where the gradient of the answers fits.
    """
    walk = GraphWalk(loss, follow=lambda node: node.name().startswith(JOINING), nearest_first=True, max_looks=NUM_NODES)
    return any(node.name().startswith(_LOGISTIC) for node in walk)


def choices_of(loss: Tensor) -> int:
    """How many answers the one softmax in front of a cross-entropy is over; 0 where there is none, or another one."""
    found: set[int] = set()
    for kind, node in _ends(loss, through=JOINING):
        softmax: Any = next(islice(first_inputs(node), 1, 2), None) if kind == "nll" else None
        shapes: Any = getattr(softmax, "_input_metadata", ())
        dim: Any = getattr(softmax, "_saved_dim", None)
        if not shapes or not isinstance(dim, int):
            return 0
        size = len(shapes[0].shape)
        dim = dim if dim < size else dim - (1 << 64)  # a negative one is told as a huge number
        found.add(int(shapes[0].shape[dim]) if -size <= dim else 0)
    return found.pop() if len(found) == 1 else 0


def is_bounded(loss: Tensor) -> bool:
    """Whether a cross-entropy that cannot be negative was reduced to one number before anything else came to it.

    A policy gradient weighs the single terms, and may be anything.
    """
    for kind, node in _ends(loss):
        if kind in ("nll", "bce"):
            shapes: Any = getattr(node, "_input_metadata", ())
            return len(shapes) > 0 and len(shapes[0].shape) == 0
    return False


def is_fixed(loss: Tensor) -> bool:
    """Whether a loss is known to measure answers against targets that stay what they are, so that it should fall.

    It is where all of it comes from means of well-known loss functions, over whole answers. Values that were chosen
    from an answer (`q.gather(1, actions)`) are compared with returns that grow as the agent gets better; a policy
    gradient or a game between two models ends in no such function at all.
    """
    known = False
    walk = GraphWalk(loss, follow=_joins, nearest_first=True, max_looks=NUM_NODES, revisit=True)
    for node in walk:
        if node.name().startswith(_SUPERVISED):
            shapes: Any = getattr(node, "_input_metadata", ())
            if not shapes or len(shapes[0].shape) > 0 or _is_chosen(node):
                return False
            known = True
        elif not _joins(node):
            return False
    return known and walk.complete


def squashed_by(loss: Tensor) -> str:
    """The activation between the last layer and a loss that takes logits: `softmax`, `sigmoid`, `relu` or `tanh`.

    Empty where there is none. Only what stands right before counts: a temperature or a cap that scales an activation
    is a factor between them. A loss of probabilities is looked at as well: what makes them may be applied twice.
    """

    def follow(node: Any) -> bool:
        return bool(node.name().startswith(_TO_LOGITS)) and not _is_head(node)

    for node in GraphWalk(loss, follow=follow, nearest_first=True, max_looks=4 * NUM_NODES):
        if not _is_head(node):
            continue
        name = node.name()
        for before in islice(first_inputs(node), 1, 1 + NUM_NODES):
            if not before.name().startswith(_RESHAPING):
                found = next((kind for prefix, kind in _SQUASHING.items() if before.name().startswith(prefix)), "")
                if found in ("softmax", "sigmoid") or (found and not name.startswith(("Softmax", "Sigmoid"))):
                    return found
                break
    return ""


def _is_head(node: Any) -> bool:
    """Whether a node takes logits: it normalises, or it is a loss that does."""
    if node.name().startswith("Sub"):  # as `torch.distributions.Categorical` does it
        inputs = node.next_functions
        return len(inputs) == 2 and inputs[1][0] is not None and inputs[1][0].name().startswith("Logsumexp")
    return bool(node.name().startswith(_HEADS))


def _joins(node: Any) -> bool:
    return bool(node.name().startswith(JOINING))


def _is_chosen(node: object) -> bool:
    """Whether what a loss function compares was picked out of an answer."""
    for before in islice(first_inputs(node), 1, 1 + NUM_NODES):
        name = before.name()
        if name.startswith(_CHOOSING):
            return True
        if not name.startswith(_RESHAPING):
            return False
    return False
