"""One N-way loss over the batches of all processes of a group, each of which does its part of the work.

The rows of all ranks are gathered (``N B D`` numbers), every rank reduces its own `Problem.share` of the tuples, and
only the ``[N, B]`` reductions are summed up between the ranks: what is sent does not depend on the number of tuples,
``B^N``. Every rank then holds the same loss, that of the whole batch, in the order of the ranks.

**Gradients.** A backward pass gives every rank the gradient of the *sum over the ranks* of their (equal) losses with
respect to its own rows: ``world`` times that of one loss. `DistributedDataParallel` averages the parameters' gradients
over the ranks, which makes it exactly the gradient that one process with the whole batch would get (OpenCLIP's
``gather_with_grad`` follows the same convention). Who sums gradients by hand divides by the number of ranks. All ranks
must run the backward pass, as with any collective. Rows and their gradients travel in the dtype of the rows.

A rank whose arguments are wrong says so to the others before anything large is sent, so that all raise and none waits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.problem import Context, Kind, Problem, check_mask, check_xs

Reduce = Callable[[Problem, Kind], Tensor]

# The names of torch 2.6; later ones call the same things *_single and warn about the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CARD = 10
"""Numbers that describe a rank, sent before anything else."""

__all__ = ["Gathered", "Team", "gather_batch", "reduce_shares", "same_choice", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Who computes together: the process group, this process's place in it, and whether anybody wants gradients."""

    group: dist.ProcessGroup
    rank: int
    world: int
    needs_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The batch of all ranks, one after the other, the same on every rank."""

    xs: tuple[Tensor, ...]
    mask: Tensor | None
    team: Team
    sizes: tuple[int, ...]
    """Rows that each rank brought."""
    seed: int
    """The first rank's, for whatever must be drawn alike on all ranks."""

    @property
    def start(self) -> int:
        """Where this rank's rows begin in the whole batch."""
        return sum(self.sizes[: self.team.rank])


def gather_batch(
    xs: Sequence[Tensor],
    mask: Tensor | None,
    group: dist.ProcessGroup,
    *,
    settings: object = None,
    factors: Sequence[float | Tensor | None] = (),
    draw: bool = False,
    generator: torch.Generator | None = None,
) -> Gathered:
    """The rows (and masks) of all ranks, with gradients; batch sizes may differ from rank to rank.

    ``settings`` is whatever must be the same on all ranks (compared by its repr), ``factors`` the scale and bias, which
    may want gradients. With ``draw``, every rank takes a seed from its ``generator`` and the first rank's is for all. A
    rank whose rows are wrong raises why; the others raise that it did.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this process is not a member of the group it passed to the loss; pass a group it belongs to.")
    try:
        rows = check_xs(xs)
        present = check_mask(mask, rows)
    except (TypeError, ValueError) as error:
        _exchange([0] * CARD, world, group)
        raise error
    device, dtype = rows[0].device, rows[0].dtype
    for x in rows[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    numbers = [factor for factor in factors if not isinstance(factor, Tensor)]
    wanted = [*rows, *(factor for factor in factors if isinstance(factor, Tensor))]
    grad = torch.is_grad_enabled()
    card = [
        1,
        *rows[0].shape,
        len(rows),
        zlib.crc32(str(dtype).encode()),
        zlib.crc32(repr((settings, numbers)).encode()),
        int(grad),
        int(grad and any(tensor.requires_grad for tensor in wanted)),
        int(present is not None),
        _draw(generator) if draw else 0,
    ]
    cards = _exchange(card, world, group)
    _agree(cards, rank)
    sizes = tuple(card[1] for card in cards)
    team = Team(group=group, rank=rank, world=world, needs_grad=any(card[7] for card in cards))
    stacked = _with_grad(torch.stack([x.to(dtype) for x in rows]), team)
    every: Tensor = _Gather.apply(stacked, sizes, group)  # type: ignore[no-untyped-call]
    if any(card[8] for card in cards):
        if present is None:
            present = torch.ones(stacked.shape[:2], dtype=torch.bool, device=device)
        present = _gather_rows(present.to(torch.uint8).unsqueeze(-1), sizes, group).squeeze(-1).bool()
    return Gathered(xs=tuple(every.unbind(0)), mask=present, team=team, sizes=sizes, seed=cards[0][9])


def same_choice(choice: str, options: Sequence[str], team: Team, error: Exception | None = None) -> str:
    """The first rank's ``choice`` among ``options``, for every rank; or, where one has an ``error``, one on every rank.

    Ranks must not choose for themselves: their free memory differs, and parts of two backends do not fit together.
    """
    cards = _exchange([int(error is None), options.index(choice)], team.world, team.group)
    if error is not None:
        raise error
    bad = [rank for rank, card in enumerate(cards) if not card[0]]
    if bad:
        raise ValueError(f"rank {bad[0]} of the group refused the problem (it says why); nothing was computed.")
    return options[cards[0][1]]


def shared(reduce_tuples: Reduce, team: Team) -> Reduce:
    """The backend ``reduce_tuples``, its tuples divided among the ranks of ``team``."""

    def reduce(problem: Problem, kind: Kind) -> Tensor:
        part = reduce_tuples(replace(problem, share=(team.rank, team.world)), kind)
        return reduce_shares(part, kind, team)

    return reduce


def reduce_shares(part: Tensor, kind: Kind, team: Team) -> Tensor:
    """The reduction over all tuples from that over this rank's own: two (lse) or one all-reduce of ``part``'s size."""
    result: Tensor = _Combine.apply(_with_grad(part, team), kind, team.group)  # type: ignore[no-untyped-call]
    return result


def _with_grad(tensor: Tensor, team: Team) -> Tensor:
    """``tensor``, in a graph wherever any rank has one: who left out a backward collective would hang the rest."""
    if team.needs_grad and torch.is_grad_enabled() and not tensor.requires_grad:
        return tensor.detach().requires_grad_()
    return tensor


def _draw(generator: torch.Generator | None) -> int:
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(1 << 62, (), generator=generator, device=device))


def _exchange(card: list[int], world: int, group: dist.ProcessGroup) -> list[list[int]]:
    """The cards of all ranks. Where they meet must not depend on the tensors: a rank in error may have none."""
    on_host = "cpu:" in str(dist.get_backend_config(group))  # NCCL alone is the case where it cannot be
    device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
    mine = torch.tensor(card, dtype=torch.int64, device=device)
    every = torch.empty(world * len(card), dtype=torch.int64, device=device)
    _all_gather(every, mine, group=group)
    cards: list[list[int]] = every.view(world, len(card)).tolist()
    return cards


def _agree(cards: list[list[int]], rank: int) -> None:
    """Raise, on every rank alike, where one cannot go on or the ranks do not ask for the same thing."""
    bad = [r for r, card in enumerate(cards) if not card[0]]
    if bad:
        raise ValueError(f"rank {bad[0]} of the group could not use its arguments (it says why); nothing was computed.")
    names = {2: "widths", 3: "numbers of modalities", 4: "dtypes", 5: "settings", 6: "gradient modes (torch.no_grad)"}
    for column, name in names.items():
        values = [card[column] for card in cards]
        if len(set(values)) > 1:
            other = next(r for r, value in enumerate(values) if value != values[0])
            which = f": {values[0]} and {values[other]}" if column in (2, 3) else ""
            raise ValueError(
                f"the ranks of the group call the loss with different {name} (ranks 0 and {other}{which}; this is rank "
                f"{rank}); call it alike on all of them."
            )


def _gather_rows(tensor: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """``[N, sum(sizes), D]`` from each rank's ``[N, b, D]``; shorter ones travel padded."""
    num, rows, width = tensor.shape
    longest = max(sizes)
    padded = tensor.contiguous()
    if rows < longest:
        padded = tensor.new_zeros(num, longest, width)
        padded[:, :rows] = tensor
    every = tensor.new_empty(len(sizes) * num, longest, width)
    _all_gather(every, padded, group=group)
    parts = every.view(len(sizes), num, longest, width)
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1)


class _GatherContext(Context, Protocol):
    sizes: tuple[int, ...]
    group: dist.ProcessGroup


class _Gather(torch.autograd.Function):
    """Forward: the rows of all ranks. Backward: the sum over the ranks of the gradients of this rank's rows."""

    @staticmethod
    def forward(ctx: _GatherContext, stacked: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _gather_rows(stacked.detach(), sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: _GatherContext, grad: Tensor) -> tuple[Tensor, None, None]:
        sizes, group = ctx.sizes, ctx.group
        num, _, width = grad.shape
        longest, rank = max(sizes), dist.get_rank(group)
        padded = grad.new_zeros(len(sizes), num, longest, width)
        for part, piece in zip(padded, torch.split(grad, list(sizes), 1), strict=True):
            part[:, : piece.shape[1]] = piece
        return _sum_scatter(padded, rank, group)[:, : sizes[rank]], None, None


def _sum_scatter(parts: Tensor, rank: int, group: dist.ProcessGroup) -> Tensor:
    """``parts[rank]`` summed over the ranks."""
    mine = torch.empty_like(parts[0])
    try:
        _reduce_scatter(mine, parts.flatten(0, 1), group=group)
    except RuntimeError as error:  # gloo learned it late
        if "support" not in str(error).lower():
            raise
        dist.all_reduce(parts, group=group)
        mine = parts[rank]
    return mine


class _CombineContext(Context, Protocol):
    kind: Kind
    group: dist.ProcessGroup


class _Combine(torch.autograd.Function):
    """Forward: parts of all ranks to the whole. Backward: each part's share of the summed cotangents."""

    @staticmethod
    def forward(ctx: _CombineContext, part: Tensor, kind: Kind, group: dist.ProcessGroup) -> Tensor:
        part = part.detach()
        ctx.group, ctx.kind = group, kind
        if kind != "lse":
            whole = part.clone()
            dist.all_reduce(whole, group=group)
            return whole
        top = part.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        top = torch.where(top == float("-inf"), 0.0, top)  # no tuples anywhere; a NaN that MAX lost is in the sum below
        whole = (part - top).exp_()
        dist.all_reduce(whole, group=group)
        whole = whole.log_().add_(top)
        ctx.save_for_backward(part, whole)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: _CombineContext, grad: Tensor) -> tuple[Tensor, None, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        if ctx.kind == "lse":
            part, whole = ctx.saved_tensors
            # -inf - -inf: an anchor without tuples here must have no gradient, whatever there is elsewhere.
            total = torch.where(part == float("-inf"), 0.0, total * (part - whole).exp())
        return total, None, None
