"""Which line of the user's program an operation belongs to."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import Tensor

import trimtab
from trimtab.trace.values import named_tensors

MAX_FRAMES, MAX_TENSORS = 2, 64
"""How far to look for the variables of a loop."""

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(trimtab.__file__).parent) + os.sep
_OUR_MACHINERY = tuple(_OURS + name + os.sep for name in ("trace", "guard", "torchutil", "sample", "core"))
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = os.path.join("site-packages", "")
_ENGINE = ("_engine_run_backward",)
_SKIPPED = ("<frozen", "<string>", "<eval_with_key>")
_kinds: dict[CodeType, str] = {}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of source."""

    code: CodeType
    number: int

    @property
    def file(self) -> str:
        """Where it is."""
        return self.code.co_filename

    @property
    def function(self) -> str:
        """The function it is in."""
        return self.code.co_qualname

    @property
    def text(self) -> str:
        """The line itself; empty where the source cannot be read."""
        return linecache.getline(self.file, self.number).strip()


@dataclass(frozen=True, slots=True)
class Lines:
    """The innermost line of the user's, and whether it runs inside of a backward pass that autograd drives."""

    line: Line | None = None
    in_backward: bool = False
    in_optimizer: bool = False


def current_line() -> Lines:
    """The innermost line outside of PyTorch and of what replays a step here.

    In a backward pass that is a line of the user's own `backward`, or of a forward that is computed again
    (checkpointing); the line that called `backward()` says nothing of the operation, and does not count. On an
    accelerator such a pass runs in a thread of its own, which begins in nobody's line.

    Example:
        >>> current_line().line.function
        '<module>'
    """
    frame: FrameType | None = sys._getframe(1)
    in_optimizer = False
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code) or _kind_of(code)
        if kind == "user":
            return Lines(Line(code, frame.f_lineno), in_optimizer=in_optimizer)
        if kind == "engine":
            return Lines(in_backward=True)
        if kind == "ours":
            break
        in_optimizer = in_optimizer or kind == "optimizer"
        frame = frame.f_back
    return Lines(in_optimizer=in_optimizer)


def callers_tensors() -> dict[str, Tensor]:
    """Tensors without a gradient in the variables of the loop that is making a step, by name: its targets, most likely.

    Only read. Numbers by themselves, such as a loss that was logged, are left out.

    Example:
        >>> def loop(y):
        ...     return callers_tensors()
        >>> sorted(loop(torch.ones(3)))
        ['y']
    """
    found: dict[str, Tensor] = {}
    frame: FrameType | None = sys._getframe(1)
    looked = 0
    while frame is not None and looked < MAX_FRAMES:
        if (_kinds.get(frame.f_code) or _kind_of(frame.f_code)) == "user":
            looked += 1
            for name, value in list(frame.f_locals.items()):
                for way, tensor in (
                    named_tensors(value, name) if isinstance(value, Tensor | Mapping | list | tuple) else ()
                ):
                    if tensor.dim() and not tensor.requires_grad and not tensor.is_meta and len(found) < MAX_TENSORS:
                        found.setdefault(way, tensor)
        frame = frame.f_back
    return found


def _kind_of(code: CodeType) -> str:
    file = code.co_filename
    if file.startswith(_TORCH):
        kind = "optimizer" if file.startswith(os.path.join(_TORCH, "optim", "")) else "torch"
        if code.co_name in _ENGINE:
            kind = "engine"
    elif file.startswith(_OUR_MACHINERY):
        kind = "ours"
    elif file.startswith(_SKIPPED) or (file.startswith(_STANDARD) and _PACKAGES not in file):
        kind = "torch"  # nobody's program either
    else:
        kind = "user"
    if file == os.path.join(_OURS, "trace", "op_watch.py"):
        kind = "torch"  # the watch itself, between an operation and its caller
    _kinds[code] = kind
    return kind
