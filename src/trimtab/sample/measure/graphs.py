"""Launches recorded as a CUDA graph of our own, which one call replays."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("trimtab")


def recorded(device: torch.device, launch: Callable[[], None]) -> Any:
    """What replays the launches as one graph; None where that does not work. Nothing is run."""
    if torch.cuda.is_current_stream_capturing():
        return None  # a capture inside that of the loop would take its random numbers away
    graph = torch.cuda.CUDAGraph()
    try:
        _capture(graph, device, launch)
    except Exception as error:
        log.debug("launches cannot be recorded as a graph (%s); they go out one by one", error)
        _bring_back_random_numbers(device)
        return None
    return super(torch.cuda.CUDAGraph, graph).replay  # without the frame of Python around it


def _capture(graph: torch.cuda.CUDAGraph, device: torch.device, launch: Callable[[], None]) -> None:
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        # Relaxed: what other threads do meanwhile, and objects that Python deletes just now, do not matter.
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            launch()
        finally:
            graph.capture_end()


def _bring_back_random_numbers(device: torch.device) -> None:
    """After a capture that did not end well PyTorch's generator may still wait for its end: give it one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is empty, and meant to be
            _capture(torch.cuda.CUDAGraph(), device, lambda: None)
    except Exception as error:
        log.debug("a capture that records nothing failed as well (%s)", error)
