"""What a guard needs to begin and to report: where to record, what is being trained, how it is doing."""

from __future__ import annotations

import datetime
import errno
import logging
import os
import socket
import sys
import traceback
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
from trimtab.record.reader import is_of_rank
from trimtab.record.recorder import Recorder
from trimtab.record.sinks import adapt
from trimtab.record.writer import RunWriter
from trimtab.sample.reduce import OneRun
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
    one: OneRun | None = None,
) -> tuple[Recorder, Path | None]:
    """The recorder with every sink, and the run directory; one that cannot be written costs a warning, not the run.

    The record's first line, which `info` makes, is on disk before this returns.
    """
    if level := os.environ.get("TRIMTAB_LOG_LEVEL"):
        log.setLevel(level.upper())
    outlets: list[tuple[str, Sink]] = [(_called(s), adapt(s)) for s in sinks]
    folder = folder_for(config, run_dir, OneRun.here() if one is None else one)
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
    for _, sink in outlets:
        recorded_to = getattr(sink, "recorded_to", None)
        if callable(recorded_to) and folder is not None:
            recorded_to(folder)
    recorder = Recorder(outlets)
    recorder.put(opening)
    return recorder, folder


def folder_for(config: Config, run_dir: str | os.PathLike[str] | bool | None, one: OneRun) -> Path | None:
    """The folder to record to; None for nowhere. The folders of processes that train together lie in rank 0's."""
    if not config.record or run_dir is False:
        one.settled(None, None)
        return None
    if run_dir is not None and run_dir is not True:
        given = Path(run_dir)
        folder = _unused(one.inside(given) or given)
        one.settled(given, folder)
        return folder
    if not one.is_several:
        return Path(config.dir) / _run_id()
    folder = Path(config.dir) / one.id(_new_id())
    one.settled(None, folder)
    return folder / f"rank-{one.rank}" if one.rank else folder


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


def _new_id() -> str:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return f"{now}-{os.getpid():05d}-{os.urandom(2).hex()}"


def _run_id() -> str:
    """With the rank of a process that was started with others and does not know them yet."""
    rank = os.environ.get("RANK", "0")
    return _new_id() + ("" if rank == "0" else f"-rank{rank}")


def run_info(config: Config, model: nn.Module, optimizers: Mapping[str, object], folder: Path | None) -> RunInfo:
    """The first line of the record."""
    return RunInfo(
        run_id="" if folder is None else _named(folder),
        started=datetime.datetime.now(datetime.UTC).isoformat(),
        config=config.to_dict(),
        versions={**versions(), "torch": torch.__version__},
        model=model_name(model),
        num_parameters=sum(p.numel() for p in model.parameters()),
        optimizers=tuple(optimizers),
        rules=tuple(rule.code for rule in select_rules(config)),
        script=_script(),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def model_name(model: nn.Module) -> str:
    """What people call a model: its class, of a compiled one that of the model inside."""
    return model.title if isinstance(model, Parts) else type(getattr(model, "_orig_mod", model)).__name__


def _script() -> str:
    """What is being run, as a person would call it."""
    if "ipykernel" in sys.modules:
        return "notebook"
    given = getattr(sys, "argv", [""])[:1] or [""]
    return os.path.basename(given[0]) if given[0] not in ("", "-c") else "python"


def _named(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}" if is_of_rank(folder) else folder.name


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


def under_way(*, in_step: bool) -> Exception | None:
    """The exception being handled while a guard is closed, if it ended a training step; not one of ours, or no error.

    What a script raises between two steps says nothing about its training.
    """
    error = sys.exc_info()[1]
    if not isinstance(error, Exception) or isinstance(error, TrimtabError | StopIteration):
        return None
    return error if in_step or _is_of_torch(error) else None


_TORCH = os.path.dirname(torch.__file__) + os.sep
_AROUND = tuple(
    os.path.join(_TORCH, part) for part in ("distributed", "multiprocessing", os.path.join("utils", "_context"))
)
"""Code that only calls what is not its own: launchers of scripts, `@torch.no_grad()`."""
_OF_A_DEVICE = ("CUDA error", "HIP error")
"""What fails on a device is raised by the next call that waits for it, such as the script's own `loss.item()`."""


def _is_of_torch(error: Exception) -> bool:
    """Whether PyTorch raised it, or ran what did: a forward pass, a loader, an optimizer; not a launcher of it."""
    if type(error).__module__.startswith("torch") or str(error).startswith(_OF_A_DEVICE):
        return True
    places = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(place.startswith(_TORCH) and not place.startswith(_AROUND) for place in places)


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
