"""The sigmoid objective: every tuple a yes-or-no question, no softmax, so that no anchor waits for another."""

from __future__ import annotations

from torch import Tensor

from trimtab.losses.problem import Problem
from trimtab.losses.reduce import log1pexp

__all__ = ["sigmoid_values"]


def sigmoid_values(problem: Problem, negatives: Tensor, positive: Tensor) -> Tensor:
    """``[N, B]``: the terms of all tuples of anchor ``(m, i)``, whose mean is the sum over all tuples divided by B."""
    z = positive if problem.bias is None else positive + problem.bias
    return negatives + log1pexp(-z)
