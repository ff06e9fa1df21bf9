"""`trimtab train` on a GPU: every recipe clean and with each of its faults, AMP, resuming, memory and speed.

`PYTHONPATH=src python benchmarks/gpu_train.py [--device cuda] [--only NAME] [--workers 6]`

Prints tables in markdown and what was expected and not seen; ends with 1 if there is any of the latter. Needs no more
than torch, numpy and safetensors.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch: what resuming is compared with repeats

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.core.config import PolicyConfig
from trimtab.train.recipe import run_recipe
from trimtab.train.recipes import RECIPES, load_recipe
from trimtab.train.settings import TrainConfig
from trimtab.train.stages import Stage, Surroundings
from trimtab.train.trainer import Trainer

FILES = ("metrics_file",)  # settings that would leave files where it is run
GROWTH = 1.10
"""The most that the memory peak of the last epoch may be above that of the second."""


FEW = 5
"""Steps that a scaler with torch's own first scale may skip while it looks for one that fits."""


class Expected:
    """Collects what was expected and not seen."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.num = 0

    def that(self, fine: bool, what: str) -> None:
        """Take in one expectation."""
        self.num += 1
        if not fine:
            self.failed.append(what)


def settings_for(name: str, device: str, folder: str) -> dict[str, Any]:
    """The settings of a recipe that writes nothing outside a folder of its own."""
    own = {option.name for option in load_recipe(name).options}
    return {"device": device} | {file: str(Path(folder) / file) for file in FILES if file in own}


def one_run(name: str, fault: str | None, guarded: bool, device: str) -> dict[str, Any]:
    """One recipe at quick size; what it said of itself, or why it could not run."""
    logging.getLogger("trimtab").setLevel(logging.CRITICAL)
    torch.set_num_threads(2)
    recipe = load_recipe(name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = run_recipe(
                recipe, settings_for(name, device, folder), quick=True, fault=fault, guarded=guarded, run_dir=False
            )
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    rows = result.history
    seconds = sum(row["seconds"] for row in rows[1:] or rows)
    return {
        "error": None,
        "score": result.score,
        "name": result.score_name,
        "finite": result.weights_finite,
        "stopped": result.stopped,
        "findings": list(result.findings),
        "actions": [action.split(" (")[0] for action in result.actions],
        "rejected": result.rejected,
        "rate": sum(row["num_steps"] for row in rows[1:] or rows) / max(seconds, 1e-9),
        "devices": sorted({row["device"] for row in rows}),
        "peaks": [row["memory_peak_bytes"] for row in rows],
        "seconds": result.seconds,
    }


# -- recipes ---------------------------------------------------------------------------------------------------------


def recipes(names: list[str], device: str, workers: int, expected: Expected) -> None:
    """Every recipe clean, and with each fault under a guard and without one."""
    jobs = [(name, None, True) for name in names]
    for guarded in (True, False):
        jobs += [(name, fault.name, guarded) for name in names for fault in load_recipe(name).faults]
    print(f"## Recipes at quick size on {device} ({len(jobs)} runs, {workers} at a time)\n")
    print("| recipe | fault | guard | score | weights | rejected | found | did | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    found: dict[tuple[str, str | None, bool], dict[str, Any]] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        todo = {pool.submit(one_run, *job, device): job for job in jobs}
        for done in as_completed(todo):
            found[todo[done]] = done.result()
    for job in jobs:
        _row(job, found[job], device, expected)
    print()


def _row(job: tuple[str, str | None, bool], run: dict[str, Any], device: str, expected: Expected) -> None:
    name, fault, guarded = job
    label = f"{name}, {fault or 'clean'}, {'guarded' if guarded else 'unguarded'}"
    expected.that(run["error"] is None, f"{label}: ran ({run['error']})")
    if run["error"] is not None:
        print(f"| {name} | {fault or '-'} | {'yes' if guarded else 'no'} | failed: {run['error'][:80]} | | | | | |")
        return
    acts = ", ".join(dict.fromkeys(action.split(": ")[1] for action in run["actions"]))
    print(
        f"| {name} | {fault or '-'} | {'yes' if guarded else 'no'} | {run['name']} {run['score']:.4f} | "
        f"{'finite' if run['finite'] else 'NaN or Inf'} | {run['rejected']} | {', '.join(run['findings'])} | {acts} | "
        f"{run['seconds']:.1f} |"
    )
    if guarded:
        expected.that(run["finite"] and run["stopped"] is None, f"{label}: ends with finite weights")
        expected.that(math.isfinite(run["score"]), f"{label}: has a score")
    if fault is None:
        expected.that(run["findings"] == [], f"{label}: nothing is found ({', '.join(run['findings'])})")
        expected.that(all(one.startswith(device) for one in run["devices"]), f"{label}: ran on {run['devices']}")
        peaks = run["peaks"]
        if device.startswith("cuda"):
            expected.that(min(peaks) > 0, f"{label}: memory is measured")
            most = GROWTH * peaks[min(1, len(peaks) - 1)] + PolicyConfig().ring_bytes  # copies to go back to
            expected.that(peaks[-1] <= most, f"{label}: memory grows {peaks}")


def speed(names: list[str], device: str) -> None:
    """Steps a second, guarded and not, one run after another; the better of two each: the first one warms up."""
    print(f"## Steps per second on {device} (quick size, without the first epoch where there are several)\n")
    print("| recipe | unguarded | guarded | guarded takes | memory peak of each epoch, MiB |")
    print("|---|---|---|---|---|")
    for name in names:
        runs = [one_run(name, None, guarded, device) for guarded in (False, True, False, True)]
        if any(run["error"] for run in runs):
            print(f"| {name} | failed | failed | | |")
            continue
        bare, held = (max(run["rate"] for run in runs[first::2]) for first in (0, 1))
        peaks = [f"{peak / 2**20:.0f}" for peak in runs[-1]["peaks"]]
        shown = ", ".join(peaks if len(peaks) <= 6 else [*peaks[:3], "...", *peaks[-2:]])
        print(f"| {name} | {bare:.1f} | {held:.1f} | {bare / held - 1:+.0%} | {shown} |")
    print()


# -- the trainer itself ----------------------------------------------------------------------------------------------


def data(size: int = 64) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Rows whose sum is to be learnt; as a user has them, in pinned memory."""
    x = torch.randn(1024, 32, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(x, x[:, :8].sum(1, keepdim=True))
    order, pin = torch.Generator().manual_seed(2), torch.cuda.is_available()
    train = DataLoader(rows, batch_size=size, shuffle=True, generator=order, pin_memory=pin)
    return train, DataLoader(rows, batch_size=256, pin_memory=pin)


def trainer(config: TrainConfig, around: Surroundings, **how: Any) -> Trainer:
    """A small network with normalisation and dropout, seeded."""
    torch.manual_seed(0)
    layers = (nn.Linear(32, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))
    return Trainer(nn.Sequential(*layers), nn.functional.mse_loss, config, around=around, **how)


def precision(device: str, expected: Expected) -> None:
    """Mixed precision with a scale that really overflows at first: skipped, backed off, and trained."""
    print(f"## Precision on {device}: 10 epochs of 16 steps, an average of the weights\n")
    print("| forward in | first scale | validation loss | skipped | scale at the end | averaged | found |")
    print("|---|---|---|---|---|---|---|")
    quiet = Surroundings(run_dir=False)
    base = TrainConfig(num_epochs=10, learning_rate=3e-3, ema_decay=0.9, device=device)
    for kind, scale in (("off", None), ("bf16", None), ("fp16", 2.0**16), ("fp16", 2.0**40)):
        config = base if kind == "off" else replace(base, use_amp=True, amp_dtype=kind)
        stage = Stage(epochs=10, scaler={} if scale is None else {"init_scale": scale, "growth_interval": 1000})
        run = trainer(config, quiet, stages=[stage])
        losses = run.train(*data()).column("val_loss")
        rig: Any = run.last_rig
        averaged, steps = int(rig.ema.n_averaged), run.course.steps_done
        ending = "" if rig.scaler is None else f"2^{math.log2(rig.scaler.get_scale()):.0f}"
        names = sorted({finding.name for finding in run.findings})
        first = "" if scale is None else f"2^{math.log2(scale):.0f}"
        print(
            f"| {kind} | {first} | {losses[-1]:.4f} | {steps - averaged} | {ending} | {averaged} | {', '.join(names)} |"
        )
        label = f"{kind} from {first or 'no scale'}"
        expected.that(losses[-1] < 0.3 * losses[0], f"{label}: learns ({losses[0]:.3f} to {losses[-1]:.3f})")
        expected.that((rig.scaler is not None) == (kind == "fp16"), f"{label}: a scaler only for fp16")
        if scale == 2.0**40:
            expected.that(0 < steps - averaged < steps // 2, f"{label}: {steps - averaged} steps skipped")
            expected.that(rig.scaler.get_scale() < scale, f"{label}: the scale backs off")
        else:
            expected.that(not names, f"{label}: nothing is found ({', '.join(names)})")
            expected.that(
                steps - averaged <= (FEW if kind == "fp16" else 0), f"{label}: {steps - averaged} steps skipped"
            )
        expected.that(all(bool(p.isfinite().all()) for p in run.model.parameters()), f"{label}: finite weights")
    print()


def resuming(device: str, expected: Expected) -> None:
    """Interrupted within an epoch, then resumed: the weights of the whole run, bit for bit."""
    print(f"## Resuming on {device}: interrupted at step 37 of 80, compared with a run that was not\n")
    print("| forward in | micro-batches to a step | weights and average bit-identical | history the same |")
    print("|---|---|---|---|")
    torch.use_deterministic_algorithms(True)
    for kind, micro in (("off", 1), ("bf16", 1), ("fp16", 1), ("off", 4), ("fp16", 4)):
        config = TrainConfig(num_epochs=5 * micro, ema_decay=0.9, accumulation_steps=micro, checkpoint_every=10)
        config = replace(config, device=device, scheduler_type="onecycle", learning_rate=3e-3)
        config = config if kind == "off" else replace(config, use_amp=True, amp_dtype=kind)
        with tempfile.TemporaryDirectory() as folder:
            whole = trainer(config, Surroundings(run_dir=False))
            whole.train(*data())
            around = Surroundings(run_dir=False, checkpoint_dir=Path(folder))
            try:
                trainer(config, around, before_step=_interrupt).train(*data())
            except KeyboardInterrupt:
                again = trainer(config, around)
                again.train(*data(), resume="auto")
        same = all(torch.equal(a, b) for a, b in zip(_state(whole), _state(again), strict=True))
        told = whole.history.column("val_loss") == again.history.column("val_loss")
        print(f"| {kind} | {micro} | {'yes' if same else 'NO'} | {'yes' if told else 'NO'} |")
        expected.that(same and told, f"resuming {kind}, {micro} to a step: is exact")
    torch.use_deterministic_algorithms(False)
    print()


def _interrupt(run: Trainer) -> None:
    if run.course.steps_done == 37:
        raise KeyboardInterrupt


def _state(run: Trainer) -> list[torch.Tensor]:
    rig: Any = run.last_rig
    return [*run.model.state_dict().values(), *rig.ema.state_dict().values()]


def main() -> int:
    """Run everything; 1 if something was expected and not seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", help="one recipe")
    parser.add_argument("--workers", type=int, default=6)
    given = parser.parse_args()
    logging.getLogger("trimtab").setLevel(logging.CRITICAL)
    names = [name for name, _ in RECIPES if given.only in (None, name)]
    expected, began = Expected(), time.monotonic()
    where = torch.cuda.get_device_name() if given.device.startswith("cuda") else "CPU"
    print(f"# trimtab train on {where}, torch {torch.__version__}\n")
    precision(given.device, expected)
    resuming(given.device, expected)
    speed(names, given.device)
    recipes(names, given.device, given.workers, expected)
    print(
        f"{expected.num - len(expected.failed)} of {expected.num} expectations met in {time.monotonic() - began:.0f} s"
    )
    for what in expected.failed:
        print(f"- not met: {what}")
    return 1 if expected.failed else 0


if __name__ == "__main__":
    sys.exit(main())
