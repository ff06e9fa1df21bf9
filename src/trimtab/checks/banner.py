"""Where a training is examined: versions, device, threads, precision."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from trimtab.checks.drive import Options
from trimtab.checks.target import Target


def environment(options: Options, target: Target | None = None) -> dict[str, Any]:
    """What a reader needs to repeat an examination, in plain data.

    Example:
        >>> environment(Options())["torch"] == torch.__version__
        True
    """
    from trimtab import __version__

    found: dict[str, Any] = {
        "trimtab": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "device": _device(target),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "amp_dtype": options.amp_dtype,
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "detect_anomaly": options.detect_anomaly,
        "clip_grad_norm": options.clip_grad_norm,
        "max_steps": options.max_steps,
        "seed": options.seed,
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if target is not None:
        params = list(target.model.parameters())
        found["model"] = type(target.model).__name__
        found["parameters"] = sum(p.numel() for p in params)
        found["trainable"] = sum(p.numel() for p in params if p.requires_grad)
        found["optimizers"] = [type(o).__name__ for o in target.optimizers]
    return found


def _device(target: Target | None) -> str:
    if target is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kinds = sorted({str(p.device) for p in target.model.parameters()})
    return ", ".join(kinds)
