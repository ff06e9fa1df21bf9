"""What must hold on a CUDA device, checked one by one: parity, gate, graphs, compile, and not a single host wait.

    PYTHONPATH=src python benchmarks/gpu_checks.py

Prints one line a check and exits 1 if any fails. CI has no GPU; this is run by hand and its output kept in results/.
"""

from __future__ import annotations

import logging
import math
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from trimtab import Guard
from trimtab.core.types import Column, Sample
from trimtab.sample.measure.meter import Meter
from trimtab.sample.measure.reference import GLOBALS, Limits, Outgoing

sys.path.insert(0, str(Path(__file__).parent.parent))  # the catalogue of faults is among the tests
DEVICE = torch.device("cuda")
CHECKS: list[Callable[[], str]] = []


def check(function: Callable[[], str]) -> Callable[[], str]:
    CHECKS.append(function)
    return function


def reference(tensor: Tensor) -> list[float]:
    x = tensor.double().reshape(-1)
    n = max(x.numel(), 1)
    small = (x != 0) & (x.abs() < 2.0**-24)
    return [
        float(x.square().sum().sqrt()),
        float(x.abs().max()) if x.numel() else 0.0,
        float(x.sum() / n),
        float(x.isnan().sum()),
        float(x.isinf().sum()),
        float((x == 0).sum() / n),
        float(small.sum() / n),
    ]


def agree(table: Tensor, tensors: list[Tensor]) -> float:
    worst = 0.0
    for row, tensor in zip(table.tolist(), tensors, strict=True):
        for column, got, want in zip(Column, row, reference(tensor), strict=True):
            want32 = float(torch.tensor(want, dtype=torch.float64).float())
            if math.isnan(want32) or math.isinf(want32):
                assert repr(got) == repr(want32), (column, got, want32)
                continue
            scale = float(tensor.double().abs().nan_to_num().mean()) if tensor.numel() else 0.0
            slack = 1e-6 * scale + 1e-12 if column is Column.MEAN else 1e-12
            assert abs(got - want32) <= 2e-5 * abs(want32) + slack, (column, got, want32, tensor.shape, tensor.dtype)
            if column is Column.L2 and want32:
                worst = max(worst, abs(got - want32) / want32)
    return worst


@check
def parity() -> str:
    """Every dtype, odd sizes, payloads, strides, alignment, in one mixed list, against float64."""
    torch.manual_seed(0)
    tensors: list[Tensor] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in (0, 1, 7, 1000, 32768, 32769, 100_003, 3_000_001):
            t = torch.randn(size, device=DEVICE).to(dtype)
            if size > 8:
                t[1], t[2], t[3] = 0.0, 1e-8, -0.0
            tensors.append(t)
            if size > 1000:
                bad = t.clone()
                bad[-1], bad[5] = math.nan, math.inf
                inf = t.clone()
                inf[size // 2] = -math.inf
                tensors += [bad, inf, t[1:]]
    tensors += [
        torch.randn(300, 200, device=DEVICE).t(),
        torch.randn(64, 8, 3, 3, device=DEVICE).to(memory_format=torch.channels_last),
    ]
    tensors += [torch.full((5000,), v, device=DEVICE) for v in (1e20, 3e38, 1e-30, 1e-45, 2.0**-24, 2.0**-25)]
    tensors.append(torch.randn(2000, device=DEVICE).double())
    meter = Meter({DEVICE}, "auto")
    assert len(meter.columns) == 7, "triton must be in use"
    measured = meter.measure(tensors, None, len(tensors), Limits())
    worst = agree(measured.table, tensors)
    again = meter.measure(tensors, None, len(tensors), Limits())
    assert torch.equal(measured.flat.nan_to_num(7.0), again.flat.nan_to_num(7.0)), "not deterministic"
    return f"{len(tensors)} tensors, worst relative error of a norm {worst:.1e}, deterministic"


@check
def beyond_int32() -> str:
    """More than 2**31 elements in one tensor."""
    size = 2**31 + 12_345
    t = torch.zeros(size, device=DEVICE, dtype=torch.bfloat16)
    t[-1], t[2**31 + 5] = 3.0, 4.0
    measured = Meter({DEVICE}, "auto").measure([t], None, 1, Limits())
    row = measured.table[0].tolist()
    assert row[0] == 5.0, row
    assert row[1] == 4.0, row
    return f"{size:,} elements: norm {row[0]}"


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256, bias=False), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10)).to(DEVICE)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "SGD momentum fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = list(model.state_dict().values())
    for state in optimizer.state.values():
        tensors += [v for v in state.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in tensors]


def train(
    optimizer_name: str, *, guarded: bool, bad: int | None, scaler: bool, clip: float | None, steps: int = 60
) -> tuple[Any, ...]:
    model = small_net()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    amp = torch.amp.GradScaler("cuda", init_scale=1024.0) if scaler else None
    guard = Guard(model, optimizer, scaler=amp, clip=clip, run_dir=False) if guarded else None
    torch.manual_seed(1)
    frozen = None
    for step in range(steps):
        x, y = torch.randn(128, 64, device=DEVICE), torch.randint(0, 10, (128,), device=DEVICE)
        if step == bad:
            x[3, 5] = math.nan
            frozen = everything(model, optimizer)
        loss = nn.functional.cross_entropy(model(x), y)
        (loss if amp is None else amp.scale(loss)).backward()
        if guard is not None:
            guard.step(loss)
        else:
            if amp is not None:
                amp.unscale_(optimizer)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if amp is not None:
                amp.step(optimizer)
                amp.update()
            else:
                optimizer.step()
        optimizer.zero_grad()
        if step == bad and frozen is not None:
            now = everything(model, optimizer)
            assert len(now) == len(frozen)
            if guarded:
                assert all(torch.equal(a, b) for a, b in zip(frozen, now, strict=True)), (
                    "the rejected step left a trace"
                )
    if guard is not None:
        guard.close()
    return everything(model, optimizer), guard


@check
def one_nan_sample() -> str:
    """Every optimizer, with and without scaler and clipping: bit-identical across the bad step, finite at the end."""
    runs = 0
    for name in OPTIMIZERS:
        for scaler in (False, True):
            for clip in (None, 1.0):
                final, guard = train(name, guarded=True, bad=30, scaler=scaler, clip=clip)
                assert all(torch.isfinite(t).all() for t in final), (name, scaler, clip)
                assert guard.rejected == 1, (name, scaler, clip, guard.rejected)
                names = {f.name for f in guard.findings}
                assert {"nonfinite-loss", "nonfinite-gradient"} <= names, (name, names)
                assert {f.step for f in guard.findings} == {30}, (name, guard.findings)
                runs += 1
    return f"{runs} runs"


@check
def do_no_harm() -> str:
    """Healthy, unclipped: the same bits with and without the guard. Clipped: as with clip_grad_norm_, to rounding."""
    for name in OPTIMIZERS:
        for scaler in (False, True):
            plain, _ = train(name, guarded=False, bad=None, scaler=scaler, clip=None)
            ours, guard = train(name, guarded=True, bad=None, scaler=scaler, clip=None)
            assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)), (name, scaler)
            assert guard.findings == []
            assert guard.rejected == 0
    plain, _ = train("SGD momentum fused", guarded=False, bad=None, scaler=False, clip=0.05)
    ours, _ = train("SGD momentum fused", guarded=True, bad=None, scaler=False, clip=0.05)
    worst = max(float((a.double() - b.double()).abs().max()) for a, b in zip(plain, ours, strict=True))
    assert worst < 1e-4, worst
    return f"{2 * len(OPTIMIZERS)} configurations bit-identical; clipping differs by at most {worst:.1e}"


@check
def no_host_wait() -> str:
    """A guarded loop under set_sync_debug_mode("error"); a NaN planted at step k is known to the host at k+1."""
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    guard = Guard(model, optimizer, clip=1.0, config={"full_every": 10, "trace": False})
    xs = [torch.randn(128, 64, device=DEVICE) for _ in range(60)]
    y = torch.randint(0, 10, (128,), device=DEVICE)
    xs[40][0, 0] = math.nan
    torch.cuda.synchronize()
    told = {}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, x in enumerate(xs):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            verdict = guard.step(loss)
            optimizer.zero_grad()
            if verdict is not None and verdict.findings:
                told[verdict.step] = (step, verdict.seen_at)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    guard.close()
    assert told == {40: (41, 41)}, told
    assert guard.rejected == 1
    return "60 steps, full look every 10, recorded to disk; NaN at step 40 known at step 41"


def broken_loop(fault: str, fused: bool) -> list[str]:
    """What a guard finds in a short loop with one thing wrong; `healthy` has nothing wrong."""
    model = small_net()
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    if fault == "half of the parameters":
        optimizer = torch.optim.AdamW(list(model.parameters())[-2:], lr=1e-3, fused=fused)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    ema.update_parameters(model)
    guard = Guard.attach(model, optimizer, ema=ema, run_dir=False)
    y = torch.randint(0, 10, (128,), device=DEVICE)
    for step in range(70):
        x = torch.randn(128, 64, device=DEVICE)
        late = step >= 40
        if late and fault == "inputs x1000":
            x = x * 1000
        if late and fault == "rate x100":
            optimizer.param_groups[0]["lr"] = 0.1
        if late and fault == "eval mode":
            model.eval()
        loss = nn.functional.cross_entropy(model(x), y)
        if fault != "zero_grad forgotten":
            optimizer.zero_grad()
        loss.backward()
        guard.observe(loss=loss, batch=(x, y))
        optimizer.step()
        if late and fault == "double step":
            optimizer.step()
        if fault != "average stands still":
            ema.update_parameters(model)
    guard.close()
    return [f.name for f in guard.findings]


@check
def wiring_on_the_device() -> str:
    """Faults that are found by probes rather than by numbers, with gradients that never leave the device."""
    want = {
        "zero_grad forgotten": "stale-gradient",
        "double step": "double-step",
        "inputs x1000": "outlier-batch",
        "rate x100": "learning-rate",
        "eval mode": "eval-mode",
        "average stands still": "ema-not-moving",
        "half of the parameters": "optimizer-misses-parameters",
    }
    for fused in (True, False):
        assert broken_loop("healthy", fused) == [], broken_loop("healthy", fused)
        for fault, name in want.items():
            found = broken_loop(fault, fused)
            assert name in found, (fault, fused, found)
    return f"{len(want)} faults named, fused and not; a healthy loop is silent"


@check
def one_wait_without_fused() -> str:
    """An optimizer that is not fused can only be told from the host: one wait a step, and no more."""
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(128, 64, device=DEVICE), torch.randint(0, 10, (128,), device=DEVICE)
    with Guard(model, optimizer, clip=1.0, run_dir=False) as guard:
        counts = []
        events: list[Any] = []  # waited for: PyTorch does not warn of these
        wait = torch.cuda.Event.synchronize
        torch.cuda.Event.synchronize = lambda self: (events.append(self), wait(self))[1]  # type: ignore[assignment, func-returns-value, misc]
        try:
            for _ in range(30):
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                events.clear()
                with warnings.catch_warnings(record=True) as waits:
                    warnings.simplefilter("always")
                    torch.cuda.set_sync_debug_mode("warn")
                    guard.step(loss)
                    torch.cuda.set_sync_debug_mode("default")
                said = sum("synchroniz" in str(w.message) and "prototype" not in str(w.message) for w in waits)
                counts.append(said + len(events))
                optimizer.zero_grad()
        finally:
            torch.cuda.Event.synchronize = wait  # type: ignore[method-assign]
    assert set(counts[8:]) == {1}, counts
    return f"waits per step {counts[-1]}"


@check
def cuda_graph() -> str:
    """A captured step stays gated: replays with a NaN batch leave the weights alone."""
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
    guard = Guard(model, optimizer, clip=1.0, run_dir=False)
    x, y = torch.randn(128, 64, device=DEVICE), torch.randint(0, 10, (128,), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    before = everything(model, optimizer)
    graph.replay()
    moved = everything(model, optimizer)
    assert not all(torch.equal(a, b) for a, b in zip(before, moved, strict=True)), "a healthy replay must train"
    good = x.clone()
    x[0, 0] = math.nan
    graph.replay()
    after = everything(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(moved, after, strict=True)), "a bad replay must leave no trace"
    x.copy_(good)
    graph.replay()
    assert all(torch.isfinite(t).all() for t in everything(model, optimizer))
    guard.close()
    return "captured, replayed, NaN replay rejected on the device"


class Kept:
    """A sink that keeps the samples it gets."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def write(self, record: object) -> None:
        if isinstance(record, Sample):
            self.samples.append(record)

    def close(self) -> None:
        pass


@check
def replays_on_record() -> str:
    """Steps replayed in a CUDA graph are counted, judged and recorded, with the loss and norms each really had."""
    kept = Kept()
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
    guard = Guard(model, optimizer, clip=1.0, run_dir=False, sinks=[kept], config={"full_every": 0})
    x, y = torch.randn(128, 64, device=DEVICE), torch.randint(0, 10, (128,), device=DEVICE)
    shown: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        guard.step(loss)
        shown[:] = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    want = []
    for i in range(600):
        x.normal_()
        if i == 30:
            x[0, 0] = math.nan
        graph.replay()
        if i < 100:
            norm = torch.stack([g.double().square().sum() for g in shown[1:]]).sum().sqrt()
            want.append((float(shown[0]), float(norm)))
            if i % 10 == 9:
                guard.observe()
    guard.close()
    assert guard.rejected == 1, guard.rejected
    assert {f.step for f in guard.findings if "nonfinite" in f.name} == {34}, guard.findings
    assert next(iter(guard.lanes.values())).attempts == 604
    steps = [s.step for s in kept.samples if s.phase == "train"]
    assert steps[:104] == list(range(104)), steps[:110]
    assert steps[-256:] == list(range(348, 604)), steps[-256:]  # of the rest the newest ones
    for sample, (loss, norm) in zip(kept.samples[4:104], want, strict=True):
        assert repr(sample.scalars["loss"]) == repr(loss), (sample.step, sample.scalars, loss)
        if math.isfinite(norm):
            clipped = min(sample.scalars["grad_norm"], 1.0)
            assert abs(clipped - norm) < 1e-4, (sample.step, sample.scalars["grad_norm"], norm)
    return f"600 replays: {len(steps) - 4} on record, the other {604 - len(steps)} counted; NaN in the 30th rejected"


@check
def sent_as_measured() -> str:
    """What the kernels write to the host's memory, by launches and by a replayed graph, is what they measured."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        meter = Meter({DEVICE}, "auto")
        for step in range(40):
            grads = [torch.randn(s, device=DEVICE).to(dtype) for s in ((64, 64), (3000,), (100_003,), (1,))]
            batch = torch.randn(50, 77, device=DEVICE).to(dtype)
            if step % 3 == 0:
                batch[-1, -1] = math.inf
            loss, more = torch.rand((), device=DEVICE), torch.rand(3, device=DEVICE)
            outgoing = Outgoing(batch if step % 4 else None)
            outgoing.add("loss", loss)
            outgoing.add("more", more)
            limits = Limits(max_norm=1.0)
            before = [g.clone() for g in grads]
            measured = meter.measure(grads, None, 4, limits, outgoing=outgoing, in_place=step % 2 == 0)
            assert measured.sent is not None
            flat = measured.flat.clone()
            table, found = measured.sent.split()
            assert torch.equal(torch.from_numpy(table), flat[: table.size].cpu())
            agree(flat[: table.size].view(4, 7), before)
            assert [found[n] for n in GLOBALS] == flat[table.size :].tolist()
            assert [found[f"more/{i}"] for i in range(3)] == more.tolist()
            assert found["loss"] == float(loss)
            if step % 4:
                assert found["in_bad"] == float(step % 3 == 0), (step, found)
                if step % 3:
                    want = float(batch.reshape(-1)[:2048].float().square().mean().sqrt())
                    assert abs(found["in_rms"] - want) < 1e-4, (found, want)
            factor = found["clip_coef"] if step % 2 == 0 else 1.0
            for a, b in zip(before, grads, strict=True):
                assert torch.allclose((a.double() * factor).to(dtype), b, rtol=1e-2 if dtype != torch.float32 else 1e-6)
    return "120 steps of three types, clipped and not, with and without a batch"


@check
def marks_of_batches() -> str:
    """The fingerprint that a step on the device sends is the one the host would have read, whatever it comes with."""
    makes: dict[str, Callable[[], Tensor]] = {
        "float32": lambda: torch.randn(32, 64, device=DEVICE),
        "wide": lambda: torch.randn(4, 3, 64, 64, device=DEVICE),
        "bfloat16": lambda: torch.randn(32, 64, device=DEVICE).bfloat16(),
        "tokens": lambda: torch.randint(0, 50, (8, 16), device=DEVICE),
        "not contiguous": lambda: torch.randn(64, 32, device=DEVICE).t(),
    }
    for name, make in makes.items():
        width = 3 * 64 * 64 if name == "wide" else 64
        first = nn.Embedding(50, 64) if name == "tokens" else nn.Sequential(nn.Flatten(), nn.Linear(width, 64))
        model = nn.Sequential(first, nn.ReLU(), nn.Linear(64, 10)).to(DEVICE)
        if name == "bfloat16":
            model = model.bfloat16()
        optimizer, kept, want = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), Kept(), []
        with Guard(model, optimizer, run_dir=False, sinks=[kept]) as guard:
            for step in range(40):
                x = make()
                for _ in range(2 if step % 7 == 6 else 1):  # several forwards: the last one counts
                    x = make()
                    loss = model(x).float().square().mean()
                    loss.backward()
                lead = x.reshape(-1)[:512].cpu()
                want.append(float(crc32((lead.float() if lead.is_floating_point() else lead).numpy().tobytes())))
                guard.step(loss)
                optimizer.zero_grad()
        got = [sample.scalars.get("in_print") for sample in kept.samples]
        assert got == want, (name, [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b])
    return f"{len(makes)} kinds of batches"


@check
def compiled() -> str:
    """torch.compile'd models, guarded as the wrapper and as the module inside."""
    for outer in (True, False):
        model = small_net()
        fast = torch.compile(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        with Guard(fast if outer else model, optimizer, run_dir=False) as guard:
            for i in range(8):
                x = torch.randn(128, 64, device=DEVICE)
                if i == 5:
                    x[0, 0] = math.nan
                loss = fast(x).square().mean()
                loss.backward()
                guard.step(loss)
                optimizer.zero_grad()
        assert guard.rejected == 1
        assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    return "both ways"


@check
def origins() -> str:
    """Faults of known origin, run again as whole steps and from what a guard holds; backward has its own thread."""
    from tests.trace.catalogue_fresh import FRESH
    from tests.trace.score import guarded, judged, traced

    torch.set_default_device("cuda")
    try:
        right: dict[str, list[bool]] = {"whole step": [], "guard": []}
        for fault in FRESH.faults.values():
            for way, parts in right.items():
                torch.manual_seed(0)
                program = fault.build()
                with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    answer = traced(program) if way == "whole step" else guarded(program, Path(folder) / "run")
                found = judged(fault, answer)
                parts += [found[part] for part in ("op", "module", "sample", "silent") if part in found]
    finally:
        torch.set_default_device(None)
    told = ", ".join(f"{way} {sum(parts)} of {len(parts)}" for way, parts in right.items())
    assert sum(right["whole step"]) >= 0.9 * len(right["whole step"]), told
    assert sum(right["guard"]) >= 0.7 * len(right["guard"]), told
    return f"operations, modules and samples named: {told}"


@check
def sharded() -> str:
    """FSDP2 in a process group of one, through NCCL: NaN rejected, clipped as PyTorch does, and never waited for."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)

    def weights(guarded: bool, clip: float | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
        for part in (*model, model):
            fully_shard(part)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        guard = Guard(model, optimizer, {"trace": False}, clip=clip, run_dir=False) if guarded else None
        batches = [torch.randn(32, 64, generator=torch.Generator().manual_seed(s)).cuda() for s in range(60)]
        batches[40][3] = float("nan")
        for step, x in enumerate(batches):
            if guard is None and step == 40:
                continue
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            torch.cuda.set_sync_debug_mode("error" if guard is not None and step > 10 else "default")
            if guard is not None:
                guard.step(loss)
            else:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
        if guard is not None:
            guard.close()
            assert {f.name for f in guard.findings} >= {"nonfinite-gradient"}, guard.findings
            assert {f.step for f in guard.findings} == {40}, guard.findings
        return [p.full_tensor().detach() for p in model.parameters()]

    try:
        pairs = [(weights(True, clip), weights(False, clip)) for clip in (None, 0.1)]
    finally:
        distributed.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(*pairs[0], strict=True))
    apart = max(float((a - b).abs().max()) for a, b in zip(*pairs[1], strict=True))
    assert apart < 1e-6, apart
    return f"60 steps, NaN at step 40 rejected, no wait from step 11 on; clipping differs by at most {apart:.1e}"


def main() -> int:
    logging.getLogger("trimtab").setLevel(logging.ERROR)  # the faults are planted: their findings need no announcing
    failed = 0
    for function in CHECKS:
        try:
            print(f"ok    {function.__name__}: {function()}", flush=True)
        except Exception:
            failed += 1
            print(f"FAIL  {function.__name__}\n{traceback.format_exc(limit=4)}", flush=True)
        torch.cuda.empty_cache()
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
