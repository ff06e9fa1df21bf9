"""What a trace finds out: where a bad value came from, why, by which samples, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any, Literal

Cause = Literal["input", "parameter", "op", "loss", "optimizer", "overflow", "unknown"]
Phase = Literal["forward", "backward", "optimizer"]
NUM_NAMED = 8
"""Samples that a sentence names one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One input of the op that made the bad value: what it was called, and what was in it."""

    name: str  # its place in the call: "self", "mat2", ...
    shape: tuple[int, ...]
    dtype: str
    smallest: float | None = None  # over the finite values
    largest: float | None = None
    num_zero: int = 0
    num_nan: int = 0
    num_inf: int = 0
    value: str = ""  # of arguments that are no tensors

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**_as_dict(self), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Operand:
        """What `to_json` made; fields of other versions are left out."""
        known = _known(cls, data)
        return cls(**{**known, "shape": tuple(int(n) for n in data.get("shape", ()))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The first op in execution order that made a non-finite value out of good ones.

    Example:
        >>> Origin(cause="op", why="the logarithm of 0", op="aten.log.default", module="head", samples=(3,)).sentence()
        'NaN or Inf first came from aten.log.default in head, by sample 3: the logarithm of 0.'
    """

    cause: Cause
    reason: str = ""  # "log-of-zero", "sqrt-at-zero", ... (reasons.py lists them with their remedies)
    op: str = ""  # "aten.log.default"
    phase: Phase = "forward"
    module: str = ""  # path in the model; "" outside of it
    file: str = ""
    line: int = 0
    code: str = ""  # the source line
    function: str = ""
    samples: tuple[int, ...] = ()  # rows of the batch, the smallest set that causes it
    dataset_indices: tuple[int, ...] = ()
    micro_batch: int | None = None  # under accumulation
    rank: int | None = None
    subject: str = ""  # the input, parameter or buffer that was bad already
    since: int | None = None  # the step since which it is
    operands: tuple[Operand, ...] = ()
    why: str = ""  # the reason in words
    remedy: str = ""
    notes: tuple[str, ...] = ()  # such as: the compiled module was replayed as the eager one

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        out = {k: list(v) if isinstance(v, tuple) else v for k, v in _as_dict(self).items()}
        out["operands"] = [one.to_json() for one in self.operands]
        return out

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Origin:
        """What `to_json` made; fields of other versions are left out."""
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in _known(cls, data).items()}
        known["operands"] = tuple(Operand.from_json(one) for one in data.get("operands", ()))
        return cls(**known)

    def sentence(self) -> str:
        """One plain sentence for the headline."""
        by = f", by {self.named_samples()}" if self.samples else ""
        micro = "" if self.micro_batch is None else f", in micro-batch {self.micro_batch}"
        rank = "" if self.rank is None else f", on rank {self.rank}"
        if self.cause in ("input", "parameter", "optimizer") and self.subject:
            since = "" if self.since is None else f" since step {self.since}"
            return f"NaN or Inf was already in {self.subject}{since}{by}{micro}{rank}."
        if not self.op:
            return f"Where NaN or Inf first came from is not known{by}{micro}{rank}."
        inside = f" in {self.module}" if self.module else ""
        way = " during backward" if self.phase == "backward" else ""
        place = f" ({PurePath(self.file).name}:{self.line})" if self.file else ""
        why = f": {self.why}" if self.why else ""
        return f"NaN or Inf first came from {self.op}{inside}{way}{place}{by}{micro}{rank}{why}."

    def named_samples(self) -> str:
        """The samples in words: `sample 17`, `samples 3 and 5`."""
        named = [str(i) for i in self.samples[:NUM_NAMED]]
        if len(self.samples) == 1:
            return f"sample {named[0]}"
        if len(self.samples) > NUM_NAMED:
            return f"samples {', '.join(named)} and {len(self.samples) - NUM_NAMED} more"
        return f"samples {', '.join(named[:-1])} and {named[-1]}"


def _as_dict(one: Any) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in fields(one)}


def _known(kind: Any, data: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {k: v for k, v in data.items() if k in names}
