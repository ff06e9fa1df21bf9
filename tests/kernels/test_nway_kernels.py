"""The kernels of the N-way losses in Triton's interpreter, against the definition in float64; and compiled."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
    # The interpreter must be chosen before triton is imported, so the real tests run in a process of their own.
    missing = pytest.mark.skipif(
        find_spec("triton") is None and "triton" not in os.environ.get("TRIMTAB_REQUIRE", ""),
        reason="needs triton: pip install triton",
    )

    @missing
    def test_kernels_in_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
        done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

    @missing
    @pytest.mark.parametrize(("precision", "long"), [("bf16", False), ("bf16", True), ("tf32", False)])
    @pytest.mark.parametrize("kernel", ["forward", "weights"])
    def test_kernels_compile_and_fit_a_multiprocessor(
        kernel: str, precision: Any, long: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The interpreter accepts what the compiler does not, and most of the speed rests on two programs side by side.
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from trimtab.losses.triton import stream_kernels
        from trimtab.losses.triton.stream_launcher import HOPPER, HOPPER_LONG, TILES

        tiles = HOPPER_LONG[kernel, precision] if long else HOPPER.get((kernel, precision), TILES[kernel, precision])
        dtype = {"bf16": "bf16", "tf32": "fp32"}[precision]
        constants: dict[str, Any] = {"D": 512, "ADD": False, "ROOT": False, "MASKED": False}
        constants |= {"PRECISION": "tf32", "FLAT": tiles.flat, "BM": tiles.bm, "BN": tiles.bn, "BK": tiles.bk}
        constants |= {"row_keep": None, "column_keep": None}
        if kernel == "forward":
            function, extra = stream_kernels.forward_tiles, {"WARPS": tiles.warps, "FAST": True}
        else:
            function, extra = stream_kernels.weight_tiles, {"PARTS": tiles.parts}
        constants |= extra
        kinds = {
            "x_rows": f"tensordesc<{dtype}[{tiles.bm}, {tiles.bk}]>",
            "y_rows": f"tensordesc<{dtype}[{tiles.bn}, {tiles.bk}]>",
            "weights": f"tensordesc<{dtype}[{tiles.bm}, {tiles.bn // tiles.parts}]>",
        }
        whole = ("num_rows", "num_columns", "begin_row", "P", "begin_column", "Q", "shift", "SL", "SR")
        whole += ("num_blocks", "num_strips", "strip", "group")
        kinds |= dict.fromkeys(whole, "i32") | dict.fromkeys(constants, "constexpr")
        names = function.arg_names
        source = ASTSource(
            fn=function,
            signature={name: kinds.get(name, "*fp32") for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
        )
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert tiles.beside * (made.metadata.shared + 1024) <= 228 * 1024
        assert ("tf32.tf32" if precision == "tf32" else "bf16.bf16") in made.asm["ptx"]  # on the matrix units

else:
    from tests.losses.negatives import close, compare, cotangent, gradients, inputs
    from trimtab.losses.backends import dense
    from trimtab.losses.problem import Kind, Problem, make_problem
    from trimtab.losses.triton import gram_launcher, row_kernels, row_launcher, stream_launcher
    from trimtab.losses.tuple_reduction import lse, outer

    # The interpreter computes with numpy, which warns where a kernel is meant to overflow or takes the log of nothing.
    pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

    @pytest.fixture(autouse=True)
    def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
        """Several tiles, strips, blocks and launches of everything at sizes the interpreter can do."""
        tiles = stream_launcher.Tiles(bm=32, bn=16, bk=64, warps=2, stages=1, strip=2, parts=2)
        monkeypatch.setattr(stream_launcher, "TILES", dict.fromkeys(stream_launcher.TILES, tiles))
        monkeypatch.setattr(stream_launcher, "BLOCKS", ((256, 512), (256, 256)))
        monkeypatch.setattr(stream_launcher, "LARGE", 2**12)
        monkeypatch.setattr(stream_launcher, "PARTS_BYTES", 2**9)
        monkeypatch.setattr(stream_launcher, "PROGRAMS", 4)
        monkeypatch.setattr(stream_launcher, "GROUP", 3)
        monkeypatch.setattr(gram_launcher, "TILES", (512, 256))
        monkeypatch.setattr(gram_launcher, "PROGRAMS", 4)

    def problem(xs: tuple[Tensor, ...], similarity: str, scale: float = 2.0, **more: Any) -> Problem:
        return Problem(xs=xs, similarity=similarity, scale=torch.tensor(scale), **more)

    def single(n: int, b: int, d: int = 6) -> tuple[Tensor, ...]:
        return inputs(n, b, d, dtype=torch.float32)

    STREAM = [("mip", 2, 33), ("mip", 3, 5), ("mip", 4, 5), ("mip", 5, 3), ("mip", 6, 3), ("norm", 2, 19)]
    STREAM += [("norm", 3, 4), ("sqnorm", 4, 3), ("paircos", 3, 5), ("dist2", 5, 2)]
    GRAM = [("norm", 4, 5), ("norm", 5, 3), ("norm", 6, 3), ("norm", 7, 2), ("sqnorm", 4, 3), ("paircos", 5, 2)]
    GRAM += [("dist2", 4, 4)]

    @pytest.mark.parametrize(("similarity", "n", "b"), STREAM)
    def test_stream_is_the_definition(similarity: str, n: int, b: int) -> None:
        compare(stream_launcher.reduce_tuples, single(n, b), similarity, "lse", tolerance=3e-5)

    @pytest.mark.parametrize(("similarity", "n", "b"), GRAM)
    def test_gram_is_the_definition(similarity: str, n: int, b: int) -> None:
        compare(gram_launcher.reduce_tuples, single(n, b), similarity, "lse", tolerance=3e-5)

    def test_gram_without_a_partly_filled_tile(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gram_launcher, "TILES", (4096, 2048))
        compare(gram_launcher.reduce_tuples, single(4, 16), "norm", "lse", tolerance=3e-5)

    @pytest.mark.parametrize("scale", [1e-2, 40.0, 1e3])
    def test_any_scale(scale: float) -> None:
        # Gradients of sharp softmaxes follow the logits' own rounding, which grows with the scale: logits of 400 are
        # rounded by 3e-5, and processors add up in different orders.
        tolerance = 1e-5 * max(1.0, scale / 2)
        compare(stream_launcher.reduce_tuples, single(4, 3), "mip", "lse", scale=scale, tolerance=tolerance)
        compare(stream_launcher.reduce_tuples, single(3, 4), "norm", "lse", scale=scale, tolerance=tolerance)
        compare(gram_launcher.reduce_tuples, single(4, 3), "norm", "lse", scale=scale, tolerance=tolerance)

    def test_a_wide_row_and_rows_longer_than_one_tile() -> None:
        compare(stream_launcher.reduce_tuples, single(3, 4, 70), "mip", "lse", tolerance=1e-5)

    def test_absent_entries() -> None:
        present = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
        compare(stream_launcher.reduce_tuples, single(4, 4), "mip", "lse", present=present, tolerance=3e-5)
        compare(stream_launcher.reduce_tuples, single(4, 4), "dist2", "lse", present=present, tolerance=3e-5)
        compare(gram_launcher.reduce_tuples, single(4, 4), "norm", "lse", present=present, tolerance=3e-5)
        only = torch.tensor([[1, 0, 0], [1, 0, 0]], dtype=torch.bool)  # no negative at all
        nothing = stream_launcher.reduce_tuples(problem(single(2, 3), "mip", present=only), "lse")
        assert torch.equal(nothing, torch.full((2, 3), -math.inf))

    @pytest.mark.parametrize(
        ("backend", "similarity", "n", "parts"), [(stream_launcher, "mip", 3, 5), (gram_launcher, "norm", 4, 2)]
    )
    def test_shares_are_a_partition(backend: Any, similarity: str, n: int, parts: int) -> None:
        def reduce(whole: Problem, kind: Kind) -> Tensor:
            shares = [replace(whole, share=(k, parts)) for k in range(parts)]
            return lse(torch.stack([backend.reduce_tuples(share, kind) for share in shares]), 0)

        compare(reduce, single(n, 3), similarity, "lse", tolerance=3e-5)

    @pytest.mark.parametrize("backend", [stream_launcher, gram_launcher])
    def test_zero_rows_and_opposite_rows(backend: Any) -> None:
        xs = [x.detach().clone() for x in single(4, 3)]
        xs[0][1] = 0.0
        xs[2][0], xs[1][0] = -xs[0][0], -xs[3][0]  # a sum of exactly nothing, where the root has no slope
        leaves = tuple(x.requires_grad_() for x in xs)
        value = backend.reduce_tuples(problem(leaves, "norm"), "lse")
        assert torch.isfinite(value).all()
        assert all(torch.isfinite(g).all() for g in gradients(value, cotangent(4, 3), leaves))
        zero = tuple(torch.zeros(3, 6, requires_grad=True) for _ in range(4))
        value = backend.reduce_tuples(problem(zero, "norm"), "lse")
        close(value, torch.full((4, 3), math.log(26.0), dtype=torch.float64), 1e-6)
        assert all(torch.equal(g, torch.zeros(3, 6)) for g in gradients(value, cotangent(4, 3), zero))
        if backend is stream_launcher:
            compare(backend.reduce_tuples, leaves, "mip", "lse", tolerance=1e-5)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_bad_values_come_through(bad: float) -> None:
        for backend, similarity in ((stream_launcher, "mip"), (stream_launcher, "norm"), (gram_launcher, "norm")):
            xs = [x.detach().clone() for x in single(4, 3)]
            xs[0][2, 1] = bad
            value = backend.reduce_tuples(problem(tuple(xs), similarity), "lse")
            seen = torch.ones(4, 3, dtype=torch.bool)
            seen[0, :2] = False  # the only anchors whose tuples never use the bad row
            assert torch.equal(~torch.isfinite(value), seen), (similarity, value)

    @pytest.mark.parametrize("similarity", ["mip", "norm"])
    def test_a_factor_of_nothing(similarity: str) -> None:
        # The weights have the factor inside, and the gradient of the factor is found by taking it out again.
        xs, scale = single(3, 4), torch.zeros((), requires_grad=True)
        value = stream_launcher.reduce_tuples(Problem(xs=xs, similarity=similarity, scale=scale), "lse")
        found = torch.autograd.grad((value * cotangent(3, 4)).sum(), [*xs, scale])
        wide, one = [x.detach().double().requires_grad_() for x in xs], torch.zeros((), dtype=torch.float64)
        whole = Problem(xs=tuple(wide), similarity=similarity, scale=one.requires_grad_())
        want = torch.autograd.grad((dense.reduce_tuples(whole, "lse") * cotangent(3, 4)).sum(), [*wide, one])
        close(found[-1], want[-1], 1e-5)
        assert all(float(g.abs().max()) < 1e-15 for g in found[:-1])

    @pytest.mark.parametrize(("n", "b"), [(2, 33), (5, 3), (6, 3)])
    def test_tf32_is_the_definition_up_to_its_rounding(n: int, b: int) -> None:
        def reduce(whole: Problem, kind: Kind) -> Tensor:
            return stream_launcher.reduce_tuples(replace(whole, precision="tf32"), kind)

        compare(reduce, single(n, b), "mip", "lse", tolerance=3e-3)

    @pytest.mark.parametrize("first", [True, False])
    def test_partial_sums_are_merged(first: bool) -> None:
        parts = torch.randn(70, 100) * 40
        parts[:, 3], parts[5, 4], parts[:, 5] = -math.inf, math.nan, -1e4
        out = torch.full((100,), 7.0 if not first else math.nan)
        row_kernels.merge_partials[(2,)](parts, out, 70, 100, TALL=32, BLOCK=64, FIRST=first)
        every = parts if first else torch.cat([parts, torch.full((1, 100), 7.0)])
        want = torch.logsumexp(every.double() * math.log(2), 0) / math.log(2)
        assert torch.allclose(out.double(), want, rtol=1e-5, equal_nan=True)

    def test_every_tile_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
        # Groups of blocks that do not divide evenly, strips that do not either.
        for group, together in ((3, 50), (100, 1)):
            monkeypatch.setattr(stream_launcher, "GROUP", group)
            monkeypatch.setattr(stream_launcher, "PROGRAMS", together)
            compare(stream_launcher.reduce_tuples, single(2, 50), "mip", "lse", tolerance=3e-5)

    @pytest.mark.parametrize("apart", [True, False])
    @pytest.mark.parametrize("how", ["l2", "rms"])
    def test_unit_rows_are_those_of_plain_operations(how: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(row_launcher, "APART", 0 if apart else 2**20)
        xs = [torch.randn(9, 70) * size for size in (1e-30, 1.0, 1e30)]
        xs[1] = xs[1].bfloat16()
        xs[2] = torch.randn(70, 9).T  # columns side by side
        xs[0][2], xs[1][3], xs[2][4] = 0.0, math.nan, math.inf
        present = torch.ones(3, 9, dtype=torch.bool)
        present[1, 3], present[0, 0] = False, False  # the NaN is of a row that is not there
        leaves, others = ([x.clone().requires_grad_() for x in xs] for _ in range(2))
        mine = row_launcher.unit_rows(leaves, how, present)
        theirs = make_problem(others, "mip", normalize=how, mask=present).xs
        weights = torch.randn(3, 9, 70)
        weights[2, 4] = 0.0
        for got, want in zip(mine, theirs, strict=True):
            assert got.dtype == torch.float32
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-7, equal_nan=True)
        for out in (mine, theirs):
            sum((x * w).nan_to_num().sum() for x, w in zip(out, weights, strict=True)).backward()
        for got, want in zip(leaves, others, strict=True):
            assert got.grad.dtype == got.dtype
            size = want.grad.nan_to_num().abs().max()
            near = 2**-7 if got.dtype == torch.bfloat16 else 1e-5  # the interpreter cuts off
            assert torch.allclose(got.grad / size, want.grad / size, rtol=near, atol=near, equal_nan=True)

    def test_unit_rows_of_one_modality_alone_in_the_gradient() -> None:
        xs = [torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)]
        first, _ = row_launcher.unit_rows(xs, "l2", None)
        g = torch.randn(4, 6)
        (found,) = torch.autograd.grad((first * g).sum(), xs[0])
        (want,) = torch.autograd.grad((torch.nn.functional.normalize(xs[0], dim=-1) * g).sum(), xs[0])
        assert torch.allclose(found, want, atol=1e-6)
        assert not row_launcher.supports_unit_rows(xs, torch.float32)  # no card

    def test_unit_rows_where_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
        xs = [torch.randn(4, 6), torch.randn(4, 6)]
        monkeypatch.setattr(stream_launcher, "available", lambda device: True)
        row_launcher._runs.cache_clear()
        assert row_launcher.supports_unit_rows(xs, torch.float32)
        assert not row_launcher.supports_unit_rows(xs, torch.float64)
        row_launcher._runs.cache_clear()
        monkeypatch.setattr(row_launcher, "unit_rows", lambda *_: 1 // 0)  # no compiler on that machine, say
        assert not row_launcher.supports_unit_rows(xs, torch.float32)
        row_launcher._runs.cache_clear()

    def test_rows_that_lie_together_are_not_copied() -> None:
        rows = torch.randn(3, 4, 64)
        form = row_launcher.form_of("mip", 6)
        views = rows.unbind(0)
        assert row_launcher.build(views, None, form, (0, 64)).parts.data_ptr() == rows.data_ptr()
        for apart in (views[::-1], [rows[0], rows[0], rows[0]], [x.T.contiguous().T for x in views]):
            parts = row_launcher.build(apart, None, form, (0, 64)).parts
            assert torch.equal(parts, torch.stack(list(apart)))
            assert parts.data_ptr() != rows.data_ptr()

    def test_equal_inputs_give_equal_bits() -> None:
        xs = single(3, 5)
        first, second = (stream_launcher.reduce_tuples(problem(xs, "mip"), "lse") for _ in range(2))
        assert torch.equal(first, second)
        g = cotangent(3, 5)
        for mine, theirs in zip(gradients(first, g, xs), gradients(second, g, xs), strict=True):
            assert torch.equal(mine, theirs)

    def test_rows_are_rounded_once() -> None:
        xs = [x.detach() for x in single(3, 4, 70)]
        form = row_launcher.form_of("mip", 6)
        side = row_launcher.build(xs, None, form, (5, 50), "bf16")
        want = outer(xs, product=True)[5:50]
        assert torch.allclose(side.rows[:, :70].float(), want, rtol=2**-7, atol=0)  # the interpreter cuts off
        assert not side.rows[:, 70:].any()
        assert torch.allclose(side.squares, side.rows.float().square().sum(1))
        xs[0][0, 0] = math.nan
        near = row_launcher.build(xs[:1], None, form, (0, 4), "tf32").rows[:, :70]
        assert torch.equal(near.isnan(), xs[0].isnan())
        assert torch.allclose(near, xs[0], rtol=2**-11, atol=0, equal_nan=True)  # half a unit of the last of ten bits
        assert not (near.nan_to_num().view(torch.int32) & 0x1FFF).any()

    def test_what_the_kernels_leave_to_others() -> None:
        with pytest.raises(NotImplementedError, match="'sum' of 'mip'"):
            stream_launcher.reduce_tuples(problem(single(2, 3), "mip"), "sum")
        with pytest.raises(NotImplementedError, match="float64"):
            stream_launcher.reduce_tuples(problem(inputs(2, 3, 4), "mip"), "lse")
        for xs, similarity in ((single(3, 3), "norm"), (single(4, 3), "mip"), (inputs(4, 3, 4), "norm")):
            assert not gram_launcher.supports(problem(xs, similarity), "lse")
        with pytest.raises(NotImplementedError, match="'norm' over 3 x"):
            gram_launcher.reduce_tuples(problem(single(3, 3), "norm"), "lse")

    def test_determinism_is_kept_where_it_is_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert not gram_launcher.supports(problem(single(4, 3), "norm"), "lse")
        assert stream_launcher.supports(problem(single(4, 3), "norm"), "lse")

    def test_availability(monkeypatch: pytest.MonkeyPatch) -> None:
        assert not stream_launcher.available("cpu")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not stream_launcher.available("cuda")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert stream_launcher.available("cuda")
