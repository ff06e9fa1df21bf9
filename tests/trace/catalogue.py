"""Faults of known origin that the engine was made with: each a whole program, with the truth beside it.

The line that is to blame is marked. The other half is in `catalogue_held_out.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.trace.faults_base import Catalogue, Part, Program, Truth, chain, linear, program, rows, square_mean

TUNED = Catalogue()
fault, healthy = TUNED.fault, TUNED.healthy


# -- forward -----------------------------------------------------------------------------------------------------------


@fault("forward", Truth(ops=("log",), modules=("head",), reasons=("log-of-zero",), samples=(3,)))
def log_of_zero() -> Program:
    model = chain(
        body=linear(),
        square=Part(torch.square),
        head=Part(lambda x: torch.log(x)),  # origin
    )
    return program(model, rows(_3=0.0))


@fault("forward", Truth(ops=("sqrt",), modules=("spread",), reasons=("sqrt-of-negative",), samples=(2,)))
def sqrt_of_negative() -> Program:
    model = chain(
        body=linear(),
        spread=Part(lambda x: torch.sqrt(x.square().sum(1) - 1e-5)),  # origin
    )
    return program(model, rows(_2=0.0))


@fault("forward", Truth(ops=("div",), modules=("standardise",), reasons=("zero-std", "zero-by-zero"), samples=(6,)))
def constant_row_standardised() -> Program:
    class Standardise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            centred = x - x.mean(1, keepdim=True)
            return centred / x.std(1, keepdim=True)  # origin

    return program(chain(standardise=Standardise(), body=linear()), rows(_6=1.0))


@fault("forward", Truth(ops=("_softmax", "softmax"), modules=("attention",), samples=(2,)))
def attention_fully_masked() -> Program:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = linear(), linear(), linear()

        def forward(self, x: Tensor, masked: Tensor) -> Tensor:
            scores = self.query(x) @ self.key(x).transpose(1, 2) / 2
            scores = scores.masked_fill(masked[:, None, :], -math.inf)
            weights = scores.softmax(-1)  # origin
            return weights @ self.value(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: Tensor, masked: Tensor) -> Tensor:
            return self.attention(x, masked)

    masked = torch.zeros(6, 5, dtype=torch.bool)
    masked[:, 4] = True
    masked[2] = True
    return program(Model(), (rows(30).reshape(6, 5, 4), masked))


@fault("forward", Truth(ops=("exp",), modules=("rate",), causes=("op", "overflow"), samples=(1,)))
def exp_overflow() -> Program:
    model = chain(body=linear(weight=0.25), rate=Part(lambda x: torch.exp(x)))  # origin
    return program(model, rows(_1=100.0))


@fault("forward", Truth(ops=("pow",), modules=("gamma",), samples=(4,)))
def power_of_negative() -> Program:
    model = chain(body=linear(weight=0.25), gamma=Part(lambda x: x**1.5))  # origin
    return program(model, rows(_4=-1.0))


@fault("forward", Truth(ops=("std", "var", "std_mean"), modules=("whiten",)))
def std_of_a_batch_of_one() -> Program:
    class Whiten(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            spread = x.std(0)  # origin
            return (x - x.mean(0)) / (spread + 1e-5)

    return program(chain(body=linear(), whiten=Whiten()), rows(1))


@fault("forward", Truth(ops=("div",), modules=("share",)))
def everything_dropped() -> Program:
    model = chain(
        body=linear(),
        drop=nn.Dropout(1.0),
        share=Part(lambda x: x / x.sum(1, keepdim=True)),  # origin
    )
    return program(model, rows())


@fault(
    "forward", Truth(ops=("addmm", "mm", "linear", "mul"), modules=("cell", "cell.inner"), causes=("op", "overflow"))
)
def recurrent_state_growing() -> Program:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear(weight=4.0)

        def forward(self, x: Tensor) -> Tensor:
            state = x
            for _ in range(60):
                state = self.inner(state)  # origin
            return state

    return program(chain(cell=Cell()), rows(), lambda out: out.mean())


@fault("forward", Truth(ops=("log",), modules=("block",), reasons=("log-of-zero",), samples=(3,)))
def inside_a_checkpointed_block() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = linear()
            self.block = Part(lambda x: torch.log(x.square()))  # origin
            self.head = linear()

        def forward(self, x: Tensor) -> Tensor:
            out = checkpoint(self.block, self.body(x), use_reentrant=False)
            assert isinstance(out, Tensor)
            return self.head(out)

    return program(Model(), rows(_3=0.0))


@fault("forward", Truth(ops=("log",), modules=("head",), samples=(3,)))
def compiled() -> Program:
    model = chain(
        body=linear(),
        head=Part(lambda x: torch.log(x.square())),  # origin
    )
    whole = torch.compile(model, backend="eager")
    plain = program(model, rows(_3=0.0))

    def step(batch: Tensor) -> Tensor:
        loss = square_mean(whole(batch))
        loss.backward()
        return loss

    return Program(model=whole, batch=plain.batch, step=step)


# -- backward ----------------------------------------------------------------------------------------------------------


@fault("backward", Truth(ops=("sqrt", "div"), modules=("distance",), phase="backward", samples=(5,)))
def sqrt_at_zero() -> Program:
    model = chain(
        body=linear(),
        distance=Part(lambda x: x.square().sum(1).sqrt()),  # origin
    )
    return program(model, rows(_5=0.0), lambda out: out.mean())


@fault("backward", Truth(ops=("acos", "mul", "rsqrt"), modules=("angle",), phase="backward", samples=(0,)))
def acos_at_one() -> Program:
    model = chain(body=linear(weight=0.25), squash=nn.Tanh(), angle=Part(lambda x: torch.acos(x)))  # origin
    return program(model, rows(_0=100.0))


@fault("backward", Truth(ops=("log", "div"), modules=("safe",), phase="backward", samples=(1,)))
def where_guards_only_forward() -> Program:
    model = chain(
        body=linear(),
        safe=Part(lambda x: torch.where(x != 0, torch.log(x.square()), 0.0)),  # origin
    )
    return program(model, rows(_1=0.0))


@fault("backward", Truth(ops=("div",), modules=("gate",), phase="backward", samples=(2,)))
def custom_function_with_a_bad_backward() -> Program:
    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            return x.abs()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (x,) = ctx.saved_tensors
            return grad * (x / x.abs())  # origin

    model = chain(body=linear(), gate=Part(lambda x: Gate.apply(x)))
    return program(model, rows(_2=0.0), lambda out: out.mean())


# -- loss --------------------------------------------------------------------------------------------------------------


@fault("loss", Truth(ops=("nll_loss_forward", "nll_loss", "cross_entropy"), causes=("loss", "op")))
def all_targets_ignored() -> Program:
    target = torch.full((8,), -100)
    return program(
        chain(head=linear()),
        rows(),
        lambda out: F.cross_entropy(out, target),  # origin
    )


@fault("loss", Truth(ops=("log",), causes=("loss", "op"), samples=(7,)))
def label_out_of_domain() -> Program:
    model = chain(head=linear())
    target = torch.full((8, 4), 0.25)
    target[7] = -0.5

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        out = model(x).softmax(1)
        loss = (y * (torch.log(y) - torch.log(out))).sum(1).mean()  # origin
        loss.backward()
        return loss

    return Program(model=model, batch=(rows(), target), step=step)


@fault("loss", Truth(ops=("log",), causes=("loss", "op"), reasons=("log-of-zero",), samples=(4,)))
def log_after_softmax() -> Program:
    model = chain(head=linear(weight=0.25))
    with torch.no_grad():
        model.head.weight[0] = 3.0

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        chance = model(x).softmax(1)
        loss = -(F.one_hot(y, 4) * torch.log(chance)).sum(1).mean()  # origin
        loss.backward()
        return loss

    return Program(model=model, batch=(rows(_4=100.0), torch.zeros(8, dtype=torch.long)), step=step)


# -- data --------------------------------------------------------------------------------------------------------------


@fault("data", Truth(causes=("input",), modules=("body", ""), samples=(4,)))
def nan_sample() -> Program:
    x = rows()
    x[4, 1] = math.nan
    return program(chain(body=linear(), act=nn.Tanh(), head=linear()), x)


@fault("data", Truth(causes=("input",), modules=("body", ""), samples=(0, 6)))
def inf_samples() -> Program:
    x = rows()
    x[0, 3], x[6, 0] = math.inf, -math.inf
    return program(chain(body=linear(), act=nn.ReLU(), head=linear()), x)


@fault("data", Truth(causes=("input",), modules=("body", ""), samples=(9,), micro=(2, (1,))))
def nan_in_a_micro_batch() -> Program:
    x = rows(16)
    x[2 * 4 + 1] = math.nan
    model = chain(body=linear(), act=nn.Tanh(), head=linear())

    def step(batch: Tensor) -> Tensor:
        total = torch.zeros(())
        for micro in batch.split(4):
            loss = square_mean(model(micro)) / 4
            loss.backward()
            total = total + loss.detach()
        return total

    return Program(model=model, batch=x, step=step)


# -- parameters and buffers --------------------------------------------------------------------------------------------


@fault("parameter", Truth(causes=("parameter",), modules=("second", ""), subjects=("second.weight",)))
def weight_written_earlier() -> Program:
    model = chain(first=linear(), act=nn.Tanh(), second=linear())
    with torch.no_grad():
        model.second.weight[0, 0] = math.nan
    return program(model, rows())


@fault("parameter", Truth(causes=("parameter",), modules=("embed", ""), subjects=("embed.weight",), samples=(1, 5)))
def bad_embedding_row() -> Program:
    model = chain(embed=nn.Embedding(10, 4), head=linear())
    with torch.no_grad():
        model.embed.weight[7] = math.nan
    tokens = torch.arange(8).remainder(5).reshape(8, 1).repeat(1, 3)
    tokens[1, 2] = tokens[5, 0] = 7
    return program(model, tokens)


@fault("parameter", Truth(causes=("parameter",), modules=("embed", "", "out"), subjects=("embed.weight", "out.weight")))
def tied_weights() -> Program:
    model = chain(embed=nn.Embedding(4, 4), act=nn.Tanh(), out=linear())
    model.out.weight = model.embed.weight
    with torch.no_grad():
        model.embed.weight[2, 1] = math.inf
    return program(model, torch.tensor([0, 1, 3, 1]))


@fault("buffer", Truth(causes=("parameter",), modules=("norm", ""), subjects=("norm.running_var",)))
def running_variance_nan() -> Program:
    model = chain(body=linear(), norm=nn.BatchNorm1d(4), head=linear())
    model.norm.eval()
    model.norm.running_var[1] = math.nan
    return program(model, rows())


@fault(
    "buffer",
    Truth(
        ops=("native_batch_norm", "_native_batch_norm_legit_no_training", "batch_norm"),
        causes=("parameter", "op"),
        modules=("norm",),
    ),
)
def running_variance_negative() -> Program:
    model = chain(body=linear(), norm=nn.BatchNorm1d(4), head=linear())
    model.norm.eval()
    model.norm.running_var[1] = -1.0
    return program(model, rows())


@fault("parameter", Truth(causes=("parameter", "optimizer"), modules=("", "body", "head"), subjects=("body.weight",)))
def weights_made_infinite_by_the_rate() -> Program:
    model = chain(body=linear(), head=linear())
    optimizer = torch.optim.SGD(model.body.parameters(), lr=1e38)
    (square_mean(model(rows())) * 1e4).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.head.weight.grad = None
    return program(model, rows())


# -- dtypes ------------------------------------------------------------------------------------------------------------


@fault("dtype", Truth(ops=("addmm", "mm", "linear"), modules=("head",), causes=("overflow",), samples=(3,)))
def matmul_overflows_in_fp16() -> Program:
    model = chain(body=linear(weight=1.0), head=linear(weight=1.0))
    x = rows(_3=8000.0)

    def step(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(batch)  # origin
        loss = out.float().mean()
        loss.backward()
        return loss

    return Program(model=model, batch=x, step=step)


@fault("optimizer", Truth(phase="optimizer", causes=("optimizer",), subjects=("body.weight",)))
def rate_too_large() -> Program:
    model = chain(body=linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    return program(model, rows(), lambda out: square_mean(out) * 1e4, optimizer=optimizer)


# -- healthy: NaN or Inf on the way, and nothing wrong -----------------------------------------------------------------


@healthy()
def causal_mask() -> Program:
    model = chain(body=linear())
    mask = torch.full((5, 5), -math.inf).triu(1)

    def loss(out: Tensor) -> Tensor:
        scores = out @ out.transpose(1, 2) + mask
        return square_mean(scores.softmax(-1) @ out)

    return program(model, rows(30).reshape(6, 5, 4), loss)


@healthy()
def running_minimum_from_infinity() -> Program:
    best = torch.full((8, 4), math.inf)
    return program(chain(body=linear()), rows(), lambda out: torch.minimum(out, best).square().mean())


@healthy()
def missing_values_filled_in() -> Program:
    x = rows()
    x[2, 1] = math.nan
    return program(chain(fill=Part(lambda x: torch.nan_to_num(x)), body=linear()), x)


@healthy()
def norm_at_zero() -> Program:
    return program(chain(body=linear()), rows(_3=0.0), lambda out: out.norm(dim=1).mean())


@healthy()
def entropy_logged_without_gradient() -> Program:
    seen = {}

    def loss(out: Tensor) -> Tensor:
        with torch.no_grad():
            seen["entropy"] = torch.log(torch.relu(out - 100)).mean()
        return square_mean(out)

    return program(chain(body=linear()), rows(), loss)


@healthy()
def where_in_where() -> Program:
    def loss(out: Tensor) -> Tensor:
        safe = torch.where(out == 0, 1.0, out)
        return torch.where(out == 0, 0.0, torch.log(safe.square())).mean()

    return program(chain(body=linear()), rows(_1=0.0), loss)
