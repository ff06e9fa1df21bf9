"""Where the checkpoints of a training lie, what is saved after an epoch, and which stage to go on in."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trimtab.core.errors import CheckpointError, InputError
from trimtab.recover import documented
from trimtab.recover.checkpointer import Checkpointer
from trimtab.train.device import AUTO
from trimtab.train.rig import Rig
from trimtab.train.stages import Stage

log = logging.getLogger("trimtab")
BEST = "best_model"
HISTORY = "history.json"


def folder_of(root: Path | None, stages: Sequence[Stage], index: int) -> Path | None:
    """Where a stage keeps its checkpoints: in the folder itself, or below it under its name where there are several.

    Example:
        >>> folder_of(Path("checkpoints"), (Stage(name="head"), Stage(name="all")), 1).as_posix()
        'checkpoints/2-all'
    """
    if root is None or len(stages) == 1:
        return root
    return root / f"{index + 1}-{stages[index].name}"


def save_after_epoch(rig: Rig, metrics: Mapping[str, float], step: int) -> None:
    """Save the whole state, with its metrics; a failure costs the checkpoint, not the run."""
    if rig.checkpointer is None:
        return
    given = {name: one for name, one in rig.kept.items() if one is not None}
    given["optimizer"] = {"": rig.optimizer}  # under the label that a guard resumes by
    try:
        rig.checkpointer.save(step, metrics=metrics, **given)
    except CheckpointError as error:
        log.warning("the checkpoint after step %d could not be written: %s; training goes on", step, error)


def save_best(root: Path | None, model: nn.Module, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Save the weights that the best metric was measured on."""
    if root is None:
        return
    try:
        documented.save_checkpoint(root / BEST, model, include_optimizer=False, config=config, metrics=metrics)
    except CheckpointError as error:
        log.warning("the best model could not be written: %s; training goes on", error)


def newest_stages(root: Path | None, stages: Sequence[Stage]) -> list[int]:
    """The stages that have checkpoints, the last one first."""
    if root is None:
        raise InputError("there is nothing to resume from without checkpoints; give checkpoint_dir (--checkpoint-dir)")
    folders = {index: folder_of(root, stages, index) for index in range(len(stages))}
    there = [index for index, folder in folders.items() if folder is not None and folder.is_dir()]
    return [index for index in reversed(there) if Checkpointer(folders[index] or root).list()]


def stage_in(path: str | os.PathLike[str], stages: Sequence[Stage]) -> int:
    """The stage that the checkpoint at `path` was saved in; the first where it does not say."""
    name = documented.read_checkpoint(path).get("stage")
    names = [stage.name for stage in stages]
    return names.index(name) if name in names else 0


def go_on(
    resume: str | os.PathLike[str],
    root: Path | None,
    stages: Sequence[Stage],
    enter: Callable[[int], Rig],
    leave: Callable[[], None],
    load: Callable[[Any], bool],
) -> int:
    """Put the state of a checkpoint in place: the newest sound one (`auto`), or the one at a path; its stage."""
    if str(resume) != AUTO:
        index = stage_in(resume, stages)
        enter(index)
        if not load(resume):
            raise InputError(f"there is no sound checkpoint at {resume}; the log says why. Give another path")
        return index
    for index in newest_stages(root, stages):
        if enter(index).guard.resume() is not None:
            return index
        leave()
    log.info("no checkpoint to resume from in %s: training begins anew", root)
    return 0


def tell_how_to_go_on(error: BaseException, root: Path | None) -> None:
    """After a training that ended before its time: what is left of it, and what to do."""
    if root is None or not isinstance(error, Exception):
        return
    log.error(
        "training ended with %s; the history so far is in %s. To go on from the newest sound checkpoint: "
        "resume='auto' (trimtab train NAME --resume auto), with a lower rate or clip if it explodes again",
        type(error).__name__,
        root / HISTORY,
    )
