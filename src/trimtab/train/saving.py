"""Where the checkpoints of a training lie, and what is saved after an epoch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trimtab.compat import checkpoint_pair as documented
from trimtab.core.errors import CheckpointError
from trimtab.train.history import History
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


def run_dir_of(run_dir: Any, stages: Sequence[Stage], index: int) -> Any:
    """Where a stage records: what None, True and False mean to a guard stays so."""
    return run_dir if run_dir is None or isinstance(run_dir, bool) else folder_of(Path(run_dir), stages, index)


def save_history(folder: Path, history: History) -> None:
    """Write the history; a disk that is full costs the file, not the run."""
    try:
        history.save(folder / HISTORY)
    except OSError as error:
        log.warning("%s could not be written (%s); training goes on", folder / HISTORY, error)


def whole(rig: Rig) -> dict[str, Any]:
    """All that a checkpoint holds, the optimizer under the label that a guard resumes by."""
    return {name: one for name, one in rig.kept.items() if one is not None} | {"optimizer": {"": rig.optimizer}}


def save_after_epoch(rig: Rig, metrics: Mapping[str, float], step: int) -> None:
    """Save the whole state, with its metrics; a failure costs the checkpoint, not the run."""
    if rig.checkpointer is None:
        return
    try:
        rig.checkpointer.save(step, metrics=metrics, **whole(rig))
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


def tell_how_to_go_on(error: BaseException, root: Path | None) -> None:
    """After a training that ended before its time: what is left of it, and what to do."""
    if root is None:
        return
    after = (
        "" if isinstance(error, KeyboardInterrupt | SystemExit) else ", with a lower rate or clip if it explodes again"
    )
    log.error(
        "training ended with %s; the history so far is in %s. To go on from the newest sound checkpoint: "
        "resume='auto' (trimtab train NAME --checkpoint-dir %s --resume auto)%s",
        type(error).__name__,
        root / HISTORY,
        root,
        after,
    )
