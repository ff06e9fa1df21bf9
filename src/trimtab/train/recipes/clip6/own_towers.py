"""A tower for each modality of a user's own samples: one that fits its kind, or the user's own (`--towers`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from trimtab.core.errors import InputError
from trimtab.core.suggest_name import instead_of
from trimtab.doctor.target import find_function
from trimtab.train.own_data.modalities import DEPTH, IMAGE, SERIES, TEXT, Modality
from trimtab.train.recipe import Settings
from trimtab.train.recipes.clip6.model import image_tower, series_tower, text_tower, vector_tower


def make_towers(modalities: Sequence[Modality], settings: Settings) -> list[nn.Module]:
    """The towers in the order of the modalities; those of `--towers module:function` come before ours.

    The function gets the modalities (name, kind, shape of a sample) and the width of an encoding, and returns a dict of
    modules by name; it may leave names out. Each module takes `[batch, *shape]` and returns `[batch, width]`.
    """
    given = _given(settings["towers"], modalities, settings["width"]) if settings["towers"] else {}
    return [given[one.name] if one.name in given else _tower(one, settings) for one in modalities]


def _tower(modality: Modality, settings: Settings) -> nn.Module:
    width, shape = settings["width"], modality.shape
    if modality.kind in (IMAGE, DEPTH):
        return image_tower(
            width, channels=settings["channels"], dropout=settings["dropout"], planes=shape[0], side=min(shape[1:])
        )
    if modality.kind == TEXT:
        return text_tower(shape[0], width, dropout=settings["text_dropout"])
    if modality.kind == SERIES:
        return series_tower(shape[0], width)
    return vector_tower(shape[0], width)


def _given(spec: str, modalities: Sequence[Modality], width: int) -> dict[str, nn.Module]:
    made = find_function(spec, "towers")(list(modalities), width)
    if not isinstance(made, Mapping):
        raise InputError(f"{spec} returned a {type(made).__name__}; expected a dict of modules by name")
    shapes = {one.name: one.shape for one in modalities}
    for name, tower in made.items():
        if name not in shapes:
            raise InputError(f"{spec} returned a tower for {name!r}; {instead_of(name, shapes)}")
        if not isinstance(tower, nn.Module):
            raise InputError(f"{spec}: the tower of {name!r} is a {type(tower).__name__}; expected a torch.nn.Module")
        _try(spec, name, tower, shapes[name], width)
    return dict(made)


def _try(spec: str, name: str, tower: nn.Module, shape: tuple[int, ...], width: int) -> None:
    """One pass of two samples: a tower of the wrong shape is known before any training."""
    was = tower.training
    tower.eval()
    try:
        with torch.no_grad():
            found = tower(torch.zeros(2, *shape))
    except Exception as error:  # whatever a user's module may raise
        raise InputError(
            f"{spec}: the tower of {name!r} fails on [2, {', '.join(map(str, shape))}]: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
    finally:
        tower.train(was)
    if tuple(getattr(found, "shape", ())) != (2, width):
        raise InputError(
            f"{spec}: the tower of {name!r} makes {list(getattr(found, 'shape', ()))} of two samples; expected "
            f"[2, {width}] (--width)"
        )
