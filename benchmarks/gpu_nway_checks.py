"""The N-way losses on a GPU are right: errors against float64, no host wait, equal bits, bad values that come through.

Used by `gpu_nway.py`, which prints what this finds before it measures anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from trimtab.losses import nway_loss
from trimtab.losses.dispatch import module_of
from trimtab.losses.problem import Problem, make_problem

DEVICE = torch.device("cuda")
WIDTH = 512


def rows(n: int, b: int, d: int = WIDTH, *, seed: int = 0) -> list[Tensor]:
    """Modalities that agree in part, rows of length 1."""
    draw = torch.Generator(DEVICE).manual_seed(seed)
    common = torch.randn(b, d, generator=draw, device=DEVICE)
    xs = (common + torch.randn(b, d, generator=draw, device=DEVICE) for _ in range(n))
    return [nn.functional.normalize(x, dim=-1).requires_grad_() for x in xs]


def errors(backend: str, problem: Callable[[Sequence[Tensor], Tensor], Problem], xs: Sequence[Tensor], c: float) -> str:
    """Value, gradient and gradient of the scale of one backend against the materialised float64 problem."""
    n, b = len(xs), xs[0].shape[0]
    g = torch.randn(n, b, device=DEVICE)

    def run(name: str, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in xs]
        scale = torch.tensor(c, device=DEVICE, dtype=dtype, requires_grad=True)
        prepared = problem(leaves, scale)
        prepared = replace(prepared, precision="ieee") if dtype == torch.float64 else prepared
        value = module_of(name).reduce_tuples(prepared, "lse")
        total = (torch.where(value == -torch.inf, 0.0, value) * g).sum()
        return value.detach().double(), [x.double() for x in torch.autograd.grad(total, [*leaves, scale])]

    (value, mine), (want, true) = run(backend, torch.float32), run("materialize", torch.float64)
    there = torch.isfinite(want)
    if not torch.equal(torch.isfinite(value), there):
        return "NOT FINITE where the definition is"
    off = float((value - want)[there].abs().max() / want[there].abs().max())
    flat = [torch.cat([x.flatten() for x in grads[:-1]]) for grads in (mine, true)]
    grad = float((flat[0] - flat[1]).norm() / flat[1].norm())
    return f"{off:.1e} | {grad:.1e} | {float((mine[-1] - true[-1]).abs() / true[-1].abs()):.1e}"


def correctness() -> Iterator[str]:
    """Every backend, precision and kind of input."""
    yield "## Errors against float64\n"
    yield "| backend | problem | precision | value | gradient | d scale |"
    yield "|---|---|---|---|---|---|"
    cases: list[tuple[str, str, int, int, float, str]] = []
    for precision in ("bf16", "tf32", "ieee"):
        cases += [("triton_stream", "mip", 6, 8, 0.1, precision), ("triton_stream", "mip", 2, 1000, 20.0, precision)]
        cases += [("contract", "paircos", 6, 8, 20.0, precision), ("contract", "paircos", 3, 100, 20.0, precision)]
        cases += [("stream", "mip", 6, 8, 0.1, precision)]
    cases += [("triton_stream", "mip", 3, 50, 0.5, "bf16"), ("triton_stream", "mip", 5, 11, 0.2, "bf16")]
    cases += [("triton_stream", name, 3, 40, 10.0, "ieee") for name in ("norm", "sqnorm", "paircos", "dist2")]
    cases += [("triton_stream", "mip", 2, 1000, 1000.0, "ieee"), ("triton_stream", "mip", 6, 8, 50.0, "ieee")]
    cases += [("triton_gram", "norm", n, b, 10.0, "ieee") for n, b in ((4, 20), (5, 12), (6, 9))]
    cases += [("triton_gram", "norm", 6, 8, 1000.0, "ieee"), ("gram", "norm", 6, 8, 10.0, "ieee")]
    for backend, name, n, b, c, precision in cases:
        for what in ("", "masked", "zero rows"):
            if what and (precision == "tf32" or c >= 50 or b == 1000 or name in ("sqnorm", "dist2")):
                continue
            xs = rows(n, b)
            mask = torch.rand(n, b, device=DEVICE) > 0.2 if what == "masked" else None
            if what == "zero rows":
                with torch.no_grad():
                    xs[0][1], xs[1][1] = 0.0, 0.0

            def problem(
                leaves: Sequence[Tensor],
                scale: Tensor,
                name: str = name,
                mask: Tensor | None = mask,
                precision: str = precision,
            ) -> Problem:
                return replace(make_problem(leaves, name, logit_scale=scale, mask=mask), precision=precision)

            found = errors(backend, problem, xs, c)
            yield f"| {backend} | {name} N={n} B={b} scale {c:g}{what and ' ' + what} | {precision} | {found} |"
    yield ""


def behaviour() -> Iterator[str]:
    """No host wait, equal bits, and bad values that come through."""
    yield "## Behaviour\n"
    for backend, name, n, b in (("triton_stream", "mip", 4, 30), ("triton_gram", "norm", 4, 30)):
        module = module_of(backend)
        xs = rows(n, b)
        problem = replace(make_problem(xs, name, logit_scale=torch.tensor(1.0, device=DEVICE)), precision="bf16")
        module.reduce_tuples(problem, "lse").sum().backward(retain_graph=True)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            first = module.reduce_tuples(problem, "lse")
            grads = torch.autograd.grad(first.sum(), xs, retain_graph=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        second = module.reduce_tuples(problem, "lse")
        again = torch.autograd.grad(second.sum(), xs)
        same = torch.equal(first, second) and all(torch.equal(p, q) for p, q in zip(grads, again, strict=True))
        with torch.no_grad():
            xs[0][2, 1] = float("nan")
        bad = module.reduce_tuples(make_problem(xs, name, logit_scale=1.0), "lse")
        seen = int((~torch.isfinite(bad)).sum())
        yield f"- {backend}: forward and backward without a host wait; equal bits twice: {same};"
        yield f"  one NaN makes {seen} of {n * b} anchors non-finite (those that can see it: {n * b - b + 1})."
    xs, grads = rows(2, 4096), []
    for turn in range(3):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if turn else "default")  # the first time compiles
        try:
            loss = nway_loss(xs, similarity="mip", normalize="l2", objective="full", backend="triton", precision="bf16")
            grads.append(torch.autograd.grad(loss, xs))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    same = all(torch.equal(p, q) for p, q in zip(grads[1], grads[2], strict=True))
    yield f"- nway_loss of two modalities: a whole step without a host wait; equal bits twice: {same}."
    yield ""
