"""Gradients between two micro-batches: a checkpoint in the middle of an accumulation must not lose them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trimtab.recover.compare import different, kind_of, missing_and_extra
from trimtab.recover.modules import plain_name


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients there are, by the plain name of their parameter; a tied parameter counts once."""
    return {
        plain_name(model, name): parameter.grad.detach()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def differences(model: nn.Module, saved: Mapping[str, Tensor]) -> list[str]:
    """Why these gradients do not belong to this model."""
    here = {plain_name(model, name): parameter for name, parameter in model.named_parameters()}
    lines = missing_and_extra("gradients", (), (name for name in saved if name not in here), "gradients")
    for name, gradient in saved.items():
        if name in here and gradient.shape != here[name].shape:
            lines.append(different("gradients", name, kind_of(here[name]), kind_of(gradient)))
    return lines


@torch.no_grad()
def load(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Give every parameter the gradient it had, and none where it had none."""
    for name, parameter in model.named_parameters():
        gradient = saved.get(plain_name(model, name))
        if gradient is None:
            parameter.grad = None
        elif parameter.grad is not None and _alike(parameter.grad, gradient):
            parameter.grad.copy_(gradient)  # the same object: a flat gradient buffer keeps its views
        else:
            parameter.grad = gradient.detach().to(parameter.device, copy=True)


def _alike(one: Tensor, other: Tensor) -> bool:
    return kind_of(one) == kind_of(other) and one.layout is other.layout is torch.strided
