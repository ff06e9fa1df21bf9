"""Doctor and drill on a GPU: every project of tests/doctor moved there whole, sound and broken.

`PYTHONPATH=src:. python benchmarks/gpu_doctor.py [--device cuda] [--only TEXT] [--shard 0/8]`

A project is built on the CPU and then moved: model, average, criterion, everything its step function holds, and each
batch as it leaves the loader. What cannot be moved so is counted apart and named.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch
from tests.doctor.bench import FOLDER, PROJECTS, Mutation, Verdict, ask, build
from tests.doctor.lookalikes import LOOKALIKES
from tests.doctor.mutations import MUTATIONS
from torch import nn
from torch.utils.data import DataLoader

from trimtab.doctor.observed_step import is_lost
from trimtab.train.device import to_device


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
        if isinstance(loader, DataLoader):  # doctor, and what wraps the step, move its batches as a loop would
            loader.pin_memory = device.type == "cuda"
        elif loader is not None:
            built[key] = Moved(loader, device)
    if built.get("step_fn"):
        built["step_fn"] = _there(built["step_fn"], device)
    else:
        built["model"].forward = _there(built["model"].forward, device)
    return built


def _there(function: Any, device: torch.device) -> Any:
    """The function, with what it makes for itself made on the device."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with device:
            return function(*(to_device(one, device) for one in args), **kwargs)

    return call


def on_device(project: str, mutation: Mutation | None, device: torch.device) -> dict[str, Any]:
    """The project with its autocast and its scaler meant for the device, built and moved."""
    text = (FOLDER / f"{project}.py").read_text()
    edits = tuple(mutation.edits) if mutation else ()
    for old in ('autocast("cpu"', 'GradScaler("cpu"'):
        if any(old in one for one in (text, *(new for _, new in edits))):
            edits = tuple((a, b.replace(old, old.replace("cpu", device.type))) for a, b in edits)
            edits += ((old, old.replace("cpu", device.type)),) if old in text else ()
    base = mutation or Mutation(name="moved", projects=(project,), causes=())
    return moved(build(project, replace(base, edits=edits)), device)


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
            built = on_device(project, mutation, device)
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
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--sound-only", action="store_true")
    parser.add_argument("--shard", default="0/1", help="0/4: the first quarter, for several processes at once")
    args = parser.parse_args()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if not args.begin:
        print(f"doctor on {name}, torch {torch.__version__}", flush=True)

    def say(line: str) -> None:
        print(line, flush=True)

    first, of = map(int, args.shard.split("/"))
    items: list[tuple[str, Mutation | None, bool]] = [(p, None, True) for p in PROJECTS]
    items += [(p, one, True) for one in LOOKALIKES for p in one.projects]
    items += [] if args.sound_only else [(p, one, False) for one in MUTATIONS for p in one.projects]
    items = [one for one in items if args.only in f"{one[0]} {one[1].name if one[1] else ''}"][first::of]
    for i, (project, mutation, sound) in enumerate(items):
        if i < args.begin:
            continue
        label = project if mutation is None else f"{mutation.name} @ {project}"
        verdict = examined(project, mutation, device)
        if isinstance(verdict, str):
            say(f"- not-asked {'sound' if sound else 'broken'}: {label}: {verdict}")
        elif sound:
            say(f"- {'ACCUSED' if verdict.first else 'silent'} {verdict.seconds:.1f} s: {label}: {verdict.first}")
            for line in verdict.report.lines:
                if line.name in verdict.fails + verdict.warns:
                    say(f"    {line.name}: {line.cause} {line.evidence[:300]}")
        else:
            assert mutation is not None
            kind = "first" if verdict.first in mutation.causes else "other" if verdict.first else "missed"
            held = " (held)" if mutation.held else ""
            say(f"- {kind}{held} {verdict.seconds:.1f} s: {label}: {verdict.fails} {verdict.warns}")
        told = verdict if isinstance(verdict, str) else " ".join(line.evidence for line in verdict.report.lines)
        if is_lost(told) or "the GPU has failed" in told:  # the next one needs a process whose GPU answers
            os.execv(sys.executable, [sys.executable, *_without_begin(sys.argv), "--begin", str(i + 1)])


def _without_begin(argv: list[str]) -> list[str]:
    at = argv.index("--begin") if "--begin" in argv else len(argv)
    return argv[:at]


if __name__ == "__main__":
    main()
