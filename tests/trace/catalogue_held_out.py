"""Faults of known origin that nobody looked at while the engine was made: what it says about them is measured once."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.trace.faults_base import Catalogue, Part, Program, Truth, chain, linear, program, rows, square_mean

HELD_OUT = Catalogue()
fault, healthy = HELD_OUT.fault, HELD_OUT.healthy


# -- forward -----------------------------------------------------------------------------------------------------------


@fault("forward", Truth(ops=("div",), modules=("pool",), samples=(3,)))
def mean_over_no_tokens() -> Program:
    class Pool(nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            total = (x * keep[..., None]).sum(1)
            return total / keep.sum(1, keepdim=True)  # origin

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.pool, self.head = linear(), Pool(), linear()

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return self.head(self.pool(self.body(x), keep))

    keep = torch.ones(6, 5)
    keep[3] = 0.0
    return program(Model(), (rows(30).reshape(6, 5, 4), keep))


@fault("forward", Truth(ops=("atanh",), modules=("stretch",), samples=(2,)))
def atanh_at_one() -> Program:
    model = chain(body=linear(weight=0.25), squash=nn.Tanh(), stretch=Part(lambda x: torch.atanh(x)))  # origin
    return program(model, rows(_2=50.0))


@fault("forward", Truth(ops=("rsqrt",), modules=("layers.1.norm",), samples=(5,)))
def root_mean_square_without_eps() -> Program:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True))  # origin

    class Layer(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm, self.body = norm, linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.norm(x))

    layers = nn.Sequential(Layer(nn.Identity()), Layer(Norm()))
    return program(chain(layers=layers), rows(_5=0.0))


@fault("forward", Truth(ops=("div",), modules=("unit",), samples=(1,)))
def unit_vectors_of_zero() -> Program:
    model = chain(
        body=linear(),
        unit=Part(lambda x: x / x.norm(dim=1, keepdim=True)),  # origin
        head=linear(),
    )
    return program(model, rows(_1=0.0))


@fault("forward", Truth(ops=("mul",), modules=("mask",)))
def mask_by_multiplying_infinity() -> Program:
    class Mask(nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            closed = torch.ones(4, 4).triu(1)
            return scores + closed * -math.inf  # origin

    return program(chain(body=linear(), mask=Mask(), act=nn.Softmax(-1)), rows(24).reshape(6, 4, 4))


@fault("forward", Truth(ops=("div",), modules=("soften",)))
def temperature_of_zero() -> Program:
    model = chain(body=linear(), soften=Part(lambda x: x / torch.zeros(()) * 2), act=nn.Softmax(-1))  # origin
    return program(model, rows())


@fault("forward", Truth(ops=("reciprocal",), modules=("depth",), samples=(0, 7)))
def inverse_depth() -> Program:
    model = chain(body=linear(), depth=Part(lambda x: torch.reciprocal(x)))  # origin
    return program(model, rows(_0=0.0, _7=0.0))


@fault("forward", Truth(ops=("exp",), modules=("soft",), causes=("op", "overflow"), samples=(6,)))
def home_made_softplus() -> Program:
    model = chain(body=linear(weight=0.25), soft=Part(lambda x: torch.log(1 + torch.exp(x))))  # origin
    return program(model, rows(_6=120.0))


@fault("forward", Truth(ops=("log1p",), modules=("margin",), samples=(4,)))
def log1p_at_minus_one() -> Program:
    model = chain(body=linear(weight=0.25), margin=Part(lambda x: torch.log1p(x)))  # origin
    return program(model, rows(_4=-1.0))


@fault("forward", Truth(ops=("cumprod",), modules=("product",), causes=("op", "overflow"), samples=(3,)))
def running_product_overflows() -> Program:
    model = chain(body=linear(weight=0.25), product=Part(lambda x: x.cumprod(1)))  # origin
    return program(model, rows(_3=1e12))


@fault(
    "forward",
    Truth(
        ops=("_softmax", "softmax", "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu"),
        modules=("attention",),
        samples=(2,),
    ),
)
def library_attention_fully_padded() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor, padded: Tensor) -> Tensor:
            out, _ = self.attention(x, x, x, key_padding_mask=padded)  # origin
            return out

    padded = torch.zeros(6, 5, dtype=torch.bool)
    padded[2] = True
    return program(Model(), (rows(30).reshape(6, 5, 4), padded))


@fault("forward", Truth(ops=("sub", "logsumexp"), modules=("choose",), samples=(3,)))
def nothing_left_to_choose() -> Program:
    class Choose(nn.Module):
        def forward(self, x: Tensor, closed: Tensor) -> Tensor:
            scores = x.masked_fill(closed, -math.inf)
            return scores - scores.logsumexp(1, keepdim=True)  # origin

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.choose = linear(), Choose()

        def forward(self, x: Tensor, closed: Tensor) -> Tensor:
            return self.choose(self.body(x), closed)

    closed = torch.zeros(8, 4, dtype=torch.bool)
    closed[3] = True
    return program(Model(), (rows(), closed), lambda out: out[:, 0].mean())


@fault("forward", Truth(ops=("linalg_slogdet", "_linalg_slogdet", "logdet", "log"), modules=("volume",), samples=(1,)))
def determinant_of_a_singular_matrix() -> Program:
    class Volume(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.logdet(x * self.scale)  # origin

    x = torch.eye(4).repeat(6, 1, 1) * rows(6)[:, :, None]
    x[1] = 1.0
    return program(chain(volume=Volume(), head=linear(6, 1)), x)


# -- backward ----------------------------------------------------------------------------------------------------------


@fault("backward", Truth(ops=("asin", "mul", "rsqrt"), modules=("angle",), phase="backward", samples=(3,)))
def asin_at_minus_one() -> Program:
    model = chain(body=linear(weight=0.25), squash=nn.Tanh(), angle=Part(lambda x: torch.asin(x)))  # origin
    return program(model, rows(_3=-90.0))


@fault("backward", Truth(ops=("pow", "mul"), modules=("root",), phase="backward", samples=(2,)))
def half_power_at_zero() -> Program:
    model = chain(
        body=linear(),
        root=Part(lambda x: x.square().sum(1).pow(0.5)),  # origin
    )
    return program(model, rows(_2=0.0), lambda out: out.mean())


@fault("backward", Truth(ops=("sqrt", "div"), modules=("spread",), phase="backward"))
def sqrt_of_a_variance_of_zero() -> Program:
    class Spread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(1, keepdim=True)).square().mean(1).sqrt()  # origin

    return program(chain(body=linear(weight=0.25), spread=Spread()), rows(), lambda out: out.mean())


@fault("backward", Truth(ops=("mul",), modules=("amplify",), phase="backward", causes=("op", "overflow")))
def gradient_overflows() -> Program:
    class Amplify(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1e30 * 1e30  # origin

    return program(chain(body=linear(), amplify=Amplify()), rows() * 0, lambda out: out.mean())


@fault("backward", Truth(ops=("div",), modules=("", "head"), phase="backward", causes=("op", "unknown", "loss")))
def hook_that_divides_by_zero() -> Program:
    model = chain(body=linear(), act=nn.Tanh(), head=linear())

    def loss(out: Tensor) -> Tensor:
        out.register_hook(lambda grad: grad / grad.sub(grad).norm())  # origin
        return square_mean(out)

    return program(model, rows(), loss)


@fault("backward", Truth(ops=("sqrt", "div"), modules=("block",), phase="backward", samples=(5,)))
def sqrt_in_a_checkpointed_block() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = linear()
            self.block = Part(lambda x: x.square().sum(1, keepdim=True).sqrt())  # origin
            self.head = linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            out = checkpoint(self.block, self.body(x), use_reentrant=False)
            assert isinstance(out, Tensor)
            return self.head(out)

    return program(Model(), rows(_5=0.0), lambda out: out.mean())


# -- loss --------------------------------------------------------------------------------------------------------------


@fault("loss", Truth(ops=("nll_loss_forward", "nll_loss", "cross_entropy"), causes=("loss", "op")))
def class_weights_of_zero() -> Program:
    target, weight = torch.zeros(8, dtype=torch.long), torch.tensor([0.0, 1.0, 1.0, 1.0])
    return program(
        chain(head=linear()),
        rows(),
        lambda out: F.cross_entropy(out, target, weight=weight),  # origin
    )


@fault("loss", Truth(ops=("log",), causes=("loss", "op"), samples=(2,)))
def divergence_from_a_chance_of_zero() -> Program:
    model = chain(head=linear())
    target = torch.full((8, 4), 0.25)
    target[2] = torch.tensor([1.0, 0.0, 0.0, 0.0])

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        ratio = y / model(x).softmax(1)
        loss = (y * ratio.log()).sum(1).mean()  # origin
        loss.backward()
        return loss

    return Program(model=model, batch=(rows(), target), step=step)


@fault("loss", Truth(ops=("div",), causes=("loss", "op"), samples=(5,)))
def likelihood_with_a_spread_of_zero() -> Program:
    model = chain(head=linear(weight=0.25))

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        spread = torch.relu(model(x))
        loss = ((y - 1.0) ** 2 / (2 * spread**2)).mean()  # origin
        loss.backward()
        return loss

    return Program(model=model, batch=(rows(_5=-1.0), rows()), step=step)


# -- data --------------------------------------------------------------------------------------------------------------


@fault("data", Truth(causes=("input",), samples=(6,)))
def nan_target() -> Program:
    model = chain(body=linear())
    target = rows()
    target[6, 2] = math.nan

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = F.mse_loss(model(batch["image"]), batch["target"])
        loss.backward()
        return loss

    return Program(model=model, batch={"image": rows(), "target": target}, step=step)


@fault("data", Truth(causes=("input",), modules=("", "stem"), samples=(3,)))
def inf_pixel() -> Program:
    x = rows(6 * 3, 25).reshape(6, 3, 5, 5)
    x[3, 1, 2, 2] = math.inf
    model = chain(stem=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4), act=nn.ReLU(), flat=nn.Flatten(), head=linear(36))
    return program(model, x)


# -- parameters and buffers --------------------------------------------------------------------------------------------


@fault("parameter", Truth(causes=("parameter",), modules=("conv", ""), subjects=("conv.bias",)))
def infinite_bias_of_a_convolution() -> Program:
    model = chain(conv=nn.Conv2d(3, 4, 3), act=nn.ReLU(), flat=nn.Flatten(), head=linear(36))
    with torch.no_grad():
        model.conv.bias[2] = math.inf
    return program(model, rows(6 * 3, 25).reshape(6, 3, 5, 5))


@fault("parameter", Truth(causes=("parameter",), modules=("encoder.1.norm", ""), subjects=("encoder.1.norm.weight",)))
def nan_in_a_nested_layer_norm() -> Program:
    encoder = nn.Sequential(chain(body=linear(), norm=nn.LayerNorm(4)), chain(body=linear(), norm=nn.LayerNorm(4)))
    with torch.no_grad():
        encoder[1].norm.weight[3] = math.nan  # type: ignore[union-attr]
    return program(chain(encoder=encoder, head=linear()), rows())


@fault("parameter", Truth(causes=("parameter",), modules=("rnn", ""), subjects=("rnn.weight_hh_l0",)))
def infinite_recurrent_weight() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 4, batch_first=True), linear()

        def forward(self, x: Tensor) -> Tensor:
            out, _ = self.rnn(x)
            return self.head(out[:, -1])

    model = Model()
    with torch.no_grad():
        model.rnn.weight_hh_l0[1, 1] = math.nan
    return program(model, rows(30).reshape(6, 5, 4))


@fault("buffer", Truth(causes=("parameter",), modules=("centre", ""), subjects=("centre.offset",)))
def nan_in_a_buffer_of_ones_own() -> Program:
    class Centre(nn.Module):
        offset: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return x - self.offset

    model = chain(body=linear(), centre=Centre(), head=linear())
    model.centre.offset[0] = math.nan
    return program(model, rows())


# -- dtypes ------------------------------------------------------------------------------------------------------------


@fault("dtype", Truth(ops=("_to_copy", "to"), modules=("shrink",), causes=("overflow",), samples=(1,)))
def cast_to_fp16_overflows() -> Program:
    model = chain(body=linear(weight=0.25), shrink=Part(lambda x: x.half()), grow=Part(lambda x: x.float()))  # origin
    return program(model, rows(_1=1e5), lambda out: out.mean())


@fault("dtype", Truth(ops=("pow", "mul"), modules=("energy",), causes=("overflow",), samples=(4,)))
def square_overflows_in_fp16() -> Program:
    model = chain(body=linear(weight=0.25).half(), energy=Part(lambda x: x**2))  # origin
    return program(model, rows(_4=300.0).half(), lambda out: out.float().mean())


@fault("dtype", Truth(ops=("div",), modules=("unit",), samples=(2,)))
def epsilon_vanishes_in_fp16() -> Program:
    model = chain(
        body=linear().half(),
        unit=Part(lambda x: x / (x.abs().sum(1, keepdim=True) + 1e-8)),  # origin
    )
    return program(model, rows(_2=0.0).half(), lambda out: out.float().square().mean())


# -- optimizer ---------------------------------------------------------------------------------------------------------


@fault("optimizer", Truth(phase="optimizer", causes=("optimizer",), subjects=("body.weight",)))
def adam_without_eps() -> Program:
    model = chain(body=linear())
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0)
    x = rows()
    x[:, 2] = 0.0
    return program(model, x, optimizer=optimizer)


# -- healthy -----------------------------------------------------------------------------------------------------------


@healthy()
def impossible_classes() -> Program:
    target = torch.zeros(8, dtype=torch.long)

    def loss(out: Tensor) -> Tensor:
        closed = torch.tensor([False, False, True, True])
        return F.cross_entropy(out.masked_fill(closed, -math.inf), target)

    return program(chain(body=linear()), rows(), loss)


@healthy()
def std_of_a_constant_row() -> Program:
    return program(chain(body=linear(weight=0.25)), rows(), lambda out: out.std(1).mean() + square_mean(out))


@healthy()
def missing_targets_left_out() -> Program:
    target = rows()
    target[5] = math.nan

    def loss(out: Tensor) -> Tensor:
        known = target.isfinite()
        return (out[known] - target[known]).square().mean()

    return program(chain(body=linear()), rows(), loss)


@healthy()
def nearest_other_point() -> Program:
    def loss(out: Tensor) -> Tensor:
        apart = (out[:, None] - out[None]).square().sum(-1)
        return apart.masked_fill(torch.eye(8, dtype=torch.bool), math.inf).min(1).values.mean()

    return program(chain(body=linear()), rows(), loss)


@healthy()
def entropy_with_zero_chances() -> Program:
    def loss(out: Tensor) -> Tensor:
        chance = torch.softmax(out * 1e4, 1).detach()
        return -torch.xlogy(chance, chance).sum(1).mean() + square_mean(out)

    return program(chain(body=linear()), rows(), loss)
