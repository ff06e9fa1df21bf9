"""What a guard needs to begin and to report: where to record, what is being trained, how it is doing."""

from __future__ import annotations

import datetime
import errno
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab.checkpoint.loader import Quarantine
from trimtab.core.config import Config
from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.pipeline import Brain
from trimtab.core.registry import select_rules
from trimtab.core.types import Finding, RunInfo, Sink
from trimtab.core.versions import versions
from trimtab.record.recorder import Recorder
from trimtab.record.sinks import adapt
from trimtab.record.writer import RunWriter
from trimtab.sample.rows import Parts
from trimtab.sample.transfer import is_here

log = logging.getLogger("trimtab")

HOPELESS = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
"""Why a record cannot be begun, and could not a little later either. A full disk may have room then."""


def lag_for(config: Config, model: nn.Module) -> int:
    """The configured lag, else 0 where everything is on the CPU and 1 on accelerators."""
    if config.lag is not None:
        return config.lag
    return 0 if all(map(is_here, model.parameters())) else 1


def open_recorder(
    config: Config,
    run_dir: str | os.PathLike[str] | bool | None,
    sinks: Iterable[object],
    info: Callable[[Path | None], RunInfo],
) -> tuple[Recorder, Path | None]:
    """The recorder with every sink, and the run directory; one that cannot be written costs a warning, not the run.

    The record's first line, which `info` makes, is on disk before this returns.
    """
    if level := os.environ.get("TRIMTAB_LOG_LEVEL"):
        log.setLevel(level.upper())
    outlets: list[tuple[str, Sink]] = [(_called(s), adapt(s)) for s in sinks]
    folder = _folder_for(config, run_dir)
    opening = info(folder)
    while folder is not None:
        try:
            outlets.insert(0, ("run files", _begun(folder, opening, config.max_record_bytes)))
            break
        except OSError as error:
            taken = _unused(folder) if isinstance(error, FileExistsError) else folder
            if taken == folder:
                log.warning("cannot record to %s (%s); training goes on without a record", folder, error)
            folder = taken if taken != folder else None  # another process was there a moment before us
            opening = info(folder)
    recorder = Recorder(outlets)
    recorder.put(opening)
    return recorder, folder


def _folder_for(config: Config, run_dir: str | os.PathLike[str] | bool | None) -> Path | None:
    if not config.record or run_dir is False:
        return None
    return Path(config.dir) / _run_id() if run_dir is None or run_dir is True else _unused(Path(run_dir))


def _begun(folder: Path, opening: RunInfo, max_bytes: int) -> RunWriter:
    """A writer whose record is there, or will be once the disk takes it; OSError where there is no hope of that."""
    writer = RunWriter(folder, max_bytes=max_bytes)
    try:
        writer.open(opening)
    except OSError as error:
        if error.errno in HOPELESS:
            raise
        log.warning("cannot record to %s yet (%s); it is tried again", folder, error)
    return writer


def _unused(folder: Path) -> Path:
    """The folder, or one beside it where it already holds a run: two runs in one record could not be told apart."""
    if not (folder / "run.jsonl").exists():
        return folder
    free = next(p for i in count(2) if not ((p := folder.with_name(f"{folder.name}-{i}")) / "run.jsonl").exists())
    log.warning("%s already holds a run; recording to %s", folder, free)
    return free


def _called(sink: object) -> str:
    return sink if isinstance(sink, str) else type(sink).__name__


def _run_id() -> str:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    rank = os.environ.get("RANK", "0")
    return f"{now}-{os.getpid():05d}-{os.urandom(2).hex()}" + ("" if rank == "0" else f"-rank{rank}")


def run_info(config: Config, model: nn.Module, optimizers: Mapping[str, object], folder: Path | None) -> RunInfo:
    """The first line of the record."""
    return RunInfo(
        run_id=folder.name if folder is not None else "",
        started=datetime.datetime.now(datetime.UTC).isoformat(),
        config=config.to_dict(),
        versions={**versions(), "torch": torch.__version__},
        model=model.title if isinstance(model, Parts) else type(getattr(model, "_orig_mod", model)).__name__,
        num_parameters=sum(p.numel() for p in model.parameters()),
        optimizers=tuple(optimizers),
        rules=tuple(rule.code for rule in select_rules(config)),
    )


def state_of(lanes: Mapping[str, Any], brains: Mapping[str, Brain], quarantine: Quarantine) -> dict[str, Any]:
    """All that a guard has to remember, as plain data; what is still under way is judged first."""
    for lane in lanes.values():
        lane.drain()
    owners = {"lanes": lanes, "brains": brains}
    states = {kind: {label: one.state_dict() for label, one in some.items()} for kind, some in owners.items()}
    return {"version": 1, **states, "quarantine": quarantine.state_dict()}


def load_state(
    state: Mapping[str, Any], lanes: Mapping[str, Any], brains: Mapping[str, Brain], quarantine: Quarantine
) -> None:
    """Give each its state back; refused where they are for other optimizers."""
    for owners, states in ((brains, state["brains"]), (lanes, state["lanes"])):
        if set(states) != set(owners):
            raise InputError(
                f"the state is for optimizers {sorted(states)}, this guard has {sorted(owners)}; "
                "build it with the same optimizers, under the same keys"
            )
        for label, one in owners.items():
            one.load_state_dict(states[label])
    if "quarantine" in state:
        quarantine.load_state_dict(state["quarantine"])


def under_way() -> Exception | None:
    """The exception being handled while a guard is closed: what ended the run, unless it is one of ours or no error."""
    error = sys.exc_info()[1]
    ours = isinstance(error, TrimtabError | StopIteration)
    return error if isinstance(error, Exception) and not ours else None


# Which findings speak against which part of the documented health dictionary.
HEALTH_PARTS = {
    "gradients_healthy": ("GRAD", "AMP"),
    "losses_healthy": ("LOSS", "DATA", "CON"),
    "parameters_healthy": ("WGT", "UPD", "EMA"),
    "model_healthy": ("WGT", "ACT", "MODE", "OPT", "STEP", "DIST"),
}


def health_of(brains: Mapping[str, Brain], lanes: Mapping[str, Any], findings: Sequence[Finding]) -> dict[str, Any]:
    """Healthy or not, part by part: judged by the incidents that are open, and by whether updates are made at all."""
    steps = {label: lane.attempts for label, lane in lanes.items()}
    still = tuple(code for label, b in brains.items() for code in b.open_incidents(max(steps.get(label, 0) - 1, 0)))
    parts = {part: not any(code.startswith(families) for code in still) for part, families in HEALTH_PARTS.items()}
    idle = any(lane.kept_out and not lane.applied for lane in lanes.values())
    parts["parameters_healthy"] &= not idle
    return {
        **parts,
        "overall_healthy": not still and not idle,
        "open": list(dict.fromkeys(still)),
        "steps": steps,
        "applied": sum(lane.applied for lane in lanes.values()),
        "rejected": sum(lane.rejected for lane in lanes.values()),
        "findings": len(findings),
    }
