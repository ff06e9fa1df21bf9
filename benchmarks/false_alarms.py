"""Healthy programs under other seeds: every finding is a false alarm.

    python benchmarks/false_alarms.py [--seeds 12]

Runs the programs of `tests/runs/programs.py` with their seeds shifted, each under a guard with default settings.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.runs.programs import PROGRAMS, Ready, Setup, drive, unguarded

from trimtab import Finding, Guard


def findings(name: str) -> list[Finding]:
    """What a default guard says about one run of a healthy program."""
    guards: list[Guard] = []

    def make(setup: Setup) -> Callable[[Ready], Tensor]:
        guard = Guard.attach(setup.model, setup.optimizers, scaler=setup.scaler, run_dir=False)
        guards.append(guard)

        def step(ready: Ready) -> Tensor:
            for loss in ready.losses:
                guard.observe(loss=loss)
            return unguarded(setup, ready)

        return step

    drive(PROGRAMS[name], make)
    guards[0].close()
    return guards[0].findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    logging.getLogger("trimtab").setLevel(logging.CRITICAL)
    seed_as_written = torch.manual_seed
    alarmed = 0
    for shift in range(1, seeds + 1):
        torch.manual_seed = lambda seed, shift=shift: seed_as_written(
            seed + 7919 * shift
        )  # the programs seed themselves
        for name in PROGRAMS:
            if found := findings(name):
                alarmed += 1
                print(f"{name}, shift {shift}: {found[0]}", flush=True)
    print(f"{alarmed} of {seeds * len(PROGRAMS)} healthy runs with a finding")


if __name__ == "__main__":
    main()
