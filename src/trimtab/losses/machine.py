"""What a device can do, roughly: enough to tell seconds from hours, and what fits from what does not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

LINES = 1 << 24
"""Logits of one ``[B, B]`` matrix up to which it is kept for the backward pass."""

__all__ = ["LINES", "Machine", "free_bytes", "machine_of", "small_bytes", "tile_of"]

_PER_CORE = 6e10  # float32 products of one core; 9e10 was measured with AVX-512
_PER_SM = {"ieee": 3.0e11, "tf32": 1.7e12, "bf16": 3.4e12}  # measured on an H200, of 132
_DEFAULT_SMS = 132


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of one device, per second."""

    kind: str
    flops: float
    """Of large matrix products."""
    elements: float
    """Numbers that one plain pass over memory handles."""


def machine_of(device: torch.device, precision: str = "ieee", *, double: bool = False) -> Machine:
    """The rates of ``device``; of an H200 where a CUDA device is asked about that is not there."""
    slow = 2.0 if double else 1.0
    if device.type == "cuda":
        there = torch.cuda.is_available()
        count = torch.cuda.get_device_properties(device).multi_processor_count if there else _DEFAULT_SMS
        return Machine(kind="cuda", flops=count * _PER_SM[precision] / slow, elements=count * 2e9 / slow)
    cores = torch.get_num_threads()
    return Machine(kind=device.type, flops=cores * _PER_CORE / slow, elements=cores * 6e8 / slow)


def tile_of(device: torch.device) -> int:
    """Tuples of one tile where the caller does not say: what stays near a cache, or fills a card."""
    return 1 << 25 if device.type == "cuda" else 1 << 20


def small_bytes(device: torch.device) -> float:
    """Memory that is not worth asking for: the question takes longer than small losses do."""
    if device.type == "cuda" and torch.cuda.is_available():
        return 0.02 * torch.cuda.get_device_properties(device).total_memory
    return 2.0**26


def free_bytes(device: torch.device) -> float:
    """Memory a new tensor could get; infinite where nothing tells."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return float("inf")
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):  # with what the page cache would give back, unlike SC_AVPHYS_PAGES
                return float(line.split()[1]) * 1024
    except OSError:
        pages = {"SC_AVPHYS_PAGES", "SC_PAGE_SIZE"}
        if pages <= set(getattr(os, "sysconf_names", ())):
            return float(os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    return float("inf")
