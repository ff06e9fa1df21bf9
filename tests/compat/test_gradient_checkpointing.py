"""A27: checkpointed blocks give the same loss, gradients and buffers to the bit, for less memory, once each."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from trimtab.compat.nn import add_gradient_checkpointing, remove_gradient_checkpointing


class ResidualAttentionBlock(nn.Module):
    """Dropout, BatchNorm and spectral norm on purpose; takes a keyword and returns a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = spectral_norm(nn.Linear(width, 4 * width))
        self.norm = nn.BatchNorm1d(4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: Tensor, *, gain: float = 1.0, preserve_rng_state: bool = True) -> tuple[Tensor, float]:
        self.calls += 1
        return x + gain * self.drop(self.down(nn.functional.gelu(self.norm(self.up(x))))), gain


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(ResidualAttentionBlock(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.resblocks:
            x, _ = block(x, gain=0.5, preserve_rng_state=False)
        return x


class Model(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.transformer = Transformer(width, depth)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.transformer(x))


BLOCKS = ("transformer.resblocks.0", "transformer.resblocks.1", "transformer.resblocks.2")
DOCUMENTED = ["transformer", "ResidualAttentionBlock"]


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    total = 0

    def pack(t: Tensor) -> Tensor:
        nonlocal total
        total += t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return total


def three_steps(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return seen + [value.clone() for value in model.state_dict().values()] + [torch.rand(1)]


def test_a27_same_to_the_bit_once_each_and_less_memory() -> None:
    plain = Model()
    model = copy.deepcopy(plain)
    keys = list(model.state_dict())
    handle = add_gradient_checkpointing(model, modules_to_checkpoint=DOCUMENTED)
    assert handle.blocks == BLOCKS
    assert list(model.state_dict()) == keys
    for mine, theirs in zip(three_steps(model), three_steps(plain), strict=True):
        assert torch.equal(mine, theirs)
    assert [b.calls for b in model.transformer.resblocks] == [6, 6, 6], "three steps, twice each, never nested"
    x = torch.randn(64, 8)
    assert saved_bytes(model, x) < 0.25 * saved_bytes(plain, x)


def test_a27_evaluation_and_no_grad_are_left_alone() -> None:
    model = Model()
    add_gradient_checkpointing(model, DOCUMENTED)
    block = model.transformer.resblocks[0]
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert block.calls == 1
    model.eval()
    out = model(torch.randn(4, 8, requires_grad=True))
    out.sum().backward()
    assert block.calls == 2


def test_a27_twice_is_once_and_it_can_be_undone() -> None:
    model = Model()
    first = add_gradient_checkpointing(model, DOCUMENTED)
    again = add_gradient_checkpointing(model, DOCUMENTED)
    assert again.blocks == first.blocks
    model(torch.randn(4, 8)).sum().backward()
    assert model.transformer.resblocks[1].calls == 2
    outer = add_gradient_checkpointing(model, ["transformer"])
    assert outer.blocks == (), "a block inside it is wrapped already"
    assert first.remove() == BLOCKS
    assert first.remove() == ()
    assert all("forward" not in vars(module) for module in model.modules())
    model(torch.randn(4, 8)).sum().backward()
    assert model.transformer.resblocks[1].calls == 3
    assert add_gradient_checkpointing(model, "transformer").blocks == ("transformer",)
    assert remove_gradient_checkpointing(model) == ("transformer",)


def test_a27_names_are_classes_and_whole_parts_of_paths() -> None:
    model = nn.ModuleDict({"transformer_head": nn.Linear(2, 2), "blocks": nn.Sequential(nn.Linear(2, 2), nn.GELU())})
    assert add_gradient_checkpointing(model, ["blocks"]).blocks == ("blocks.0", "blocks.1")
    assert add_gradient_checkpointing(model, ["transformer_head", "Lin"]).blocks == ("transformer_head",)
    exact = Model()
    assert add_gradient_checkpointing(exact, [BLOCKS[1]]).blocks == (BLOCKS[1],)


def test_a27_default_finds_torchs_own_layers() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.ModuleDict({"transformer": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)})
    assert add_gradient_checkpointing(model).blocks == ("transformer.layers.0", "transformer.layers.1")


def test_a27_no_match_says_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with caplog.at_level(logging.WARNING, "trimtab"):
        assert add_gradient_checkpointing(model, ["former"]).blocks == ()
    assert "'former'" in caplog.text
    assert "ResidualAttentionBlock" in caplog.text
    assert "resblocks" in caplog.text


def test_a27_a_deep_copy_uses_its_own_weights_and_a_pickle_comes_back_plain() -> None:
    model = Model()
    add_gradient_checkpointing(model, DOCUMENTED)
    twin = copy.deepcopy(model)
    for parameter in twin.transformer.resblocks[0].down.parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(4, 8)
    assert torch.equal(twin.transformer.resblocks[0](x)[0], x), "zero in the copy alone: the residual is all there is"
    assert twin.transformer.resblocks[0].calls == 1
    assert model.transformer.resblocks[0].calls == 0
    back: Any = pickle.loads(pickle.dumps(nn.Sequential(nn.Linear(2, 2))))
    add_gradient_checkpointing(back, ["Linear"])
    back = pickle.loads(pickle.dumps(back))
    back(torch.ones(1, 2)).sum().backward()
    assert back[0].weight.grad is not None


def test_a27_an_older_wrapper_is_kept_and_a_newer_one_is_not_torn_off(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    block = model[0]
    heard: list[str] = []
    own = block.forward

    def older(x: Tensor) -> Tensor:
        heard.append("older")
        return own(x)

    block.forward = older
    add_gradient_checkpointing(model, ["Linear"])
    model(torch.ones(1, 2)).sum().backward()
    assert heard == ["older", "older"]
    ours = block.forward
    block.forward = lambda x: ours(x)
    with caplog.at_level(logging.WARNING, "trimtab"):
        assert remove_gradient_checkpointing(model) == ()
    assert "stays" in caplog.text
    block.forward = ours
    assert remove_gradient_checkpointing(model) == ("0",)
    assert block.forward is older


def test_a27_accumulation_and_autocast() -> None:
    plain = Model()
    model = copy.deepcopy(plain)
    add_gradient_checkpointing(model, DOCUMENTED)
    for each in (plain, model):
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = [each(torch.randn(8, 8)).float().square().mean() for _ in range(2)]  # two graphs alive at once
        sum(losses).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)
