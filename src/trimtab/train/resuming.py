"""Where a training saves its checkpoints, what it saves after an epoch, and how it resumes.

It resumes from the newest sound checkpoint, from one of a folder, or from a file.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trimtab.checkpoint import state
from trimtab.checkpoint.checkpointer import Checkpointer
from trimtab.checkpoint.directory import entries
from trimtab.checkpoint.format.container import read
from trimtab.compat import checkpoint_pair as documented
from trimtab.core.errors import CheckpointError, InputError
from trimtab.train.device import AUTO
from trimtab.train.history import Course, History
from trimtab.train.settings import TrainConfig
from trimtab.train.stages import Rig, RunDir, Stage, Unguarded

BEST = "best_model"
HISTORY = "history.json"


def folder_of(root: Path | None, stages: Sequence[Stage], index: int) -> Path | None:
    """Where a stage keeps its checkpoints: in the folder itself, or in one below it if there are several stages.

    Example:
        >>> folder_of(Path("checkpoints"), (Stage(name="head"), Stage(name="all")), 1).as_posix()
        'checkpoints/2-all'
    """
    if root is None or len(stages) == 1:
        return root
    return root / f"{index + 1}-{stages[index].name}"


def run_dir_of(run_dir: RunDir, stages: Sequence[Stage], index: int) -> RunDir:
    """Where a stage records; None, True and False are passed on to the guard."""
    return run_dir if run_dir is None or isinstance(run_dir, bool) else folder_of(Path(run_dir), stages, index)


def save_history(folder: Path, history: History) -> None:
    """Write the history. If that fails, training continues."""
    try:
        history.save(folder / HISTORY)
    except OSError as error:
        log.warning("%s could not be written (%s); training continues", folder / HISTORY, error)


def whole(rig: Rig) -> dict[str, Any]:
    """All that a checkpoint holds, the optimizer under the label that a guard resumes by."""
    return {name: one for name, one in rig.kept.items() if one is not None} | {"optimizer": {"": rig.optimizer}}


def save_after_epoch(rig: Rig, metrics: Mapping[str, float], step: int) -> None:
    """Save the whole state with its metrics. If that fails, training continues."""
    if rig.checkpointer is None:
        return
    try:
        rig.checkpointer.save(step, metrics=metrics, **whole(rig))
    except CheckpointError as error:
        log.warning("the checkpoint after step %d could not be written: %s; training continues", step, error)


def save_best(root: Path | None, model: nn.Module, config: Mapping[str, object], metrics: Mapping[str, float]) -> None:
    """Save the weights that the best metric was measured on."""
    if root is None:
        return
    try:
        documented.save_checkpoint(root / BEST, model, include_optimizer=False, config=config, metrics=metrics)
    except CheckpointError as error:
        log.warning("the best model could not be written: %s; training continues", error)


def load_best(root: Path | None, model: nn.Module) -> bool:
    """Put the best weights so far into the model; False where none are saved."""
    if root is None or not (root / BEST).exists():
        return False
    return documented.load_checkpoint(root / BEST, model, load_optimizer=False)


def log_how_to_resume(error: BaseException, root: Path | None) -> None:
    """After a training that failed: log what is saved, and how to resume."""
    if root is None:
        return
    after = (
        "" if isinstance(error, KeyboardInterrupt | SystemExit) else ", with a lower rate or clip if it explodes again"
    )
    log.error(
        "training ended with %s; the history so far is in %s. To resume from the newest sound checkpoint: "
        "resume='auto' (trimtab train NAME --checkpoint-dir %s --resume auto)%s",
        type(error).__name__,
        root / HISTORY,
        root,
        after,
    )


log = logging.getLogger("trimtab")
QUIET: tuple[str, ...] = (
    "learning_rate",
    "scheduler_type",
    "num_epochs",
    "max_steps",
    "warmup_steps",
    "warmup_init_lr",
    "min_lr",
)
QUIET += ("pct_start", "div_factor", "gamma", "step_size", "t_mult")
QUIET += ("device", "lines", "full_every", "keep_last", "checkpoint_every")
"""Settings without a warning: the schedule warns about its own, and the others do not change the training."""
_STAGE = re.compile(r"\d+-.+")
SHORT = 50
"""An epoch of no more steps is saved at its end alone."""


def usual_checkpoint_every(config: TrainConfig, num_batches: int | None) -> int:
    """After how many steps a training saves within an epoch: 20 times, every 25 to 500 steps; 0 where it is short.

    Example:
        >>> [usual_checkpoint_every(TrainConfig(), num) for num in (50, 600, 100_000, None)]
        [0, 30, 500, 100]
    """
    if num_batches is None and config.max_steps is None:
        return 100
    steps = config.max_steps if num_batches is None else math.ceil(num_batches / config.accumulation_steps)
    steps = min(steps or 0, config.max_steps or steps or 0)
    return 0 if steps <= SHORT else min(max(steps // 20, 25), 500)


def checked_resume(resume: str | os.PathLike[str] | None, root: Path | None, *, guarded: bool = True) -> str | None:
    """What to resume from, checked before any work: InputError or CheckpointError for what cannot be resumed.

    `best` is the best model in `root`; `best_model.pth`, the documented name of that file, is the folder `best_model`.
    """
    if resume is None:
        return None
    if not guarded:
        raise InputError("a training without a guard keeps no checkpoints; leave resume out, or use a guard")
    if str(resume) == AUTO:
        if root is None:
            raise InputError(
                "there is nothing to resume from without checkpoints; give checkpoint_dir (--checkpoint-dir)"
            )
        return AUTO
    if str(resume) == "best" and root is None:
        raise InputError("'best' is best_model in the folder of checkpoints; give it: --checkpoint-dir")
    path = Path(root) / BEST if root is not None and str(resume) == "best" else stored_at(resume)
    if str(resume) == "best" and not path.exists():
        raise InputError(f"there is no sound checkpoint at {path}; train with --checkpoint-dir first")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give auto, a folder of checkpoints, or one of them")
    if not _holds_checkpoints(path):
        documented.read_checkpoint(path)
    return str(path)


def stored_at(path: str | os.PathLike[str]) -> Path:
    """Where a checkpoint of that name is: `best_model.pth`, say, is the folder `best_model` if there is no such file.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "best_model").mkdir()
        >>> stored_at(folder / "best_model.pth").name
        'best_model'
    """
    where = Path(path)
    if not where.exists() and where.suffix in (".pth", ".pt") and where.with_suffix("").is_dir():
        return where.with_suffix("")
    return where


def resume_from(
    resume: str | os.PathLike[str],
    root: Path | None,
    stages: Sequence[Stage],
    enter: Callable[[int], Rig],
    leave: Callable[[], None],
    load: Callable[[Path], bool],
) -> int:
    """Restore the state of a checkpoint and return its stage.

    `resume` is `auto` for the newest sound one in `root`, another folder of checkpoints, one of its `step-` folders,
    or what `save_checkpoint` wrote.
    """
    if str(resume) == AUTO:
        if root is None:
            raise InputError(
                "there is nothing to resume from without checkpoints; give checkpoint_dir (--checkpoint-dir)"
            )
        return _newest(root, stages, enter, leave)
    path = stored_at(resume)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give auto, a folder of checkpoints, or one of them")
    if _holds_checkpoints(path):
        return _newest(path, stages, enter, leave)
    index = stage_in(path, stages)
    rig = enter(index)
    if path.name in {entry.path.name for entry in entries(path.parent)}:
        contents = read(path)
        if contents.status.state == "bad" and contents.status.known:
            raise CheckpointError(f"{path} is bad: {contents.status.reason}; use another checkpoint")
        state.restore(contents.sections, strict=False, **whole(rig))
    elif not load(path):
        raise InputError(f"there is no sound checkpoint at {path}; the log says why. Give another path")
    return index


def stage_in(path: str | os.PathLike[str], stages: Sequence[Stage]) -> int:
    """The stage that the checkpoint at `path` was saved in, by its folder or its content; else the first."""
    folders = [f"{index + 1}-{stage.name}" for index, stage in enumerate(stages)]
    if (parent := Path(path).resolve().parent.name) in folders:
        return folders.index(parent)
    name = documented.read_checkpoint(path).get("stage")
    names = [stage.name for stage in stages]
    return names.index(name) if name in names else 0


def settle(rig: Rig, course: Course) -> None:
    """Warn about settings that differ from the checkpoint's, and apply them; drop gradients made under others."""
    rig.schedule.follow_plan()
    changed = {name: pair for name, pair in course.changed.items() if name not in QUIET}
    course.changed = {}
    if not changed:
        return
    text = "; ".join(f"{name} was {then}, is {now}" for name, (then, now) in changed.items())
    log.warning("the checkpoint was saved with other settings; those given now apply: %s", text)
    for group in rig.optimizer.param_groups:
        group |= {name: changed[name][1] for name in ("weight_decay", "momentum") if name in changed and name in group}
    if course.micro and changed.keys() & {"use_amp", "amp_dtype", "accumulation_steps"}:
        rig.optimizer.zero_grad(set_to_none=True)
        course.micro = 0


def _newest(root: Path, stages: Sequence[Stage], enter: Callable[[int], Rig], leave: Callable[[], None]) -> int:
    """Resume from the newest sound checkpoint of the last stage that has one; without any, start from the beginning."""
    folders = [folder_of(root, stages, index) or root for index in range(len(stages))]
    if strangers := [folder for folder in _folders(root) if folder not in folders]:
        there = ", ".join("a single stage" if folder == root else folder.name for folder in strangers)
        raise InputError(
            f"{root} holds checkpoints of other stages than those of this training: {there}; its stages are "
            f"{', '.join(stage.name for stage in stages)}. Give the stages they were saved in, or another folder"
        )
    for index in reversed(range(len(stages))):
        if not entries(folders[index]):
            continue
        rig = enter(index)
        own = rig.checkpointer is not None and rig.checkpointer.directory.resolve() == folders[index].resolve()
        other = None if own else Checkpointer(folders[index])
        if other is not None:
            found = other.resume(strict=False, **whole(rig))
        else:
            found = None if isinstance(rig.guard, Unguarded) else rig.guard.resume(strict=False)
        if found is not None:
            return index
        leave()
    log.warning("no checkpoint to resume from in %s: training starts from the beginning", root)
    return 0


def _folders(root: Path) -> list[Path]:
    """The folder itself and those of stages below it, as far as they hold checkpoints."""
    below = (
        sorted(path for path in root.iterdir() if _STAGE.fullmatch(path.name) and path.is_dir())
        if root.is_dir()
        else []
    )
    return [folder for folder in (root, *below) if entries(folder)]


def _holds_checkpoints(path: Path) -> bool:
    return path.is_dir() and bool(_folders(path))
