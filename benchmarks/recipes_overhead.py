"""What a guard adds to a step of a recipe: four trainings of one seed that take turns, block by block, in one process.

The arms are the recipe without a guard, the same with `clip_grad_norm_` in front of each step (which a guard does, too,
beside everything else), the recipe under a guard that looks thoroughly every 50 steps as by default, and the recipe as
it is. Each runs in a thread of its own, and only the one whose turn it is goes on, so that whatever else the machine
does hits all of them alike. A guarded block ends when all of it is written.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

BARE, CLIPPED, USUAL, GUARDED = ARMS = ("bare", "clip_grad_norm_", "guard, full look every 50", "guard")
WARM = 1
"""The first blocks of each arm hold what is done once."""
OUTER = 0.1
"""The share of blocks left out on each side: another program's doing."""


class _Enough(Exception):
    """All rounds are done."""


@dataclass(slots=True)
class _Turns:
    """Whose turn it is."""

    names: list[str]
    now: int = 0
    broken: BaseException | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, name: str) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.broken is not None or self.names[self.now] == name)
            if self.broken is not None:
                raise _Enough

    def pass_on(self) -> None:
        with self.changed:
            self.now = (self.now + 1) % len(self.names)
            self.changed.notify_all()

    def stop(self, error: BaseException) -> None:
        with self.changed:
            self.broken = self.broken or error
            self.changed.notify_all()


def measure(recipe: str, rounds: int, block: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Milliseconds per step of each arm, by the clock and by the processor, and what each adds to the bare one in %."""
    turns = _Turns(list(ARMS))
    blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        threads = [
            threading.Thread(
                target=_arm, args=(name, recipe, dict(given), Path(folder), turns, blocks[name], rounds, block)
            )
            for name in ARMS
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if not isinstance(turns.broken, _Enough):
        raise RuntimeError(f"an arm of {recipe} ended early") from turns.broken
    whole = min(map(len, blocks.values()))
    out: dict[str, Any] = {"rounds": whole - WARM, "block": block}
    for name in ARMS:
        kept = blocks[name][WARM:whole]
        out[name] = {
            "wall_ms": statistics.median(wall for wall, _ in kept) / block,
            "processor_ms": statistics.median(spent for _, spent in kept) / block,
        }
    for mine in ARMS[1:]:
        for index, kind in enumerate(("wall", "processor")):
            pairs = zip(blocks[mine][WARM:whole], blocks[BARE][WARM:whole], strict=True)
            usual = out[BARE][f"{kind}_ms"] * block
            out[mine][f"{kind}_adds"] = _trimmed([100.0 * (one[index] - bare[index]) / usual for one, bare in pairs])
    return out


def _trimmed(shares: list[float]) -> tuple[float, float]:
    """The mean of the middle and its standard error."""
    cut = int(len(shares) * OUTER)
    kept = sorted(shares)[cut : len(shares) - cut]
    return statistics.fmean(kept), statistics.stdev(kept) / len(kept) ** 0.5


def _arm(
    name: str,
    recipe: str,
    given: dict[str, Any],
    folder: Path,
    turns: _Turns,
    blocks: list[tuple[float, float]],
    rounds: int,
    block: int,
) -> None:
    from trimtab.train.recipe import run_recipe
    from trimtab.train.recipes import load_recipe

    steps, began = 0, (0.0, 0.0)

    def clip(trainer: Any) -> None:
        limit = trainer.rig.stage.clip or trainer.config.max_grad_norm
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), limit)

    def count(trainer: Any) -> None:
        nonlocal steps, began
        steps += 1
        if steps % block:
            return
        trainer.rig.flush()
        wall, spent = time.perf_counter(), time.process_time()
        blocks.append((1000 * (wall - began[0]), 1000 * (spent - began[1])))
        if len(blocks) == rounds + WARM and name == ARMS[-1]:
            turns.stop(_Enough())
            raise _Enough
        turns.pass_on()
        turns.wait(name)
        began = (time.perf_counter(), time.process_time())

    chosen = load_recipe(recipe)

    def build(settings: Any) -> Any:
        parts = chosen.build(settings)
        return replace(
            parts,
            config=replace(parts.config, full_every=50) if name == USUAL else parts.config,
            before_step=clip if name == CLIPPED else parts.before_step,
            after_step=count,
        )

    try:
        turns.wait(name)
        began = (time.perf_counter(), time.process_time())
        run_recipe(
            replace(chosen, build=build),
            given,
            guarded=name in (USUAL, GUARDED),
            run_dir=folder / name if name in (USUAL, GUARDED) else False,
        )
        raise RuntimeError(f"{recipe} ended after {steps} steps, before {rounds} rounds of {block} were made")
    except _Enough:
        pass
    except BaseException as error:
        turns.stop(error)
