"""Launches recorded as a CUDA graph of our own, which one call replays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("trimtab")


def recorded(device: torch.device, launch: Callable[[], None]) -> Any:
    """What replays the launches as one graph; None where that does not work. Nothing is run."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            # Relaxed: what other threads do meanwhile, and objects that Python deletes just now, do not matter.
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                launch()
            finally:
                graph.capture_end()
    except Exception as error:
        log.debug("launches cannot be recorded as a graph (%s); they go out one by one", error)
        return None
    return super(torch.cuda.CUDAGraph, graph).replay  # without the frame of Python around it
