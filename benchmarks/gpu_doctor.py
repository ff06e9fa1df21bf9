"""Doctor and drill on a GPU: every project of tests/doctor moved there whole, sound and broken.

`PYTHONPATH=src:. python benchmarks/gpu_doctor.py [--device cuda] [--only TEXT] [--out FILE]`

A project is built on the CPU and then moved: model, average, criterion, everything its step function holds, and each
batch as it leaves the loader. What cannot be moved so is counted apart and named.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tests.doctor.bench import PROJECTS, Mutation, Verdict, ask, build
from tests.doctor.lookalikes import LOOKALIKES
from tests.doctor.mutations import MUTATIONS
from torch import nn
from torch.utils.data import DataLoader

from trimtab.train.evaluation import to_device


class Moved:
    """A loader whose batches arrive on the device."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __iter__(self) -> Any:
        return (to_device(batch, self.device) for batch in self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def moved(built: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The project on the device: parameters stay the same objects, so its optimizer still has them."""
    seen: set[int] = set()
    for key in ("model", "ema", "loss_fn", "step_fn"):
        _move(built.get(key), device, seen)
    for optimizer in _optimizers(built["optimizer"]):
        for state in optimizer.state.values():
            state.update({k: v.to(device) for k, v in state.items() if isinstance(v, torch.Tensor) and k != "step"})
    for key in ("loader", "val_loader"):
        loader = built.get(key)
        if isinstance(loader, DataLoader) and loader.num_workers == 0:
            collate = loader.collate_fn
            loader.collate_fn = lambda rows, collate=collate: to_device(collate(rows), device)
        elif loader is not None:
            built[key] = Moved(loader, device)
    return built


def _optimizers(given: Any) -> list[Any]:
    several = given.values() if isinstance(given, dict) else given if isinstance(given, list | tuple) else [given]
    return [getattr(one, "optimizer", one) for one in several]


def _move(thing: Any, device: torch.device, seen: set[int]) -> None:
    if thing is None or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, nn.Module):
        thing.to(device)
    elif isinstance(thing, torch.Tensor):
        thing.data = thing.data.to(device)
    elif isinstance(thing, dict):
        for one in thing.values():
            _move(one, device, seen)
    elif isinstance(thing, list | tuple):
        for one in thing:
            _move(one, device, seen)
    for cell in getattr(thing, "__closure__", None) or ():
        _move(cell.cell_contents, device, seen)


def examined(project: str, mutation: Mutation | None, device: torch.device) -> Verdict | str:
    """What doctor says about the moved project, or why it cannot be asked."""
    grad = torch.is_grad_enabled()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = moved(build(project, mutation), device)
            torch.set_grad_enabled(grad)
            return ask(built, **(mutation.options if mutation else {}))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:140]}"
    finally:
        torch.set_grad_enabled(grad)


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sound-only", action="store_true")
    parser.add_argument("--shard", default="0/1", help="0/4: the first quarter, for several processes at once")
    args = parser.parse_args()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    lines = ["# Doctor on a GPU", "", f"torch {torch.__version__}, {name}", ""]
    began = time.perf_counter()

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    first, of = map(int, args.shard.split("/"))
    sound: list[tuple[str, Mutation | None]] = [(p, None) for p in PROJECTS]
    sound += [(p, one) for one in LOOKALIKES for p in one.projects]
    broken = [] if args.sound_only else [(p, one) for one in MUTATIONS for p in one.projects]
    counts: Counter[str] = Counter()
    for project, mutation in sound[first::of]:
        label = project if mutation is None else f"{mutation.name} @ {project}"
        if args.only not in label:
            continue
        verdict = examined(project, mutation, device)
        if isinstance(verdict, str):
            counts["not asked"] += 1
            say(f"- not asked: {label}: {verdict}")
        elif verdict.fails or verdict.warns:
            counts["accused"] += 1
            say(f"- ACCUSED: {label}: fail {list(verdict.fails)} warn {list(verdict.warns)}")
            for line in verdict.report.lines:
                if line.name in verdict.fails + verdict.warns:
                    say(f"    {line.name}: {str(line)[:400]}")
        else:
            counts["silent"] += 1
    say(f"\nSound projects: {dict(counts)} in {time.perf_counter() - began:.0f} s\n")
    counts = Counter()
    for project, mutation in broken[first::of]:
        if args.only not in mutation.name:
            continue
        verdict = examined(project, mutation, device)
        if isinstance(verdict, str):
            kind = "not asked"
            say(f"- not asked: {mutation.name} @ {project}: {verdict}")
        else:
            kind = "first" if verdict.first in mutation.causes else "other" if verdict.first else "missed"
            if kind != "first":
                say(f"- {kind}: {mutation.name} @ {project}: {verdict.fails} {verdict.warns}")
        counts[("held: " if mutation.held else "") + kind] += 1
    say(f"\nBroken projects: {dict(counts)}; {time.perf_counter() - began:.0f} s in all")
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
