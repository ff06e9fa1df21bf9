"""What is printed, set and written around a training of pairs: banner, dry run, backend switches, memory, health."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab.compat.monitors.setup_validation import validate_training_setup
from trimtab.compat.monitors.training_health import HealthReport, TrainingHealthMonitor, format_health_report
from trimtab.core.errors import TrainingStopped
from trimtab.core.types import Record, Sample
from trimtab.doctor.checklist import Status, environment
from trimtab.doctor.examine import examine
from trimtab.doctor.observed_step import Options
from trimtab.doctor.target import check_target
from trimtab.train.device import choose_device
from trimtab.train.history import memory_peak
from trimtab.train.recipe import Settings
from trimtab.train.recipes.pairs.data import ANSWERS
from trimtab.train.trainer import Trainer

Say = Callable[[str], object]
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


class NormSink:
    """Tells the health monitor the gradient norm of every step, as the guard measured it."""

    def __init__(self, monitor: TrainingHealthMonitor) -> None:
        self._monitor = monitor

    def write(self, record: Record) -> None:
        """Add a step."""
        if isinstance(record, Sample) and record.phase == "train" and "grad_norm" in record.scalars:
            self._monitor.update_gradient_norm(record.scalars["grad_norm"])

    def close(self) -> None:
        """Nothing to close."""


def banner(settings: Settings, model: nn.Module, num_train: int, num_val: int) -> Iterator[str]:
    """The device and the environment, in lines."""
    options = Options(amp_dtype=settings["amp_dtype"], clip_grad_norm=settings["clip_grad_norm"], seed=settings["seed"])
    where = environment(options)
    yield "=" * 60
    yield "Device & Environment Banner"
    yield "=" * 60
    gpus = f" ({', '.join(where['gpus'])}, CUDA {where['cuda']})" if "gpus" in where else ""
    device = settings["device"] if settings["device"] != "auto" else where["device"]
    yield f"Device: {device}{gpus}, {where['cpus']} CPUs, {where['threads']} threads"
    yield f"trimtab {where['trimtab']}, torch {where['torch']}, Python {where['python']}, {where['platform']}"
    switches = ("amp_dtype", "clip_grad_norm", "cudnn_benchmark", "compile", "deterministic", "seed")
    yield ", ".join(f"{name} {settings[name]}" for name in switches)
    if settings["amp_dtype"] != "none" and choose_device(settings["device"]).type == "cpu":
        yield f"{settings['amp_dtype']} on a CPU that has no instructions for it is several times slower than float32"
    total = sum(p.numel() for p in model.parameters())
    yield f"Model: {type(model).__name__}, {total:,} parameters; {num_train:,} pairs to train on, {num_val:,} held out"
    yield "=" * 60


@contextmanager
def switched(settings: Settings, say: Say | None) -> Iterator[None]:
    """Set the backend by the flags, and restore it afterwards."""
    cudnn: Any = torch.backends.cudnn
    was = cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    variable = os.environ.get(CUBLAS)
    exact = settings["deterministic"]
    if exact and settings["cudnn_benchmark"] and say is not None:
        say("deterministic: cudnn_benchmark stays off, since it chooses algorithms by their speed")
    try:
        cudnn.benchmark = settings["cudnn_benchmark"] and not exact
        if exact:
            cudnn.deterministic = True
            os.environ.setdefault(CUBLAS, ":4096:8")
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = was[:2]
        torch.use_deterministic_algorithms(was[2], warn_only=warned)
        if variable is None:
            os.environ.pop(CUBLAS, None)


def compile_blocks(blocks: nn.ModuleList, width: int, say: Say | None) -> bool:
    """Compile the blocks of a model; where that does not work here, say so and leave them as they are."""
    try:
        for block in blocks:
            block.compile()
            block(torch.randn(2, 4, width, requires_grad=True)).sum().backward()
    except Exception as error:  # whatever a compiler may raise, training continues without it
        for block in blocks:
            block._compiled_call_impl = None
        if say is not None:
            text = " ".join(str(error).split())[:160]
            say(f"compile: not possible here ({type(error).__name__}: {text}); training continues without it")
        return False
    finally:
        blocks.zero_grad(set_to_none=True)
    return True


def memory_line(step: int, device: torch.device) -> str:
    """How much memory is taken: of the GPU, or of the process where there is none."""
    mib = 2.0**20
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device) / mib, torch.cuda.max_memory_allocated(device) / mib
        held = torch.cuda.memory_reserved(device) / mib
        return f"[GPU] Step {step:>4} | Allocated: {now:.0f} MiB | Reserved: {held:.0f} MiB | Peak: {peak:.0f} MiB"
    return f"[MEM] Step {step:>4} | Peak of the process: {memory_peak(device) / mib:.0f} MiB | no GPU"


def explain(settings: Settings, trainer: Trainer) -> None:
    """What a stage begins with: each group of the optimizer, and with --debug each parameter."""
    rig, say = trainer.rig, settings["say"]
    if say is None or rig is None or trainer.course.step:
        return
    report = validate_training_setup(trainer.model, rig.optimizer, scaler=rig.scaler, device=trainer.device)
    groups = [f"{one}; {rate:g} at its peak" for one, rate in zip(report.groups, rig.schedule.base_lrs, strict=True)]
    for line in (*groups, *report.warnings, *report.problems):
        say(f"{rig.stage.name}: {line}")
    if not settings["debug"]:
        return
    for name, parameter in trainer.model.named_parameters():
        what = "frozen" if not parameter.requires_grad else "no gradient" if parameter.grad is None else "learns"
        say(f"[DEBUG]   {name} {list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}: {what}")


def log_memory(settings: Settings, trainer: Trainer) -> None:
    """The line about memory, where it is due."""
    every, say, step = settings["gpu_log_interval"], settings["say"], trainer.course.steps_done
    if say is not None and every and step and step % every == 0:
        say(memory_line(step, trainer.device))


def report_health(trainer: Trainer, monitor: TrainingHealthMonitor, say: Say | None) -> HealthReport:
    """Sum up the run: the health report in lines, and as data."""
    for epoch in trainer.history.epochs:
        monitor.update_epoch_loss(epoch.get("val_loss", epoch["train_loss"]))
        if say is not None:
            peak = epoch["memory_peak_bytes"] / 2.0**20
            say(f"{epoch['stage']} epoch {epoch['epoch']}: memory peak {peak:.0f} MiB, {epoch['seconds']:.1f} s")
    last = trainer.history.epochs[-1] if trainer.history.epochs else {}
    monitor.update_per_class_accuracy({name: last[key] for name in ANSWERS if (key := f"accuracy_{name}") in last})
    report = monitor.get_health_report()
    if say is not None:
        for line in format_health_report(report).splitlines():
            say(line)
    return report


def write_files(folder: Path, trainer: Trainer, settings: Settings, report: HealthReport) -> None:
    """What a run leaves behind: its settings, history, health report and weights."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: value for name, value in settings.items() if name != "say"}
    (folder / "settings.json").write_text(json.dumps(plain, indent=2, default=str) + "\n", encoding="utf-8")
    (folder / "health_report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (folder / "health_report.txt").write_text(format_health_report(report) + "\n", encoding="utf-8")
    trainer.history.save(folder / "history.json")
    state = {name: t.detach().cpu().contiguous() for name, t in trainer.model.state_dict().items()}
    save_file(state, folder / "model.safetensors")


def dry_run(build: Callable[[], Mapping[str, object]], say: Callable[[str], object] | None) -> None:
    """Examine a training, say what was found, and stop where something is wrong."""
    report = examine(check_target(build()), Options(), again=lambda: check_target(build()))
    wrong = [f"{line.name}: {line.cause}" for line in report.lines if not line.ok]
    if say is not None:
        passed = len(report.of(Status.PASS))
        say(f"dry run: {passed} checks passed, {len(wrong)} did not, {len(report.of(Status.NA))} do not apply")
        for line in wrong:
            say(f"  {line}")
    if not report.ok:
        raise TrainingStopped(f"the dry run found {'; '.join(wrong)}")
