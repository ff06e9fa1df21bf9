"""The documented pair, `save_checkpoint` and `load_checkpoint`: one checkpoint under one path."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from trimtab.checkpoint import rng, state
from trimtab.checkpoint.directory import QUARANTINE, explaining
from trimtab.checkpoint.format import container
from trimtab.checkpoint.format.foreign import load_foreign, sections_of_foreign
from trimtab.checkpoint.format.manifest import Contents
from trimtab.checkpoint.inspect import snapshot_of
from trimtab.checkpoint.parts import Several, Stateful, listed, masks_of, plain_name
from trimtab.checkpoint.state import as_plain, cleaned, nonfinite
from trimtab.core.errors import CheckpointError, InputError
from trimtab.core.types import Snapshot
from trimtab.core.versions import versions

log = logging.getLogger("trimtab")
OWN = ("config", "train_history", "val_history")
BESIDE = "beside"  # buffers in the model's section that its state_dict leaves out


@explaining("the checkpoint could not be saved")
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Several = None,
    scheduler: Several = None,
    *,
    include_optimizer: bool = True,
    config: object = None,
    train_history: object = None,
    val_history: object = None,
    clean: bool = False,
    step: int = 0,
    metrics: Mapping[str, float] | None = None,
    scaler: Stateful | None = None,
    ema: nn.Module | None = None,
    loader: object = None,
    extra: Mapping[str, object] | None = None,
) -> Snapshot:
    """Save one checkpoint as the folder `path`, replacing the one that is there; durable on return.

    A state with a NaN or an Inf in weights, buffers, moments or average is refused: the snapshot is `bad`, lies in
    `quarantine/` beside `path`, and the earlier checkpoint stays. With `clean=True` the file gets zeros instead
    (the model does not), and is marked as repaired. `config` may be a dict, a dataclass or a namespace: it
    is stored as plain data. One process saves to one path.

    Example:
        >>> import tempfile, torch
        >>> model = nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = save_checkpoint(Path(folder) / "best", model, config={"lr": 0.1}, train_history=[0.5, 0.4])
        ...     wanted = model.weight.detach().clone()
        ...     _ = nn.init.zeros_(model.weight)
        ...     loaded = load_checkpoint(Path(folder) / "best", model)
        ...     content = read_checkpoint(Path(folder) / "best")
        >>> saved.state, loaded, bool((model.weight == wanted).all())
        ('candidate', True, True)
        >>> content["config"], content["train_history"], sorted(content["model_state_dict"])
        ({'lr': 0.1}, [0.5, 0.4], ['bias', 'weight'])
    """
    where = _place(path)
    container.check_place(where)
    own = {"config": as_plain(config), "train_history": train_history, "val_history": val_history}
    if taken := sorted(set(own) & set(extra or ())):
        raise InputError(f"extra holds {listed(taken)}, which save_checkpoint stores itself; give it another name")
    sections = state.capture(
        model=model,
        optimizer=optimizer if include_optimizer else None,
        scheduler=scheduler if include_optimizer else None,
        scaler=scaler,
        ema=ema,
        loader=loader,
        extra=own | dict(extra or {}),
    )
    masks = masks_of("model", model) | masks_of("ema", ema)
    bad = nonfinite(sections, allowed=masks)
    numbers = {name: float(value) for name, value in (metrics or {}).items()}
    beside = sorted(set(sections["model"]) - {plain_name(model, name) for name in model.state_dict()})
    meta = {"versions": versions(), "metrics": numbers, "repaired": bool(bad and clean), "verdict": {}, BESIDE: beside}
    if bad and not clean:
        return _refused(where, sections, bad, step, meta)
    if bad:
        log.warning(
            "%s: NaN or Inf in %s; zeros are saved instead, as asked: it is repaired, not sound", where, listed(bad)
        )
        sections = cleaned(sections, masks)
    container.replace_with(where, sections, step=step, meta=meta)
    return snapshot_of(where)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Several = None,
    scheduler: Several = None,
    *,
    load_optimizer: bool = True,
    scaler: Stateful | None = None,
    ema: nn.Module | None = None,
    loader: object = None,
) -> bool:
    """Put the checkpoint at `path` into these objects, all of it or nothing; False where there is nothing sound.

    Every checksum is compared first. False means that the objects are as they were, and the log says why: there is no
    checkpoint, it is damaged, or it holds a NaN. One that is sound but belongs to another model raises a
    `CheckpointError` that lists the differences. With `load_optimizer=False` only weights, buffers and `ema` are
    touched. `path` may be a `.pt`, `.pth` or `.safetensors` file of others with a state dict in it; nothing of it is
    executed.
    """
    where = _place(path)
    resuming = load_optimizer and optimizer is not None
    try:
        given = {"optimizer": optimizer, "scheduler": scheduler}
        sections = _sound_sections(where, given, masks_of("model", model) | masks_of("ema", ema))
    except CheckpointError as error:
        log.warning("nothing was loaded from %s: %s", where, error)
        return False
    if not load_optimizer:
        kept = ("model", "ema") if ema is not None else ("model",)
        sections, optimizer, scheduler, scaler, loader = {k: sections[k] for k in kept if k in sections}, *[None] * 4
    if not resuming:
        sections["rng"] = rng.capture()  # loading only weights leaves the random state alone
    with explaining(f"{where} could not be loaded"):
        state.restore(
            sections,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            ema=ema,
            loader=loader,
            strict=False,
        )
    return True


@explaining("the checkpoint could not be read")
def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint holds under the documented names; CheckpointError where it cannot be read or is damaged.

    `model_state_dict`, `config`, `train_history` and `val_history` are always there; `optimizer_state_dict` and
    `scheduler_state_dict` where they were saved (by label, where there were several); then `step`, `metrics`,
    `repaired` and whatever was given as `extra`.
    """
    where = _place(path)
    if where.is_file():
        sections, about = sections_of_foreign(load_foreign(where), where), {}
    else:
        contents = _read(where)
        sections, about = contents.sections, dict(contents.manifest.meta)
        about["step"] = contents.manifest.step
    model = {name: one for name, one in sections.get("model", {}).items() if name not in about.get(BESIDE, ())}
    found: dict[str, Any] = {"model_state_dict": model, **dict.fromkeys(OWN), **sections.get("extra", {})}
    for name in ("optimizer", "scheduler"):
        states = {label: entry["state"] for label, entry in sections.get(name, {}).items()}
        if states:
            found[f"{name}_state_dict"] = states["0"] if list(states) == ["0"] else states
    usual = {"step": 0, "metrics": {}, "repaired": False}
    return found | {name: about.get(name, value) for name, value in usual.items()}


def _place(path: str | os.PathLike[str]) -> Path:
    """The path, or where it leads to if it is a link: the link stays, what it names is replaced."""
    where = Path(path)
    return where.resolve() if where.is_symlink() else where


def _refused(
    where: Path, sections: dict[str, Any], bad: tuple[str, ...], step: int, meta: Mapping[str, Any]
) -> Snapshot:
    reason = f"{len(bad)} {'tensor holds' if len(bad) == 1 else 'tensors hold'} NaN or Inf: {listed(bad, 3)}"
    log.warning("%s is not saved: %s; it goes to quarantine, an earlier checkpoint stays as it is", where, reason)
    home = where.parent / QUARANTINE / where.name
    container.replace_with(home, sections, step=step, meta=meta, status="bad", reason=reason)
    return snapshot_of(home)


@explaining("it could not be read")
def _sound_sections(where: Path, given: Mapping[str, Several], masks: set[str]) -> dict[str, Any]:
    """The state at `where`, verified and finite; CheckpointError says why there is none."""
    if where.is_file():
        sections = sections_of_foreign(load_foreign(where), where, given)
    else:
        contents = _read(where)
        sections = dict(contents.sections)
        if contents.manifest.meta.get("repaired"):
            log.warning("%s was repaired when it was saved: it holds zeros where NaN or Inf were", where)
    if bad := nonfinite(sections, allowed=masks):
        raise CheckpointError(f"{len(bad)} of its tensors hold NaN or Inf: {listed(bad)}; use another checkpoint")
    return sections


def _read(where: Path) -> Contents:
    """The first sound one of the places where a killed save may have left it."""
    skipped = []
    for one in container.candidates(where):
        try:
            contents = container.read(one)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        if contents.status.state == "bad" and contents.status.known:
            skipped.append(f"{one} is bad: {contents.status.reason}")
            continue
        if not contents.status.known:  # you named it, and only `clean` marks these
            log.warning("%s: %s; it is loaded all the same, as you named it", one, contents.status.reason)
        for line in skipped:
            log.warning("%s; %s is used", line, one)
        return contents
    raise CheckpointError("; ".join(skipped) or f"{where} does not exist")
