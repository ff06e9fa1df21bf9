"""What must hold on a CUDA device of `trimtab run`, of checkpoints and of going back, checked one by one.

    PYTHONPATH=src python benchmarks/gpu_faces.py

Prints one line a check and exits 1 if any fails. Needs torch, numpy and safetensors alone.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from trimtab import Checkpointer, Guard

CHECKS: list[Callable[[], str]] = []
SCRIPT = """
    import hashlib, os, sys, torch
    from torch import nn
    kind, nan_at = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)).cuda()
    options = {"fused": True} if kind in ("fused", "compiled") else {}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, **options)
    model = torch.compile(net, backend="aot_eager") if kind == "compiled" else net
    scaler = torch.amp.GradScaler("cuda", enabled=kind == "scaler")
    for i in range(60):
        x = torch.randn(32, 16, device="cuda")
        y = x[:, :4].argmax(1)
        if i == nan_at:
            x[0, 0] = float("nan")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=kind == "scaler"):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if kind in ("scaler", "clipped"):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    state = [v.cpu() for v in net.state_dict().values()]
    print(hashlib.sha256(b"".join(v.numpy().tobytes() for v in state)).hexdigest()[:16])
    print("finite", all(bool(torch.isfinite(v).all()) for v in state), flush=True)
"""
RUN = """
import sys
from trimtab.core.config import Config
from trimtab.run.runner import run_guarded
from trimtab.run.script import Program
run_guarded(Program(target=sys.argv[1], args=sys.argv[2:]), {"config": Config(record=False)})
"""


def check(function: Callable[[], str]) -> Callable[[], str]:
    CHECKS.append(function)
    return function


def run(folder: Path, *args: str, guarded: bool) -> tuple[str, str]:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    (folder / "guarded.py").write_text(RUN)
    command = [sys.executable, *([str(folder / "guarded.py")] if guarded else []), str(script), *args]
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


@check
def scripts_unchanged() -> str:
    """Five builds: identical when healthy, and a NaN sample does not get into weights or statistics."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in ("plain", "fused", "clipped", "scaler", "compiled"):
            plain, _ = run(folder, kind, "-1", guarded=False)
            under, said = run(folder, kind, "-1", guarded=True)
            assert plain == under, f"{kind}: {plain} {under}"
            assert "60 steps, no findings" in said, f"{kind}: {said}"
            control, _ = run(folder, kind, "30", guarded=False)
            assert "finite False" in control, f"{kind}: the control must fail"
            saved, said = run(folder, kind, "30", guarded=True)
            assert "finite True" in saved, f"{kind}: {saved} {said}"
            assert "nonfinite" in said, f"{kind}: {said}"
    return "plain, fused, clipped, scaler, compiled"


def parts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, num: int) -> None:
    for _ in range(num):
        x = torch.randn(32, 16, device="cuda")
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


@check
def exact_resume() -> str:
    """Dropout on the device: its generator is part of the state."""
    with tempfile.TemporaryDirectory() as name:
        for asynchronous in (False, True):
            ckpt = Checkpointer(Path(name) / str(asynchronous), asynchronous=asynchronous)
            model, optimizer = parts(0)
            steps(model, optimizer, 20)
            ckpt.save(20, model=model, optimizer=optimizer)
            steps(model, optimizer, 20)
            other, its = parts(1)
            snapshot = ckpt.resume(model=other, optimizer=its)
            assert snapshot is not None
            steps(other, its, 20)
            pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
    return "20 + 20 steps equal 40, saved at once and in the background"


@check
def goes_back() -> str:
    """Mode act: a rate 300 times too high for five steps."""
    ends = {}
    for arm in ("clean", "unguarded", "act"):
        model, optimizer = parts(0)
        guard = Guard(model, optimizer, mode="act", run_dir=False) if arm == "act" else None
        for i in range(400):
            optimizer.param_groups[0]["lr"] = 1e-2 * (300 if arm != "clean" and 200 <= i < 205 else 1)
            x = torch.randn(64, 16, device="cuda")
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step() if guard is None else guard.step(loss)
        if guard is not None:
            guard.close()
        model.eval()
        x = torch.randn(4096, 16, device="cuda", generator=torch.Generator("cuda").manual_seed(9))
        with torch.no_grad():
            ends[arm] = float((model(x) - x.sum(1, keepdim=True)).square().mean())
    told = ", ".join(f"{k} {v:.4g}" for k, v in ends.items())
    assert math.isfinite(ends["act"]), told
    assert ends["act"] <= 1.25 * ends["clean"] + 0.05, told
    return told


def main() -> int:
    logging.getLogger("trimtab").setLevel(logging.ERROR)  # the faults are planted: their findings need no announcing
    failed = 0
    for function in CHECKS:
        try:
            print(f"ok    {function.__name__}: {function()}", flush=True)
        except Exception:
            failed += 1
            print(f"FAIL  {function.__name__}\n{traceback.format_exc(limit=4)}", flush=True)
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
