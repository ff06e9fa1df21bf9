"""Numerically stable similarities under their documented names, in four versions; also to replace a module's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.compat.nn.layers import ImprovedActivations
from trimtab.losses.backends.dense import line_similarity, tuple_similarity
from trimtab.losses.cost import check_it_fits
from trimtab.losses.problem import check_name, check_xs, normalise

FORMS = ("full", "line")


@dataclass(frozen=True, slots=True)
class StableLossFunctions:
    """Stable operations and N-way similarities, all with a finite gradient at every finite input.

    (Of products of features that are not normalised this holds with `use_log_space`; plain ones can overflow.)

    One rule for `eps`: from `eps` up every operation is exact; below it something straight takes over (a ramp through
    zero, for the logarithm its tangent, for a denominator a constant), so that no gradient is steeper than at `eps`.
    Half precision is computed in float32, with an `eps` whose inverse float16 can hold; the operations return the dtype
    they were given, the similarities float32.

    Differs from the documented original: a zero row has a zero gradient (not 1e16 or NaN); division keeps the sign of
    its denominator; the root and the logarithm of a negative number are not those of its absolute value; the bounds
    bend (`soft_clamp`) instead of cutting the gradient off, and touch nothing in the middle half of their range;
    `use_log_space` acts; `normalize=False` acts; cosine and distance are of all tuples, ``[B] * N``, and the cosine
    keeps its sign; rows of 1e20 are normalised, not turned to zero.

    Args:
        eps: below which operations are replaced by a ramp; never below what the dtype can hold.
        clamp_min: lower bound of quotients, logarithms and products; ``-inf`` for none.
        clamp_max: upper bound of the same.
        use_log_space: keep the magnitudes of rows in the logarithm while `stable_einsum_similarity` multiplies them, so
            that features of 1e30 and 1e-30 together neither overflow nor vanish on the way.

    Example:
        >>> import torch
        >>> from trimtab.losses import StableLossFunctions
        >>> ops = StableLossFunctions(eps=1e-8, clamp_min=-100, clamp_max=100)
        >>> ops.stable_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
        >>> ops.stable_division(torch.tensor(1.0), torch.tensor(-2.0))
        tensor(-0.5000)
        >>> ops.stable_norm_based_similarity(*torch.randn(3, 4, 8)).shape
        torch.Size([4, 4, 4])
    """

    eps: float = 1e-8
    clamp_min: float = -100
    clamp_max: float = 100
    use_log_space: bool = False

    def __post_init__(self) -> None:
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ValueError(f"eps is {self.eps}; expected a small positive number, such as 1e-8")
        if not self.clamp_min < self.clamp_max:
            raise ValueError(f"clamp_min is {self.clamp_min} and clamp_max {self.clamp_max}; the first must be less")

    def stable_norm(self, x: Tensor, dim: int = -1) -> Tensor:
        """`x` with its vectors along `dim` made of length 1; those shorter than `eps` are divided by `eps` instead."""
        return _like(x, _unit(_upcast(x).movedim(dim, -1), self._eps(x)).movedim(-1, dim))

    def stable_division(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        """The quotient within the bounds; a denominator smaller than `eps` counts as `eps`, with its sign."""
        above, below = _upcast(numerator), _upcast(denominator)
        eps = max(self._eps(denominator), math.sqrt(_tiny(denominator)))  # its inverse is squared in the gradient
        least = torch.where(below.detach() < 0, -eps, eps)
        # The reciprocal first: the gradient of above / below would pass through above / below^2.
        quotient = self._bounded(above * torch.where(below.detach().abs() < eps, least, below).reciprocal())
        dtype = torch.result_type(numerator, denominator)
        return quotient.to(dtype) if dtype.is_floating_point else quotient

    def stable_sqrt(self, x: Tensor) -> Tensor:
        """The root of `x`; 0, with no gradient, where `x` is not positive."""
        value = _upcast(x)
        eps = self._eps(x)
        small = value < eps**2
        root = value.masked_fill(small, 1.0).sqrt()
        ramp = (value / eps).masked_fill(value <= 0, 0.0)
        return _like(x, torch.where(small, ramp, root))

    def stable_log(self, x: Tensor) -> Tensor:
        """The logarithm of `x`, within the bounds; below `eps`, zero and negative numbers too, its tangent there."""
        value = _upcast(x)
        eps = self._eps(x)
        small = value < eps
        tangent = value / eps + (math.log(eps) - 1.0)
        return _like(x, self._bounded(torch.where(small, tangent, value.masked_fill(small, 1.0).log())))

    def stable_mean_n_vectors(self, *vectors: Tensor) -> Tensor:
        """The mean of tensors of one shape; divided before they are summed, so that it cannot overflow."""
        if not vectors:
            raise ValueError("there are no vectors to take the mean of; pass at least one tensor")
        mean = torch.zeros_like(_upcast(vectors[0]))
        for vector in vectors:
            mean = mean + _upcast(vector) / len(vectors)
        return _like(vectors[0], mean)

    def stable_cosine_similarity_nd(self, *features: Tensor, normalize: bool = True, form: str = "full") -> Tensor:
        """Signed geometric mean of the cosines between each vector of a tuple and their sum: -1 to 1."""
        rows = self._rows(features, normalize)
        if normalize:  # what is on the ramp has no direction to compare
            rows = [row.masked_fill(row.detach().square().sum(-1, keepdim=True) < 0.5, 0.0) for row in rows]
        return _similarity(rows, "cosmean", form)

    def stable_euclidean_distance_nd(self, *features: Tensor, normalize: bool = True, form: str = "full") -> Tensor:
        """Minus the mean distance of the vectors of a tuple from their mean: 0 where they agree, negative elsewhere."""
        return _similarity(self._rows(features, normalize), "dist", form)

    def stable_norm_based_similarity(self, *features: Tensor, normalize: bool = True, form: str = "full") -> Tensor:
        """Length of the sum of a tuple's vectors: 0 to N. (The sum of their dot products with its direction.)"""
        return _similarity(self._rows(features, normalize), "norm", form)

    def stable_einsum_similarity(self, *features: Tensor, normalize: bool = True, form: str = "full") -> Tensor:
        """Sum over the width of the product of a tuple's vectors, within the bounds."""
        rows = self._rows(features, normalize)
        if not self.use_log_space:
            return self._bounded(_similarity(rows, "mip", form))
        # A product of many factors: each row gives up its magnitude, which is multiplied again at the end, as a sum of
        # logarithms. The result does not depend on what was split off, which may therefore stay out of the graph.
        tops = [row.detach().abs().amax(-1).clamp_min(torch.finfo(row.dtype).tiny) for row in rows]
        even = [row / top.unsqueeze(-1) for row, top in zip(rows, tops, strict=True)]
        logs = [top.log() for top in tops]
        limit = math.log(torch.finfo(rows[0].dtype).max / rows[0].shape[-1])
        half = (_sum_of_logs(logs, form).clamp(max=limit) / 2).exp()  # in two halves: neither overflows first
        return self._bounded(_similarity(even, "mip", form) * half * half)

    def _rows(self, features: Sequence[Tensor], normalize: bool) -> list[Tensor]:
        xs = check_xs(features)
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in xs) else torch.float32
        return [_unit(x.to(dtype), self._eps(x)) if normalize else x.to(dtype) for x in xs]

    def _eps(self, like: Tensor) -> float:
        """That of the settings, or what the dtype needs so that the inverse, a gradient, is a number in it."""
        return max(self.eps, 16 * _tiny(like))

    def _bounded(self, x: Tensor) -> Tensor:
        return soft_clamp(x, self.clamp_min, self.clamp_max)


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype if like.dtype.is_floating_point else torch.float32).tiny


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _unit(rows: Tensor, eps: float) -> Tensor:
    """Rows of length 1; those shorter than `eps` divided by `eps`; zero rows with no gradient."""
    top = rows.detach().abs().amax(-1, keepdim=True)
    even = (rows.detach() / top).masked_fill(top == 0, 0.0)  # its square can neither overflow nor vanish
    short = top * torch.linalg.vector_norm(even, dim=-1, keepdim=True) < eps
    unit = normalise(rows.masked_fill(short, 1.0), "l2")
    return torch.where(short, (rows / eps).masked_fill(top == 0, 0.0), unit)


def _like(x: Tensor, result: Tensor) -> Tensor:
    """The result in the dtype of `x`, unless that is one of integers."""
    return result.to(x.dtype) if x.dtype.is_floating_point else result


def _similarity(rows: Sequence[Tensor], name: str, form: str) -> Tensor:
    check_name("form", form, FORMS)
    dtype, device = rows[0].dtype, rows[0].device.type
    if name != "mip" and device != "mps":  # where vectors nearly agree, or cancel, roots of differences are taken
        rows = [row.double() for row in rows]
    if form == "full":
        check_it_fits(rows, name)
    with torch.autocast(device, enabled=False):
        out = line_similarity(rows[:-1], rows[-1], name) if form == "line" else tuple_similarity(rows, name)
    return out.to(dtype)


def _sum_of_logs(logs: Sequence[Tensor], form: str) -> Tensor:
    """The log-magnitude of every tuple, or of the lines along the last modality."""
    if form == "line":
        return torch.stack(list(logs[:-1])).sum(0).unsqueeze(1) + logs[-1]
    total = logs[0]
    for log in logs[1:]:
        total = total.unsqueeze(-1) + log
    return total


VERSIONS = {0: "einsum", 1: "norm", 2: "cosine", 3: "distance"}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(ImprovedActivations, name) for name in ("gelu", "swish", "mish", "leaky_relu", "elu", "scaled_tanh")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLoss:
    """A similarity of N modalities ``[B, D]``: call it with them. Made by `get_stable_loss_function`."""

    loss_version: int
    normalize: bool
    eps: float
    activation: str | None
    form: str
    rescale: bool

    def __call__(self, *features: Tensor) -> Tensor:
        """The similarities of all tuples, ``[B] * N``, or of the lines ``[B, B]`` of the last modality."""
        xs = check_xs(features)
        ops = StableLossFunctions(eps=self.eps, clamp_min=-torch.inf, clamp_max=torch.inf)
        method = {
            0: ops.stable_einsum_similarity,
            1: ops.stable_norm_based_similarity,
            2: ops.stable_cosine_similarity_nd,
            3: ops.stable_euclidean_distance_nd,
        }[self.loss_version]
        result: Tensor = method(*xs, normalize=self.normalize, form=self.form)
        if self.rescale and self.loss_version == 0:
            result = result * float(xs[0].shape[1]) ** ((len(xs) - 2) / 2)
        return result if self.activation is None else ACTIVATIONS[self.activation](result)


def get_stable_loss_function(
    loss_version: int = 0,
    normalize: bool = True,
    eps: float = 1e-8,
    activation: str | None = None,
    *,
    form: str = "full",
    rescale: bool = False,
) -> StableLoss:
    """A similarity function ``fn(*features)`` of N modalities ``[B, D]``, by its documented number.

    ==========  ======================================================================  ==================
    version     value of a tuple of (unit) vectors ``u_m`` with sum ``s``               range if normalised
    ==========  ======================================================================  ==================
    0 einsum    ``sum_d prod_m u_m[d]``                                                 -1 to 1
    1 norm      ``|s|``                                                                 0 to N
    2 cosine    signed geometric mean of ``cos(u_m, s)``                                -1 to 1
    3 distance  ``-1/N sum_m |u_m - s/N|``                                              -1 to 0
    ==========  ======================================================================  ==================

    These are logits without a scale. For training prefer `nway_loss` (``similarity`` mip, norm, cosmean or dist):
    its default objective needs N times B x B of these numbers, not ``B^N``.

    Args:
        loss_version: 0 to 3.
        normalize: make the rows of length 1 first; without it, versions 0, 1 and 3 grow with the features.
        eps: length below which a row counts as having no direction, and fades to zero.
        activation: name of a function of `trimtab.compat.nn.ImprovedActivations` applied to the result.
        form: `full` gives ``[B] * N``; `line` gives ``[B, B]``, entry ``(i, j)`` of the tuple that takes sample ``j``
            of the last modality and ``i`` of all others: the lines that `nway_loss(objective="axis")` compares.
        rescale: multiply version 0 by ``D^(N/2 - 1)``. Products of unit vectors vanish with N and D (5e-5 for six equal
            vectors of width 512), and a softmax over them learns nothing; so rescaled they are of order 1.

    Differs from the documented original: versions 2 and 3 have the shape of the others, version 2 has a sign, no
    gradient is NaN or infinite (zero rows, orthogonal or equal vectors, half precision), nothing is cut off by a clamp,
    ``normalize=False`` acts, an unknown activation is an error, and a tensor that would not fit into memory is refused
    (`TooCostly`) before it is allocated.

    Example:
        >>> import torch
        >>> from trimtab.losses import get_stable_loss_function
        >>> calculate_loss = get_stable_loss_function(loss_version=1)
        >>> features = [torch.eye(4)] * 3
        >>> calculate_loss(*features).shape, round(float(calculate_loss(*features)[2, 2, 2]), 4)
        (torch.Size([4, 4, 4]), 3.0)
    """
    if isinstance(loss_version, bool) or loss_version not in VERSIONS:
        known = ", ".join(f"{number} ({name})" for number, name in VERSIONS.items())
        raise ValueError(f"loss_version is {loss_version!r}; expected one of {known}")
    check_name("activation", activation, [*ACTIVATIONS, None])
    check_name("form", form, FORMS)
    StableLossFunctions(eps=eps)  # a wrong eps is reported now, not at the first batch
    return StableLoss(
        loss_version=loss_version, normalize=normalize, eps=eps, activation=activation, form=form, rescale=rescale
    )


NAME, KEPT = "calculate_loss", "calculate_loss_original"


def replace_loss_function_with_stable_version(
    module: object, loss_version: int = 1, normalize: bool = True, eps: float = 1e-8
) -> StableLoss:
    """Make `module.calculate_loss` the stable similarity of that version; returns it.

    What was there stays as `module.calculate_loss_original`, whether it was a method, a function or a submodule (whose
    parameters keep their place and their keys in `state_dict`). A second call chooses another version and keeps the
    first original; `restore_loss_function` puts it back.

    Example:
        >>> import torch
        >>> class Module(torch.nn.Module):
        ...     def calculate_loss(self, *features):
        ...         return torch.einsum("az,bz,cz->abc", *features)
        >>> module = Module()
        >>> _ = replace_loss_function_with_stable_version(module, loss_version=1)
        >>> module.calculate_loss(*torch.randn(3, 2, 8)).shape
        torch.Size([2, 2, 2])
        >>> restore_loss_function(module), restore_loss_function(module)
        (True, False)
    """
    loss = get_stable_loss_function(loss_version=loss_version, normalize=normalize, eps=eps)
    if not _is_replaced(module):
        original: object = getattr(module, NAME, None)
        if not callable(original):
            raise ValueError(
                f"a {type(module).__name__} has no method {NAME}, so nothing would use the stable version; "
                f"set the attribute that your training calls to get_stable_loss_function({loss_version})"
            )
        # Into the instance itself: a submodule that is registered under this name stays registered.
        module.__dict__[KEPT] = original
    module.__dict__[NAME] = loss
    return loss


def restore_loss_function(module: object) -> bool:
    """Undo `replace_loss_function_with_stable_version`; False if nothing was replaced.

    Example:
        >>> restore_loss_function(object())
        False
    """
    if not _is_replaced(module):
        return False
    original = module.__dict__.pop(KEPT)
    del module.__dict__[NAME]
    if getattr(module, NAME, None) != original:  # it was an attribute of the instance, not of its class
        module.__dict__[NAME] = original
    return True


def _is_replaced(module: object) -> bool:
    return KEPT in getattr(module, "__dict__", {})


def soft_clamp(x: Tensor, low: float, high: float) -> Tensor:
    """`x` itself in the middle half between the bounds, bent towards them outside, never beyond.

    Outside it follows ``t -> 1 - 1 / (1 + log(1 + t))``: the slope is 1 where it begins and falls like ``1/t``, so that
    even a value of 1e30 has a gradient that leads it back. With one infinite bound only the other side is bent, from
    half the bound's magnitude before it; with two nothing is.

    Example:
        >>> soft_clamp(torch.tensor([-1e9, -3.0, 0.0, 5.0, 8.0, 1e30]), -10, 10)
        tensor([-9.7514, -3.0000,  0.0000,  5.0000,  6.5986,  9.9270])
    """
    if not low < high:
        raise ValueError(f"the bounds are {low} and {high}; the first must be less than the second")
    if math.isfinite(low) and math.isfinite(high):
        room = (high - low) / 4
        low_room, high_room = room, room
    else:
        low_room, high_room = max(abs(low), 1.0) / 2, max(abs(high), 1.0) / 2
    if math.isfinite(high):
        x = _bend(x, high - high_room, high_room)
    if math.isfinite(low):
        x = -_bend(-x, -low - low_room, low_room)
    return x


def _bend(x: Tensor, start: float, room: float) -> Tensor:
    inside = ~(x > start)  # NaN too: it must stay what it is
    over = ((x - start) / room).masked_fill(inside, 0.0)
    bent = start + room * (1.0 - 1.0 / (1.0 + over.log1p()))
    return torch.where(inside, x, bent)
