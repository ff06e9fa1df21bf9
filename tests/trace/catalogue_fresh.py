"""Faults written after the engine and both other halves: other layouts of batches, other modules, other losses."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests.trace.faults_base import Catalogue, Part, Program, Truth, chain, linear, program, rows, square_mean

FRESH = Catalogue()
fault, healthy = FRESH.fault, FRESH.healthy


@fault("forward", Truth(ops=("log",), modules=("token_head",), samples=(2,)))
def tokens_flattened_with_the_batch() -> Program:
    class Head(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x)  # origin

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.token_head = linear(), Head()

        def forward(self, x: Tensor) -> Tensor:
            flat = self.body(x).square().reshape(-1, 4)
            return self.token_head(flat).reshape(x.shape)

    x = rows(30).reshape(6, 5, 4)
    x[2, 3] = 0.0
    return program(Model(), x)


@fault("forward", Truth(ops=("sqrt",), modules=("scale",), samples=(4,)))
def batch_in_the_second_dimension() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 4)
            self.scale = Part(lambda x: torch.sqrt(x - 0.999))  # origin

        def forward(self, x: Tensor) -> Tensor:
            out, _ = self.rnn(x.transpose(0, 1))
            lengths = x.abs().sum((1, 2))[None, :, None]
            return self.scale(out.tanh() * 0 + lengths)

    x = rows(30).reshape(6, 5, 4)
    x[4] = 0.0
    return program(Model(), x)


@fault("forward", Truth(ops=("log_", "log"), modules=("head",), samples=(1,)))
def logarithm_in_place() -> Program:
    class Head(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = x.square()
            out.log_()  # origin
            return out

    return program(chain(body=linear(), head=Head()), rows(_1=0.0))


@fault("forward", Truth(ops=("div", "div_"), modules=("pair.second",), samples=(0,)))
def one_module_of_two_alike() -> Program:
    class Share(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.sum(1, keepdim=True)  # origin

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Share(), Share()

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x + 1) + self.second(x)

    return program(chain(body=linear(), pair=Pair()), rows(_0=0.0))


@fault("loss", Truth(ops=("log",), causes=("loss", "op"), samples=(3,)))
def contrastive_without_positives() -> Program:
    model = chain(body=linear())

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, labels = batch
        z = F.normalize(model(x), dim=1)
        alike = (labels[:, None] == labels[None]) & ~torch.eye(len(x), dtype=torch.bool)
        chance = (z @ z.T).exp()
        loss = -torch.log((chance * alike).sum(1) / chance.sum(1)).mean()  # origin
        loss.backward()
        return loss

    return Program(model=model, batch=(rows(6), torch.tensor([0, 0, 1, 2, 1, 1])), step=step)


@fault("loss", Truth(ops=("_ctc_loss", "ctc_loss"), causes=("loss", "op")))
def ctc_target_longer_than_the_input() -> Program:
    model = chain(head=linear())
    lengths, targets = torch.full((2,), 3), torch.tensor([[1, 2, 1, 2, 1], [1, 2, 1, 2, 1]])

    def step(batch: Tensor) -> Tensor:
        out = model(batch).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(out, targets, lengths, torch.full((2,), 5))  # origin
        loss.backward()
        return loss

    return Program(model=model, batch=rows(6).reshape(2, 3, 4), step=step)


@fault(
    "forward",
    Truth(
        ops=("_weight_norm_interface", "_weight_norm", "div"),
        modules=("layer", "layer.parametrizations.weight.0"),
        causes=("op", "parameter"),
    ),
)
def weight_norm_of_zero() -> Program:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with torch.no_grad():
        layer.parametrizations.weight.original1.zero_()  # type: ignore[union-attr, operator]
    return program(chain(layer=layer), rows())


@fault("data", Truth(causes=("input",), samples=(5,)))
def nan_in_a_keyword_argument() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = linear()

        def forward(self, x: Tensor, *, extra: Tensor) -> dict[str, Tensor]:
            return {"logits": self.body(x) + extra}

    model = Model()
    extra = rows()
    extra[5, 0] = math.nan

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = square_mean(model(batch["x"], extra=batch["extra"])["logits"])
        loss.backward()
        return loss

    return Program(model=model, batch={"x": rows(), "extra": extra}, step=step)


@fault("backward", Truth(ops=("sqrt", "div"), modules=("distance",), phase="backward", samples=(1, 4)))
def distance_after_frozen_layers() -> Program:
    body = linear()
    body.requires_grad_(False)
    model = chain(frozen=body, head=linear(), distance=Part(lambda x: x.square().sum(1).sqrt()))  # origin
    return program(model, rows(_1=0.0, _4=0.0), lambda out: out.mean())


@fault("dtype", Truth(ops=("sum", "_to_copy", "mean"), modules=("total",), causes=("overflow",), samples=(2,)))
def sum_overflows_in_fp16() -> Program:
    model = chain(body=linear(weight=0.25).half(), total=Part(lambda x: x.sum(1)))  # origin
    return program(model, rows(_2=30_000.0).half(), lambda out: out.float().mean())


@fault("dtype", Truth(ops=("bmm", "matmul", "mm"), modules=("scores",), causes=("overflow",), samples=(1,)))
def attention_scores_overflow_in_fp16() -> Program:
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.transpose(1, 2)).softmax(-1) @ x  # origin

    x = rows(30).reshape(6, 5, 4)
    x[1] *= 400.0
    return program(chain(body=linear(weight=0.25).half(), scores=Scores()), x.half(), lambda out: out.float().mean())


@fault("forward", Truth(ops=("mul",), modules=("gate",), samples=(6,)))
def zero_times_infinity() -> Program:
    class Gate(nn.Module):
        def forward(self, x: Tensor, boost: Tensor) -> Tensor:
            return x * boost  # origin

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.gate = linear(), Gate()

        def forward(self, x: Tensor, far: Tensor) -> Tensor:
            boost = torch.where(far[:, None], math.inf, 1.0)
            closed = torch.where(far[:, None], 0.0, self.body(x))
            return self.gate(closed, boost)

    far = torch.zeros(8, dtype=torch.bool)
    far[6] = True
    return program(Model(), (rows(), far))


@fault("forward", Truth(ops=("log", "div"), modules=("polar",), phase="backward", samples=(3,)))
def angle_of_the_origin() -> Program:
    class Polar(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(x[:, 0], x[:, 1]).log().imag  # origin

    return program(chain(body=linear(), polar=Polar()), rows(_3=0.0))


@fault("parameter", Truth(causes=("parameter",), modules=("blocks.2", ""), subjects=("blocks.2.weight",)))
def one_bad_block_in_a_list() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(linear() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + torch.relu(block(x))
            return x

    model = Model()
    with torch.no_grad():
        model.blocks[2].weight[1, 1] = -math.inf
    return program(model, rows())


@fault("loss", Truth(ops=("div",), causes=("loss", "op")))
def mean_over_an_empty_selection() -> Program:
    return program(
        chain(body=linear()),
        rows(),
        lambda out: (out * (out > 1e9)).sum() / (out > 1e9).sum(),  # origin
    )


@fault("loss", Truth(ops=("mean",), causes=("loss", "op")))
def mean_of_an_empty_tensor() -> Program:
    return program(
        chain(body=linear()),
        rows(),
        lambda out: out[out > 1e9].mean(),  # origin
    )


@healthy()
def padding_with_infinity_and_topk() -> Program:
    def loss(out: Tensor) -> Tensor:
        padded = F.pad(out, (0, 3), value=-math.inf)
        return padded.topk(2, dim=1).values.square().mean()

    return program(chain(body=linear()), rows(), loss)


@healthy()
def log_of_zero_weighted_away_before() -> Program:
    def loss(out: Tensor) -> Tensor:
        keep = out.abs().sum(1) > 0
        return torch.log(out[keep].square()).mean()

    return program(chain(body=linear()), rows(_3=0.0), loss)


@healthy()
def library_attention_that_gives_zeros() -> Program:
    mask = torch.ones(6, 1, 5, 5, dtype=torch.bool)
    mask[2] = False

    def loss(out: Tensor) -> Tensor:
        q = out[:, None]
        return square_mean(F.scaled_dot_product_attention(q, q, q, attn_mask=mask).nan_to_num())

    return program(chain(body=linear()), rows(30).reshape(6, 5, 4), loss)
