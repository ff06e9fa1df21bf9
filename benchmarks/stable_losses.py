"""The four documented similarities, ours beside the documented formulas: time, memory, error, and what breaks them.

    python benchmarks/stable_losses.py

The documented formulas are written out below from their description, float32, with their eps and clamps. One thread;
CPU time, the ways take turns, the fastest of each counts. Kept: bytes that autograd holds for the backward pass. Error:
largest relative difference of the gradient from the same function in float64, on ordinary features. The last columns
give the largest gradient where a sample is all zeros, for orthonormal features, for features of 1e20, and for float16
with a zero row.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from trimtab.losses import get_stable_loss_function

EPS = 1e-8
SIZES = ((3, 16, 512), (4, 16, 512), (6, 6, 64))
REPEATS = 9
NAMES = {0: "einsum", 1: "norm", 2: "cosine", 3: "distance"}
Function = Callable[..., Tensor]


def unit(x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + EPS)


def product(xs: list[Tensor]) -> Tensor:
    """`[B^k, D]`: the products of one row of each."""
    out = xs[0]
    for x in xs[1:]:
        out = (out[:, None] * x).flatten(0, 1)
    return out


def documented(version: int) -> Function:
    """As described: normalised by the factory and again by the method; products in groups of three; hard clamps."""

    def call(*features: Tensor) -> Tensor:
        xs = [unit(unit(f)) for f in features]
        n, batch = len(xs), xs[0].shape[0]
        tuples = [x.reshape([1] * m + [batch] + [1] * (n - 1 - m) + [-1]) for m, x in enumerate(xs)]
        if version == 0:
            groups = [product(xs[k : k + 3]).clamp(-100, 100) for k in range(0, n, 3)]  # of three, [B^3, D] each
            out = groups[0].sum(-1) if len(groups) == 1 else groups[0] @ groups[1].T
            return out.reshape([batch] * n).clamp(-100, 100)
        if version == 1:
            total = torch.stack(torch.broadcast_tensors(*tuples)).sum(0)
            mean = unit(total)
            return torch.stack([(mean * x).sum(-1).clamp(-1, 1) for x in tuples]).sum(0)
        mean = torch.stack(xs).sum(0) / (n + EPS)
        if version == 2:
            cosines = torch.stack([x @ unit(mean).T for x in xs])
            return cosines.prod(0).abs().pow(1 / n).clamp(-100, 100)
        squares = torch.stack([(x[:, None] - mean[None]).square().sum(-1) for x in xs])
        return -(squares.abs() + EPS).sqrt().mean(0)

    return call


def features(n: int, batch: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(batch, width, generator=draw).to(dtype) for _ in range(n)]


def gradients(function: Function, xs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in xs]
    out = function(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), leaves))


def kept(function: Function, xs: list[Tensor]) -> int:
    """Bytes of the distinct storages that autograd keeps."""
    held: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    leaves = [x.clone().requires_grad_() for x in xs]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function(*leaves)
    return sum(held.values())


def error(function: Function, xs: list[Tensor]) -> float:
    pairs = zip(gradients(function, xs), gradients(function, [x.double() for x in xs]), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def worst(function: Function, xs: list[Tensor]) -> str:
    grads = torch.cat([g.double().flatten() for g in gradients(function, xs)])
    bad = int((~torch.isfinite(grads)).sum())
    return f"{float(grads.abs().max()):.2g}" if bad == 0 else f"{bad / grads.numel():.0%} NaN or Inf"


def spoiled() -> dict[str, list[Tensor]]:
    zero = features(3, 4, 12)
    for x in zero:
        x[1] = 0.0
    return {
        "zero row": zero,
        "orthonormal": list(torch.eye(12).split(4)),
        "1e20": [x * 1e20 for x in features(3, 4, 12)],
        "float16, zero row": [x.half() for x in zero],
    }


def timed(functions: dict[str, Function], xs: list[Tensor]) -> dict[str, float]:
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(REPEATS):
        for name, function in functions.items():
            start = time.process_time()
            gradients(function, xs)
            best[name] = min(best[name], time.process_time() - start)
    return best


def size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, CPU, one thread, float32; CPU ms of forward and backward, fastest of {REPEATS}\n"
    )
    functions = {
        f"v{v} {NAMES[v]}, {who}": function
        for v in NAMES
        for who, function in (("documented", documented(v)), ("ours", get_stable_loss_function(v)))
    }
    functions |= {f"v{v} {NAMES[v]}, ours, lines": get_stable_loss_function(v, form="line") for v in NAMES}
    functions = dict(sorted(functions.items()))
    heads = [f"N={n} B={b} D={d}" for n, b, d in SIZES]
    print("| | shape | " + " | ".join(f"{h}: ms | kept" for h in heads) + " |")
    print("|---|---|" + "---|---|" * len(SIZES))
    times = [timed(functions, features(*s)) for s in SIZES]
    for name, function in functions.items():
        shape = "[B]^N" if function(*features(3, 4, 8)).dim() == 3 else "[B, B]"
        memory = [size(kept(function, features(*s))) for s in SIZES]
        cells = [f"{t[name] * 1e3:.2f} | {m}" for t, m in zip(times, memory, strict=True)]
        print(f"| {name} | {shape} | " + " | ".join(cells) + " |")
    troubles = spoiled()
    print("\n| | gradient error | " + " | ".join(troubles) + " |")
    print("|---|---|" + "---|" * len(troubles))
    for name, function in functions.items():
        cells = [worst(function, xs) for xs in troubles.values()]
        print(f"| {name} | {error(function, features(3, 16, 512)):.1e} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
