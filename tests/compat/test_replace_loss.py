"""A26: the stable similarity takes the place of `calculate_loss`, keeps the original, and gives it back."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import trimtab.compat.monitors
from trimtab.losses import (
    get_stable_loss_function,
    replace_loss_function_with_stable_version,
    restore_loss_function,
)


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)

    def calculate_loss(self, *features: Tensor) -> Tensor:
        return torch.einsum("az,bz,cz->abc", *features)

    def forward(self, *features: Tensor) -> Tensor:
        return self.calculate_loss(*map(self.encoder, features))


class Similarity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *features: Tensor) -> Tensor:
        return self.scale * features[0] @ features[1].T


class WithSubmodule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calculate_loss = Similarity()


XS = tuple(torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)))


def test_a26_replaces_keeps_and_restores_a_method() -> None:
    module = WithMethod()
    before = module(*XS)
    keys = list(module.state_dict())
    loss = replace_loss_function_with_stable_version(module)
    assert loss == get_stable_loss_function(1, normalize=True, eps=1e-8)
    encoded = [module.encoder(x) for x in XS]
    assert torch.equal(module(*XS), loss(*encoded))
    assert torch.equal(module.calculate_loss_original(*encoded), before)
    module(*XS).sum().backward()
    assert torch.isfinite(module.encoder.weight.grad).all()
    assert list(module.state_dict()) == keys
    assert restore_loss_function(module)
    assert torch.equal(module(*XS), before)
    assert not hasattr(module, "calculate_loss_original")
    assert "calculate_loss" not in vars(module)


def test_a26_a_second_call_keeps_the_first_original() -> None:
    module = WithMethod()
    replace_loss_function_with_stable_version(module, loss_version=1)
    second = replace_loss_function_with_stable_version(module, loss_version=3, normalize=False, eps=1e-6)
    assert second == get_stable_loss_function(3, normalize=False, eps=1e-6)
    assert module.calculate_loss is second
    assert module.calculate_loss_original.__func__ is WithMethod.calculate_loss
    assert restore_loss_function(module)
    assert not restore_loss_function(module)


def test_a26_an_attribute_of_the_instance_and_a_submodule() -> None:
    plain = WithMethod()
    own = get_stable_loss_function(0)
    plain.calculate_loss = own
    replace_loss_function_with_stable_version(plain)
    assert plain.calculate_loss_original is own
    restore_loss_function(plain)
    assert plain.calculate_loss is own

    module = WithSubmodule()
    keys = list(module.state_dict())
    original = module.calculate_loss
    replace_loss_function_with_stable_version(module)
    assert module.calculate_loss(*XS).shape == (2, 2, 2)
    assert module.calculate_loss_original is original
    assert list(module.state_dict()) == keys
    restore_loss_function(module)
    assert module.calculate_loss is original


def test_a26_copies_and_pickles_keep_it() -> None:
    module = WithMethod()
    replace_loss_function_with_stable_version(module)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(*XS), module(*XS))
    assert twin.calculate_loss_original.__self__ is twin
    back = pickle.loads(pickle.dumps(module))
    assert torch.equal(back(*XS), module(*XS))


def test_a26_says_what_is_missing_and_changes_nothing() -> None:
    with pytest.raises(ValueError, match="Linear has no method calculate_loss"):
        replace_loss_function_with_stable_version(nn.Linear(2, 2))
    module = WithMethod()
    with pytest.raises(ValueError, match="loss_version is 7"):
        replace_loss_function_with_stable_version(module, loss_version=7)
    assert "calculate_loss" not in vars(module)


def test_a26_is_found_beside_its_siblings() -> None:
    assert (
        trimtab.compat.monitors.replace_loss_function_with_stable_version is replace_loss_function_with_stable_version
    )
    assert trimtab.compat.monitors.restore_loss_function is restore_loss_function
