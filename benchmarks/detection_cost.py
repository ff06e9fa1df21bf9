"""What judging one step costs the host: the time of `Brain.advance` on synthetic samples shaped like real ones."""

from __future__ import annotations

import gc
import logging
import math
import random
import statistics
import tempfile
import time
from dataclasses import replace

import numpy as np
import torch

from trimtab import Guard
from trimtab.core.config import Config
from trimtab.core.pipeline import Brain
from trimtab.core.types import FULL_COLUMNS, NORM_COLUMNS, Column, Kind, Layout, Sample
from trimtab.record.reader import read_run

LIMITS = {6: 60.0, 300: 250.0, 3_000: 1_000.0}
NUM_WARM, FULL_EVERY = 300, 50
Scalars = list[dict[str, float]]


def real_scalars() -> Scalars:
    """The scalars of a small real run, step by step, from its second full look on: whatever the sensors measure now."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    truth = torch.randn(8, 4)
    with tempfile.TemporaryDirectory() as folder:
        with Guard.attach(model, optimizer, mode="observe", run_dir=f"{folder}/run") as guard:
            for _ in range(FULL_EVERY + NUM_WARM):
                x = torch.randn(64, 8)
                target = (x @ truth).argmax(1)
                loss = torch.nn.functional.cross_entropy(model(x), target)
                loss.backward()
                guard.observe(loss=loss, batch=(x, target))
                optimizer.step()
                optimizer.zero_grad()
        return [dict(s.scalars) for s in read_run(f"{folder}/run").samples() if s.phase == "train"][FULL_EVERY:]


def synthetic(num_rows: int, num_steps: int, real: Scalars) -> list[Sample]:
    """A healthy run of `num_rows` gradients: a falling noisy loss, norms every step, a full table every 50th."""
    chance = random.Random(num_rows)
    noise = np.random.default_rng(num_rows)
    names = tuple(f"blocks.{i // 6}.part{i % 6}.weight" for i in range(num_rows))
    short = Layout(names=names, kinds=(Kind.GRAD,) * num_rows, numel=(64,) * num_rows, columns=NORM_COLUMNS)
    kinds = (Kind.GRAD, Kind.WEIGHT, Kind.UPDATE)
    full = Layout(
        names=names * 3,
        kinds=tuple(kind for kind in kinds for _ in names),
        numel=(64,) * 3 * num_rows,
        columns=FULL_COLUMNS,
    )
    size = noise.lognormal(0, 1, num_rows).astype(np.float32)
    samples = []
    for step in range(num_steps):
        grads = size * noise.lognormal(0, 0.2, num_rows).astype(np.float32)
        scalars = {
            **real[step % len(real)],
            "grad_norm": float(np.sqrt(np.square(grads).sum())),
            "loss": (0.3 + 2 * math.exp(-step / 400)) * chance.lognormvariate(0, 0.05),
        }
        if step % FULL_EVERY:
            samples.append(Sample(step=step, layout=short, table=grads[:, None], scalars=scalars))
            continue
        table = np.full((3 * num_rows, len(FULL_COLUMNS)), np.nan, np.float32)
        table[:, FULL_COLUMNS.index(Column.L2)] = np.concatenate([grads, 8 + 0 * size, 8e-3 * (1 + 0 * size)])
        table[:, FULL_COLUMNS.index(Column.ABSMAX)] = table[:, FULL_COLUMNS.index(Column.L2)] / 4
        table[:, FULL_COLUMNS.index(Column.MEAN)] = 1e-3 * noise.standard_normal(3 * num_rows)
        for column in (Column.NAN, Column.INF, Column.ZERO_FRAC, Column.UNDERFLOW_FRAC):
            table[:, FULL_COLUMNS.index(column)] = 0
        samples.append(Sample(step=step, layout=full, table=table, scalars=scalars))
    return samples


def measure(num_rows: int, num_steps: int, real: Scalars) -> tuple[list[float], int]:
    """Processor time (us) of each step behind the warm-up, and how many findings there were (there should be none)."""
    brain = Brain.from_config(Config(mode="observe"))
    samples = synthetic(num_rows, min(num_steps, 1_000) + NUM_WARM, real)
    times, findings = [], 0
    gc.disable()
    try:
        for step in range(num_steps + NUM_WARM):
            # Big tables are made once and used again: only the step number must go on.
            place = step if step < len(samples) else NUM_WARM + (step - NUM_WARM) % (len(samples) - NUM_WARM)
            sample = replace(samples[place], step=step)
            start = time.thread_time_ns()
            verdict, _ = brain.advance(sample, seen_at=step)
            taken = time.thread_time_ns() - start
            findings += len(verdict.findings)
            if step >= NUM_WARM:
                times.append(taken / 1_000)
    finally:
        gc.enable()
    return times, findings


def report(num_steps: int) -> str:
    """The cost at each size beside its limit."""
    torch.set_num_threads(1)
    logging.getLogger("trimtab").setLevel(logging.CRITICAL)
    real = real_scalars()
    lines = ["gradient rows   median us   mean us   full-table steps, median us   limit us"]
    for num_rows, limit in LIMITS.items():
        times, findings = measure(num_rows, num_steps, real)
        # NUM_WARM is a multiple of FULL_EVERY, so every 50th of the timed steps has a full table.
        full = statistics.median(times[::FULL_EVERY])
        mean = statistics.fmean(times)
        note = "" if mean <= limit else "   OVER THE LIMIT"
        note += f"   ({findings} findings)" if findings else ""
        lines.append(
            f"{num_rows:>13,}   {statistics.median(times):>9.1f}   {mean:>7.1f}   {full:>27.1f}   {limit:>8.0f}{note}"
        )
    return "\n".join(lines)
