"""Faults unlike all others here, written last: other libraries' habits, other operations, other ways to make a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.trace.faults_base import Catalogue, Part, Program, Truth, chain, linear, program, rows, square_mean

UNSEEN = Catalogue()
fault, healthy = UNSEEN.fault, UNSEEN.healthy


# -- forward -----------------------------------------------------------------------------------------------------------


@fault(
    "forward", Truth(ops=("_softmax", "softmax"), modules=("attend",), reasons=("fully-masked-softmax",), samples=(4,))
)
def einsum_attention_with_a_custom_mask() -> Program:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = linear(), linear(), linear()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            q, k, v = (part(x).unflatten(-1, (2, 2)) for part in (self.q, self.k, self.v))
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(2)
            scores = scores + torch.where(mask[:, None, None, :], 0.0, -math.inf)
            weights = scores.softmax(-1)  # origin
            return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.attend, self.head = linear(), Attend(), linear()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.attend(self.body(x), mask).mean(1))

    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[4] = False
    return program(Model(), (rows(30).reshape(6, 5, 4), mask))


@fault("forward", Truth(ops=("native_layer_norm",), modules=("norm",), reasons=("zero-variance",), samples=(2,)))
def layer_norm_of_a_constant_row_without_eps() -> Program:
    return program(chain(norm=nn.LayerNorm(4, eps=0.0), head=linear()), rows(_2=3.0))


@fault("forward", Truth(ops=("div",), modules=("", "compare"), reasons=("zero-norm", "zero-by-zero"), samples=(1,)))
def cosine_similarity_by_hand() -> Program:
    class Compare(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            dot = (a * b).sum(-1)
            size = a.norm(dim=-1) * b.norm(dim=-1)
            return dot / size  # origin

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.compare = linear(), Compare()

        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            left, right = pair
            return self.compare(self.tower(left), self.tower(right))

    model = Model()

    def step(batch: tuple[tuple[Tensor, Tensor], Tensor]) -> Tensor:
        pair, target = batch
        loss = F.mse_loss(model(pair), target)
        loss.backward()
        return loss

    return Program(model=model, batch=((rows(), rows(_1=0.0)), torch.ones(8)), step=step)


@fault(
    "forward", Truth(ops=("_linalg_det", "linalg_inv_ex", "log", "_linalg_slogdet"), modules=("volume",), samples=(3,))
)
def log_determinant_of_a_singular_matrix() -> Program:
    class Volume(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.det(x).log()  # origin

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.volume = nn.Parameter(torch.ones(())), Volume()

        def forward(self, x: Tensor) -> Tensor:
            return self.volume(x * self.scale)

    x = torch.eye(3).repeat(6, 1, 1) * 2
    x[3, 2, 2] = 0.0
    return program(Model(), x, lambda out: out.mean())


@fault("forward", Truth(ops=("pow",), modules=("inverse",), samples=(5,)))
def negative_power_of_zero() -> Program:
    return program(chain(body=linear(), inverse=Part(lambda x: x.abs() ** -0.5)), rows(_5=0.0))  # origin


@fault("forward", Truth(ops=("std", "var"), modules=("scale",), reasons=("spread-of-one-value",)))
def standard_deviation_over_a_batch_of_one() -> Program:
    model = chain(body=linear(), scale=Part(lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5)))  # origin
    return program(model, rows(1))


@fault("forward", Truth(ops=("div",), modules=("pool",), samples=(2, 5)))
def pooling_by_lengths_gathered_from_padding() -> Program:
    class Pool(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            place = torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]
            total = torch.zeros(x.shape[0], x.shape[2], device=x.device)
            index = torch.arange(x.shape[0], device=x.device).repeat_interleave(x.shape[1])
            total = total.index_add(0, index, (x * place[..., None]).flatten(0, 1))
            return total / lengths[:, None]  # origin

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 4, padding_idx=0, max_norm=1.0)
            self.pool, self.head = Pool(), linear(4, 3)

        def forward(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = self.head(self.pool(self.embed(input_ids), attention_mask.sum(1)))
            return {"loss": F.cross_entropy(out, labels), "logits": out}

    model = Model()
    ids = torch.arange(30).reshape(6, 5) % 10 + 1
    mask = torch.ones(6, 5, dtype=torch.long)
    mask[2] = mask[5] = 0

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(**batch)["loss"]
        loss.backward()
        return loss

    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    return Program(model=model, batch={"input_ids": ids, "attention_mask": mask, "labels": labels}, step=step)


@fault("forward", Truth(ops=("log",), modules=("cell",), samples=(0,)))
def one_module_called_in_a_loop() -> Program:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = linear(weight=0.25)

        def forward(self, h: Tensor) -> Tensor:
            return torch.log(self.mix(h))  # origin

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Cell()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.cell(x)
            return x

    x = rows() + 20.0
    x[0] = 0.5  # its logarithm is negative: the second round fails
    return program(Model(), x)


@fault("forward", Truth(ops=("div", "div_"), modules=("head",), samples=(1,)))
def division_in_place_of_a_slice() -> Program:
    class Head(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = x.clone()
            out[:, 1:] /= x[:, :1].relu()  # origin
            return out

    x = rows()
    return program(
        chain(body=nn.Identity(), lift=Part(lambda x: x), head=Head(), last=linear()),
        torch.cat([x[:1], -x[1:2], x[2:]]),
    )


@fault("forward", Truth(ops=("sqrt",), modules=("norm",), reasons=("sqrt-of-negative",), samples=(3,)))
def packed_sequences_with_a_variance_below_zero() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 4, batch_first=True)
            self.norm = Part(lambda h, v: h / torch.sqrt(v)[:, None])  # origin

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, (h, _) = self.rnn(packed)
            spread = x.square().mean((1, 2)) - 0.25 * x.mean((1, 2)).square() - 0.3
            return self.norm(h[-1], spread)

    x = rows(30).reshape(6, 5, 4)
    x[3] = 0.1
    return program(Model(), (x, torch.tensor([5, 3, 1, 4, 2, 5])))


@fault("forward", Truth(ops=("log",), modules=("blocks.1", "blocks.1.act"), samples=(6,)))
def checkpointed_blocks_with_dropout() -> Program:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.drop = linear(weight=0.25), nn.Dropout(0.2)
            self.act = Part(lambda x: torch.log(x))  # origin

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.drop(self.body(x)) + x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    x = rows() + 50.0
    x[6] = 0.3
    return program(Model(), x)


@fault("forward", Truth(ops=("log",), modules=("experts.1",), samples=(2,)))
def one_of_several_experts() -> Program:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = linear()

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(self.body(x).square())  # origin

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Expert() for _ in range(3))

        def forward(self, x: Tensor, way: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                chosen = (way == i).nonzero().squeeze(1)
                out = out.index_copy(0, chosen, expert(x[chosen]))
            return out

    return program(Model(), (rows(_2=0.0), torch.tensor([0, 1, 1, 2, 0, 2, 1, 0])))


@fault("forward", Truth(ops=("log",), modules=("inner.head",), samples=(4,)))
def compiled_part_of_a_model() -> Program:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = linear(), Part(lambda x: x.square().log())  # origin

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.inner.compile(backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    return program(Model(), rows(_4=0.0))


# -- backward ----------------------------------------------------------------------------------------------------------


@fault("backward", Truth(ops=("div",), modules=("own",), phase="backward", causes=("op",), samples=(3,)))
def division_in_an_own_backward() -> Program:
    class Squash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.abs()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return grad * x / x.abs()  # origin

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Squash.apply(x)

    return program(chain(body=linear(), own=Own()), rows(_3=0.0), lambda out: out.mean())


@fault("backward", Truth(ops=("pow",), modules=("gamma",), phase="backward", reasons=("pow-at-zero",), samples=(7,)))
def gamma_correction_at_zero() -> Program:
    model = chain(body=linear(), gamma=Part(lambda x: x.abs() ** (1 / 2.2)))  # origin
    return program(model, rows(_7=0.0), lambda out: out.mean())


@fault("backward", Truth(ops=("_linalg_eigh",), modules=("whiten",), phase="backward"))
def eigenvectors_of_equal_eigenvalues() -> Program:
    class Whiten(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            _, vectors = torch.linalg.eigh(x.T @ x)  # origin
            return x @ vectors

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.whiten = nn.Parameter(torch.ones(())), Whiten()

        def forward(self, x: Tensor) -> Tensor:
            return self.whiten(x * self.scale)

    return program(Model(), torch.eye(4), lambda out: out[:, 0].square().sum() + out.sum())


@fault("backward", Truth(ops=("sqrt",), causes=("loss", "op"), phase="backward", samples=(2, 6)))
def gradient_penalty_of_a_flat_sample() -> Program:
    model = chain(body=nn.Linear(4, 8), act=nn.ReLU(), head=nn.Linear(8, 1, bias=False))
    with torch.no_grad():
        model.body.bias.zero_()

    def step(batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = (slope.square().sum(1).sqrt() - 1).square().mean()  # origin
        loss.backward()
        return loss

    return Program(model=model, batch=rows(_2=0.0, _6=0.0), step=step)


# -- loss --------------------------------------------------------------------------------------------------------------


@fault("loss", Truth(ops=("log", "div"), causes=("loss", "op"), samples=(1,)))
def likelihood_of_a_normal_with_a_scale_of_zero() -> Program:
    model = chain(body=linear(4, 2))

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        mean, scale = model(batch[0]).unbind(1)
        chance = torch.distributions.Normal(mean, scale.abs(), validate_args=False)
        loss = -chance.log_prob(batch[1]).mean()  # origin
        loss.backward()
        return loss

    return Program(model=model, batch=(rows(_1=0.0), torch.ones(8)), step=step)


@fault("loss", Truth(ops=("log",), causes=("loss", "op"), samples=(4,)))
def divergence_of_probabilities_by_hand() -> Program:
    model = chain(body=linear())

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, wanted = batch
        given = model(x).softmax(1)
        loss = (wanted * (wanted.log() - given.log())).sum(1).mean()  # origin
        loss.backward()
        return loss

    wanted = torch.full((8, 4), 0.25)
    wanted[4] = torch.tensor([0.5, 0.5, 0.0, 0.0])
    return Program(model=model, batch=(rows(), wanted), step=step)


@fault("loss", Truth(ops=("div",), causes=("loss", "op"), samples=(2, 5)))
def dice_of_empty_masks() -> Program:
    model = chain(body=nn.Conv2d(1, 1, 1, bias=False), act=nn.ReLU())

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        p = model(x).flatten(1)
        t = y.flatten(1)
        dice = 2 * (p * t).sum(1) / (p.sum(1) + t.sum(1))  # origin
        loss = 1 - dice.mean()
        loss.backward()
        return loss

    x, y = rows(36, 4).reshape(9, 1, 4, 4), torch.ones(9, 1, 4, 4)
    with torch.no_grad():
        model.body.weight.fill_(1.0)
    x[2] = x[5] = 0.0
    y[2] = y[5] = 0.0
    return Program(model=model, batch=(x, y), step=step)


@fault("loss", Truth(ops=("masked_fill",), causes=("loss", "op"), reasons=("mask-reached-loss",), samples=(3,)))
def target_class_that_is_masked() -> Program:
    model = chain(body=linear(4, 5))

    def step(batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"]).masked_fill(~batch["allowed"], -math.inf)  # origin
        picked = scores.log_softmax(1).gather(1, batch["y"][:, None])
        loss = -picked.mean()
        loss.backward()
        return loss

    allowed = torch.ones(8, 5, dtype=torch.bool)
    allowed[3, 2] = False
    y = torch.tensor([0, 1, 2, 2, 3, 4, 0, 1])
    return Program(model=model, batch={"x": rows(), "allowed": allowed, "y": y}, step=step)


# -- data, and the layouts of batches ----------------------------------------------------------------------------------


@dataclass
class Sampled:
    """A batch as a dataclass, with the numbers of its samples."""

    features: Tensor
    target: Tensor
    index: Tensor


@fault("data", Truth(causes=("input",), subjects=("batch.features", "the input"), samples=(5,)))
def a_dataclass_with_a_bad_row() -> Program:
    model = chain(body=linear(), head=linear(4, 1))

    def step(batch: Sampled) -> Tensor:
        loss = F.mse_loss(model(batch.features).squeeze(1), batch.target)
        loss.backward()
        return loss

    x = rows()
    x[5, 2] = math.inf
    return Program(model=model, batch=Sampled(x, torch.ones(8), torch.arange(40, 48)), step=step)


@fault("data", Truth(causes=("input",), samples=(6,)))
def a_bad_target_in_nested_tuples() -> Program:
    model = chain(body=linear(), head=linear(4, 1))

    def step(batch: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        (x, weight), (y, _) = batch
        loss = (F.huber_loss(model(x).squeeze(1), y, reduction="none") * weight).mean()
        loss.backward()
        return loss

    y = torch.ones(8)
    y[6] = math.nan
    return Program(model=model, batch=((rows(), torch.ones(8)), (y, torch.arange(8))), step=step)


@fault(
    "data", Truth(causes=("input",), subjects=("batch[2]", "the input", "batch[2][0]"), samples=(9,), micro=(2, (1,)))
)
def the_third_micro_batch_is_bad() -> Program:
    model = chain(body=linear(), head=linear(4, 1))

    def step(batch: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for part in batch:
            loss = model(part).square().mean() / len(batch)
            loss.backward()
            total = total + loss.detach()
        return total

    parts = [rows(4) for _ in range(4)]
    parts[2][1] = math.nan
    return Program(model=model, batch=parts, step=step)


# -- parameters and buffers --------------------------------------------------------------------------------------------


@fault("parameter", Truth(causes=("parameter",), subjects=("embed.weight",), modules=("embed",), samples=(1, 4)))
def a_bad_row_of_an_embedding() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 4), linear(4, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids).mean(1))

    model = Model()
    with torch.no_grad():
        model.embed.weight[13] = math.nan
    ids = torch.arange(24).reshape(8, 3) % 10
    ids[1, 0] = ids[4, 2] = 13
    return program(model, ids)


@fault("buffer", Truth(causes=("parameter",), subjects=("norm.running_var",), modules=("norm",)))
def a_bad_running_variance_in_eval_mode() -> Program:
    model = chain(body=linear(), norm=nn.BatchNorm1d(4), head=linear())
    model.norm.eval()
    with torch.no_grad():
        model.norm.running_var[2] = math.nan
    return program(model, rows())


# -- dtype -------------------------------------------------------------------------------------------------------------


@fault("dtype", Truth(ops=("addmm", "mm", "linear"), modules=("wide",), causes=("overflow",), samples=(3,)))
def autocast_fp16_overflows_in_a_linear_layer() -> Program:
    model = chain(body=linear(weight=1.0), wide=linear(weight=30.0), act=nn.ReLU())

    def step(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            loss = model(batch).float().mean()
        loss.backward()
        return loss

    return Program(model=model, batch=rows(_3=300.0), step=step)


@fault(
    "dtype",
    Truth(
        ops=("exp",),
        modules=("scale",),
        reasons=("exp-overflow", "dtype-overflow"),
        causes=("op", "overflow"),
        samples=(0,),
    ),
)
def autocast_bf16_exp_overflows() -> Program:
    model = chain(body=linear(weight=1.0), scale=Part(lambda x: x.exp()), head=linear())  # origin

    def step(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch).float().mean()
        loss.backward()
        return loss

    return Program(model=model, batch=rows(_0=40.0), step=step)


# -- healthy -----------------------------------------------------------------------------------------------------------


@healthy()
def weights_of_an_average_that_begin_at_zero() -> Program:
    model = chain(body=linear())
    average = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def step(batch: Tensor) -> Tensor:
        loss = square_mean(model(batch))
        loss.backward()
        for name, p in model.named_parameters():
            average[name].mul_(0.9).add_(p.detach(), alpha=0.1)
        return loss

    return Program(model=model, batch=rows(), step=step)


@healthy()
def rows_without_data_that_are_left_out() -> Program:
    model = chain(body=linear())

    def step(batch: dict[str, Tensor]) -> Tensor:
        x = torch.nan_to_num(batch["x"])
        loss = square_mean(model(x)[batch["known"]])
        loss.backward()
        return loss

    x = rows()
    x[2] = math.nan
    known = torch.ones(8, dtype=torch.bool)
    known[2] = False
    return Program(model=model, batch={"x": x, "known": known}, step=step)


# -- ways to make a step -----------------------------------------------------------------------------------------------


@fault("loss", Truth(ops=("div",), causes=("loss", "op"), reasons=("zero-norm", "zero-by-zero"), samples=(2,)))
def two_calls_of_one_model_in_one_loss() -> Program:
    model = chain(body=linear(), head=linear())

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        left, right = (model(x) for x in batch)
        left = left / left.norm(dim=1, keepdim=True)  # origin
        right = right / (right.norm(dim=1, keepdim=True) + 1e-8)
        loss = 1 - (left * right).sum(1).mean()
        loss.backward()
        return loss

    return Program(model=model, batch=(rows(_2=0.0), rows()), step=step)


@fault("forward", Truth(ops=("log",), modules=("teacher", "teacher.head"), samples=(3,)))
def a_frozen_teacher_inside_the_model() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = linear()
            self.teacher = chain(body=linear(), head=Part(lambda x: x.square().log()))  # origin
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = self.teacher(x)
            return (self.student(x) - wanted).square().mean(1)

    return program(Model(), rows(_3=0.0), lambda out: out.mean())


@fault("forward", Truth(ops=("log",), modules=("head",), samples=(5,)))
def shuffled_inside_the_model() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = linear(), Part(lambda x: x.square().log())  # origin

        def forward(self, x: Tensor) -> Tensor:
            order = torch.tensor([3, 1, 4, 0, 5, 2, 7, 6])
            return self.head(self.body(x)[order])

    return program(Model(), rows(_5=0.0))


@fault("forward", Truth(ops=("div",), modules=("mix",)))
def several_rows_per_sample_by_an_index() -> Program:
    class Mix(nn.Module):
        def forward(self, x: Tensor, graph: Tensor, num: int) -> Tensor:
            total = torch.zeros(num, x.shape[1]).index_add(0, graph, x)
            return total / torch.bincount(graph, minlength=num)[:, None]  # origin

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.mix = linear(), Mix()

        def forward(self, nodes: Tensor, graph: Tensor, targets: Tensor) -> Tensor:
            return self.mix(self.body(nodes), graph, len(targets)).mean(1) - targets

    graph = torch.tensor([0, 0, 0, 2, 2, 3, 3, 3, 3])
    return program(Model(), (rows(9), graph, torch.ones(4)))


@fault(
    "backward", Truth(ops=("sqrt",), modules=("distance",), phase="backward", reasons=("sqrt-at-zero",), samples=(4,))
)
def closure_of_lbfgs() -> Program:
    model = chain(body=linear(), distance=Part(lambda x: x.square().sum(1).sqrt()))  # origin
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def step(batch: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(batch).mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Program(model=model, batch=rows(_4=0.0), step=step, optimizer=optimizer)


@fault(
    "forward",
    Truth(
        ops=("exp",),
        modules=("flow",),
        causes=("op", "overflow"),
        reasons=("exp-overflow", "dtype-overflow"),
        samples=(7,),
    ),
)
def a_list_of_tensors_of_different_lengths() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.flow = linear(weight=1.0), Part(lambda x: x.exp())  # origin

        def forward(self, parts: list[Tensor]) -> Tensor:
            return torch.stack([self.flow(self.body(part)).mean() for part in parts])

    parts = [rows(i + 1) for i in range(8)]
    parts[7] = parts[7] + 60.0

    model = Model()

    def step(batch: list[Tensor]) -> Tensor:
        loss = model(batch).mean()
        loss.backward()
        return loss

    return Program(model=model, batch=parts, step=step)


@fault("loss", Truth(ops=("binary_cross_entropy", "log"), causes=("loss", "op", "input"), samples=(2,)))
def label_smoothing_beyond_one() -> Program:
    model = chain(body=linear(4, 1))

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        p = model(batch[0]).squeeze(1).sigmoid()
        y = batch[1] * 1.1 - 0.05
        loss = -(p.log() * y + (1 - p).log() * (1 - y)).mean()  # origin
        loss.backward()
        return loss

    with torch.no_grad():
        model.body.weight.fill_(1.0)
    return Program(model=model, batch=(rows(_2=200.0), torch.ones(8)), step=step)


@fault("parameter", Truth(causes=("parameter",), subjects=("log_scale",), modules=("",)))
def a_single_number_as_parameter() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.log_scale = linear(), nn.Parameter(torch.tensor(math.inf))

        def forward(self, x: Tensor) -> Tensor:
            return F.normalize(self.body(x), dim=1) * self.log_scale.exp()

    return program(Model(), rows())


@fault("optimizer", Truth(phase="optimizer", causes=("optimizer",), subjects=("body.weight",)))
def a_learning_rate_far_too_large() -> Program:
    model = chain(body=linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    return program(model, rows(), lambda out: 1e3 * out.square().sum(), optimizer=optimizer)


@fault(
    "forward",
    Truth(
        ops=(
            "_native_batch_norm_legit",
            "native_batch_norm",
            "cudnn_batch_norm",
            "sub",
            "div",
            "mean",
            "var",
            "rsqrt",
            "sqrt",
            "std",
        ),
        modules=("norm",),
        samples=None,
    ),
)
def batch_statistics_by_hand_over_one_sample() -> Program:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) * torch.rsqrt(x.var(0))  # origin

    return program(chain(body=linear(), norm=Norm()), rows(1))


@healthy()
def a_loss_of_minus_infinity_that_is_clamped() -> Program:
    def loss(out: Tensor) -> Tensor:
        return out.detach().abs().sum(1).log().clamp_min(-20).mean() + square_mean(out)

    return program(chain(body=linear()), rows(_2=0.0), loss)
