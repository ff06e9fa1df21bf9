"""The Triton kernels in Triton's interpreter, against float64: every dtype, size, payload and alignment."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
    # The interpreter must be chosen before triton is imported, so the real tests run in a process of their own.
    needed = "triton" in os.environ.get("TRIMTAB_REQUIRE", "")

    @pytest.mark.skipif(find_spec("triton") is None and not needed, reason="needs triton: pip install triton")
    def test_kernels_in_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
        done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

else:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    from tests.sample.test_measure import check
    from trimtab.core.types import ABSENT, Column
    from trimtab.sample.measure import reference as measure
    from trimtab.sample.measure import triton_launch as measure_triton
    from trimtab.sample.measure.reference import DOTS, GLOBALS, Limits, Measured, Outgoing
    from trimtab.sample.measure.triton_launch import NUM_RING, Plan, flat_values
    from trimtab.sample.probes.batch import look_on_device
    from trimtab.sample.probes.sentinel import Products
    from trimtab.sample.transfer import Sent

    # The interpreter computes with numpy, which warns where a kernel is meant to overflow.
    pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

    @pytest.fixture(autouse=True, scope="module")
    def small_chunks() -> None:
        """Chunks of 256 elements: several chunks and tails without waiting for the interpreter."""
        for dtype in measure_triton._TUNED:
            measure_triton._TUNED[dtype] = (64, 4, 4)
        measure_triton.MAX_PLACES = 8

    def run(tensors: list[torch.Tensor], scale: torch.Tensor | None = None, **limits: Any) -> Measured:
        plan = Plan(tensors, None, len(tensors))
        return go(plan, tensors, scale, **limits)

    def go(plan: Plan, tensors: list[torch.Tensor], scale: torch.Tensor | None = None, **limits: Any) -> Measured:
        addresses = [t.data_ptr() for t in tensors]
        assert plan.takes(addresses)
        return plan.run(tensors, addresses, Limits(**limits), scale)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 255, 256, 257, 1000])
    def test_every_size(dtype: torch.dtype, size: int) -> None:
        tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        if size > 4:
            tensor[1], tensor[2], tensor[3] = 0.0, 1e-8, -0.0
        check(run([tensor]).table[0], tensor)

    payloads = st.one_of(
        st.floats(-100, 100, width=32),
        st.sampled_from(
            [
                0.0,
                -0.0,
                1e-45,
                -1e-40,
                1e-30,
                2.0**-24,
                2.0**-25,
                5.9e-8,
                6e-8,
                1e20,
                -3e38,
                math.inf,
                -math.inf,
                math.nan,
            ]
        ),
    )

    @settings(max_examples=40, deadline=None)
    @given(st.lists(payloads, max_size=300))
    def test_every_payload(xs: list[float]) -> None:
        tensor = torch.tensor(xs, dtype=torch.float32)
        check(run([tensor]).table[0], tensor)

    def test_mixed_lists_strides_and_alignment() -> None:
        base = torch.randn(4000)
        tensors = [
            base[:700],
            base[1:900],  # not aligned to 16 bytes
            torch.randn(300).bfloat16(),
            torch.randn(90).half()[1:],
            torch.randn(20, 30).t(),  # dense, in another order
            torch.empty(0),
            torch.randn(50).double(),
        ]
        assert flat_values(tensors[4]) is tensors[4]
        gap = base.view(100, 40)[:, ::2]
        assert flat_values(gap).is_contiguous()
        tensors.append(flat_values(gap))
        got = run(tensors)
        for row, tensor in zip(got.table, tensors, strict=True):
            check(row, tensor)
        want = math.sqrt(sum(float(t.double().square().sum()) for t in tensors))
        assert float(got.scalar("grad_norm")) == pytest.approx(want, rel=1e-6)

    def test_absent_rows_and_a_plan_used_again() -> None:
        first, second = torch.randn(300), torch.randn(10)
        plan = Plan([first, second], [0, 2], 4)
        table = go(plan, [first, second]).table
        assert table[1, 0] == table[3, 0] == ABSENT
        check(table[0], first)
        check(table[2], second)
        other = [torch.randn(300), torch.randn(10)]
        assert not plan.takes([torch.randn(301)[1:].data_ptr(), other[1].data_ptr()])  # another alignment: another plan
        check(go(plan, other).table[0], other[0])

    def test_deterministic() -> None:
        tensors = [torch.randn(1000), torch.randn(77)]
        plan = Plan(tensors, None, 2)
        assert torch.equal(go(plan, tensors).flat, go(plan, tensors).flat)

    @pytest.mark.parametrize("scale", [1e-25, 1e-3, 1.0, 1e20, 1e37])
    def test_norm_coefficient_and_flags(scale: float) -> None:
        tensors = [torch.randn(300) * scale, torch.randn(40) * scale]
        got = run(tensors, max_norm=1.0)
        norm = math.sqrt(sum(float(t.double().square().sum()) for t in tensors))
        assert float(got.scalar("grad_norm")) == pytest.approx(norm, rel=1e-6)
        assert float(got.scalar("nonfinite_grads")) == float(got.scalar("rejected")) == 0.0
        want = min(1.0, 1.0 / (norm + 1e-6))
        assert float(got.scalar("clip_coef")) == pytest.approx(want, rel=1e-5)
        assert float(got.scalar("inverse_coef")) == pytest.approx(1.0 / want, rel=1e-5)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_bad_values_are_flagged_and_do_not_touch_the_coefficient(bad: float) -> None:
        tensors = [torch.randn(300), torch.randn(600)]
        tensors[1][599] = bad
        got = run(tensors, max_norm=1.0)
        assert not math.isfinite(float(got.scalar("grad_norm")))
        assert [float(got.scalar(name)) for name in GLOBALS[1:]] == [1.0, 1.0, 1.0, 1.0]
        assert float(run(tensors, reject_nonfinite=False).scalar("rejected")) == 0.0
        assert float(run([tensors[0]], reject_above=1.0).scalar("rejected")) == 1.0

    def test_a_scale_that_is_still_in_the_gradients_is_divided_out() -> None:
        tensor = torch.randn(500)
        got = run([tensor * 1024], scale=torch.tensor(1024.0))
        row = got.table[0]
        plain = measure.full([tensor])[0]
        columns = list(Column)
        for column in (Column.L2, Column.ABSMAX, Column.MEAN):
            i = columns.index(column)
            assert float(row[i]) == pytest.approx(float(plain[i]), rel=1e-5, abs=1e-6)  # a mean cancels
        assert float(got.scalar("grad_norm")) == pytest.approx(float(tensor.norm()), rel=1e-6)
        assert np.isfinite(got.flat.numpy()).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_scaling_in_place(dtype: torch.dtype) -> None:
        tensors = [torch.randn(n).to(dtype) for n in (1, 300, 1000)] + [torch.randn(5).double()]
        before = [t.clone() for t in tensors]
        plan = Plan(tensors, None, len(tensors))
        go(plan, tensors)
        plan.scale(tensors, torch.tensor(1.0))
        assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
        plan.scale(tensors, torch.tensor(0.25))
        for a, b in zip(before, tensors, strict=True):
            assert torch.equal((a.double() * 0.25).to(a.dtype), b)

    def outgoing(
        batch: torch.Tensor | None = None, vectors: list[torch.Tensor | None] | None = None, **values: torch.Tensor
    ) -> Outgoing:
        out = Outgoing(batch, vectors)
        for name, value in values.items():
            out.add(name, value)
        return out

    def sent_by(plan: Plan, tensors: list[torch.Tensor], out: Outgoing, **limits: Any) -> Sent:
        measured = plan.run(tensors, [t.data_ptr() for t in tensors], Limits(**limits), None, out)
        assert measured.sent is not None
        return measured.sent

    def test_what_is_sent_is_what_was_measured_and_what_was_given_along() -> None:
        tensors = [torch.randn(300), torch.randn(40)]
        plan = Plan(tensors, None, 2)
        loss, more = torch.tensor(2.5), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        table, found = sent_by(plan, tensors, outgoing(loss=loss, more=more), max_norm=1.0).split()
        fresh = run(tensors, max_norm=1.0)
        assert torch.equal(torch.from_numpy(table).view(2, 7), fresh.table)
        assert [found[name] for name in GLOBALS] == [float(fresh.scalar(name)) for name in GLOBALS]
        assert [found[f"more/{i}"] for i in range(3)] == [1.0, 2.0, 3.0]
        assert found["loss"] == 2.5
        assert not any(name.startswith(("in_", "dots")) or not name for name in found)
        # Fewer the next time: nothing is left of what was sent before.
        for _ in range(NUM_RING):
            _, found = sent_by(plan, tensors, outgoing(loss=torch.tensor(3.5))).split()
            assert set(found) == {*GLOBALS, "loss"}
            assert found["loss"] == 3.5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("size", [1, 2049, 9000])
    def test_the_batch_is_looked_at_along_with_the_gradients(dtype: torch.dtype, size: int) -> None:
        tensors = [torch.randn(30)]
        plan = Plan(tensors, None, 1)
        batch = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        want = look_on_device(batch)
        _, found = sent_by(plan, tensors, outgoing(batch)).split()
        assert found["in_rms"] == pytest.approx(float(want["in_rms"]), rel=1e-5)
        assert found["in_bad"] == 0.0
        for bad in (math.nan, -math.inf):
            batch[-1] = bad
            assert sent_by(plan, tensors, outgoing(batch)).split()[1]["in_bad"] == 1.0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("num", [1, 40, 512])
    def test_products_of_four_vectors(dtype: torch.dtype, num: int) -> None:
        tensors = [torch.randn(30)]
        plan = Plan(tensors, None, 1)
        some = [torch.randn(num, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)]
        for vectors in (some, [some[0], some[1], None, None]):
            products = Products(vectors[0], vectors[1], vectors[2], vectors[3])  # type: ignore[arg-type]
            assert products.dense
            want = products.computed().reshape(-1)
            _, found = sent_by(plan, tensors, outgoing(vectors=vectors)).split()
            got = [found[name] for name in DOTS]
            assert got == pytest.approx([float(want[int(name[5:])]) for name in DOTS], rel=1e-4, abs=1e-5)

    def test_values_that_nobody_took_are_kept_when_their_memory_is_needed() -> None:
        tensors = [torch.randn(300)]
        plan = Plan(tensors, None, 1)
        sent = [sent_by(plan, tensors, outgoing(loss=torch.tensor(float(i)))) for i in range(3 * NUM_RING)]
        assert [s.split()[1]["loss"] for s in sent] == [float(i) for i in range(3 * NUM_RING)]

    def test_clipping_in_place_and_norms_that_are_spared() -> None:
        tensors = [torch.randn(300), torch.randn(40)]
        before = [t.clone() for t in tensors]
        plan = Plan(tensors, None, 2)
        addresses = [t.data_ptr() for t in tensors]
        measured = plan.run(tensors, addresses, Limits(max_norm=1.0, clip_above=1e6), None, None, True)
        assert float(measured.scalar("clip_coef")) == 1.0
        assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
        measured = plan.run(tensors, addresses, Limits(max_norm=1.0, clip_above=1.0), None, None, True)
        coef = float(measured.scalar("clip_coef"))
        assert coef < 1.0
        assert all(torch.allclose(a * coef, b) for a, b in zip(before, tensors, strict=True))

    def test_replays_of_a_captured_step_are_kept_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
        """A graph is the same launches again, with the same arguments: what they read has changed since."""
        tensors = [torch.randn(300)]
        plan = Plan(tensors, None, 1)
        addresses = [t.data_ptr() for t in tensors]
        sent_by(plan, tensors, outgoing())  # what comes before every capture
        launched: list[Any] = []
        launch = Plan._launch
        monkeypatch.setattr(Plan, "_launch", lambda self, *args: launched.append(args))
        first, second = torch.tensor(0.0), torch.tensor(0.0)
        for out in (outgoing(loss=first), outgoing(other=second, loss=first)):
            assert plan.can_capture
            assert plan.run(tensors, addresses, Limits(), None, out, False, True).sent is None
        assert not plan.can_capture  # until the next step that is not captured
        replays = plan.replays
        assert replays is not None
        assert list(replays.take()) == []

        def replay(graph: int, value: float) -> None:
            tensors[0].fill_(value)
            first.fill_(value)
            second.fill_(-value)
            launch(plan, *launched[graph])

        replay(0, 1.0)
        replay(1, 2.0)
        heard = list(replays.take(wait=True))
        assert [(missed, found["loss"], found.get("other")) for missed, _, found in heard] == [
            (0, 1.0, None),
            (0, 2.0, -2.0),
        ]
        assert [found["grad_norm"] for _, _, found in heard] == pytest.approx([300**0.5, 2 * 300**0.5])
        assert heard[0][1].shape == (7,)
        places = len(plan._ring)
        for i in range(places + 5):
            replay(0, float(i))
        heard = list(replays.take())
        assert [missed for missed, _, _ in heard] == [5] + [0] * (places - 1)
        assert [found["loss"] for _, _, found in heard] == [float(i) for i in range(5, places + 5)]
        monkeypatch.setattr(Plan, "_launch", launch)
        sent_by(plan, tensors, outgoing())
        assert plan.can_capture

    def test_a_meter_makes_a_new_plan_for_other_sizes() -> None:
        """The values of a sparse gradient: as many as there were rows in the batch."""
        from trimtab.sample.measure.meter import Meter

        meter = Meter({torch.device("cpu")}, "triton")
        for size in (300, 40, 5000):
            values = torch.randn(size)
            check(meter.measure([values], None, 1, Limits(), vary=True).table[0], values)

    def test_a_meter_keeps_its_plan_and_makes_a_new_one_when_it_must() -> None:
        from trimtab.sample.measure.meter import Meter

        meter = Meter({torch.device("cpu")}, "triton")
        assert len(meter.columns) == 7
        first = [torch.randn(300), torch.randn(40)]
        meter.measure(first, None, 2, Limits())
        plan = meter._plan
        meter.measure([t.clone() for t in first], None, 2, Limits())
        assert meter._plan is plan
        assert meter.can_scale
        gap = torch.randn(20, 30)[:, ::2]
        table = meter.measure([gap], [1], 3, Limits()).table
        assert not meter.can_scale
        check(table[1], gap)
        assert table[0, 0] == ABSENT
        check(meter.full(first)[0], first[0])

    def test_kernels_that_do_not_run_here_cost_speed_and_no_more(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from trimtab.sample.measure.meter import Meter

        def broken(*args: object) -> None:
            raise RuntimeError("no C compiler")

        monkeypatch.setattr(Plan, "run", broken)
        tensors = [torch.randn(300), torch.randn(40)]
        meter = Meter({torch.device("cpu")}, "triton")
        first, second = (meter.measure(tensors, None, 2, Limits()) for _ in range(2))
        assert torch.equal(first.flat, second.flat)
        assert float(first.table[0, 0]) == pytest.approx(float(tensors[0].norm()), rel=1e-6)
        assert meter.full(tensors).shape == (2, 7)
        assert [r.getMessage().count("no C compiler") for r in caplog.records] == [1]

    def test_a_full_scan_that_is_sent_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
        from trimtab.sample import thorough
        from trimtab.sample.rows import Rows

        monkeypatch.setattr(thorough, "MAX_COPIED", 64)  # the largest tensor is judged by a part of it
        monkeypatch.setattr(thorough, "MIN_COPIED", 30)
        params = [torch.randn(40, 20), torch.randn(7), torch.randn(3, 3)]
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        rows = Rows(torch.optim.SGD(groups, lr=0.1), {}, label="", others=[torch.randn(5)])
        scope = thorough.Scope(rows, "triton")
        assert scope.sends
        for _ in range(3):
            grads = torch.rand(3, 7)
            here = Sent(grads.numpy().reshape(-1), None, grads.numel(), ())
            looks = [thorough.FullLook(scope, grads), thorough.FullLook(scope, here)]
            for p in params:
                p += torch.randn_like(p)
            (layout, table, scalars), (same, parts, nothing) = (look.finish() for look in looks)
            assert layout is same
            assert nothing == {}
            assert isinstance(table, torch.Tensor)
            assert isinstance(parts, Sent)
            sent, values = parts.split()
            np.testing.assert_allclose(sent.reshape(10, 7), table.numpy(), rtol=1e-6)
            assert values == pytest.approx({name: float(value) for name, value in scalars.items()}, rel=1e-6)

    def test_a_full_scan_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
        from trimtab.sample import thorough
        from trimtab.sample.rows import Rows

        def broken(*args: object, **kwargs: object) -> None:
            raise RuntimeError("no C compiler")

        params = [torch.ones(10)]
        rows = Rows(torch.optim.SGD(params, lr=0.1), {}, label="", others=[])
        scope = thorough.Scope(rows, "triton")
        monkeypatch.setattr(Plan, "run", broken)
        look = thorough.FullLook(scope, Sent(np.zeros(7, np.float32), None, 7, ()))
        params[0] += 1.0
        parts = look.finish()[1]
        assert not scope.sends
        assert isinstance(parts, Sent)
        _, values = parts.split()
        assert values == pytest.approx({"weight_norm": 10**0.5, "update_ratio": 1.0})
