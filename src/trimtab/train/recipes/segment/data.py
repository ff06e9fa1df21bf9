"""Camouflaged objects composed from real textures: an object differs from what is around it by its texture alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab.core.errors import InputError
from trimtab.data import load_textures

EVEN = ("brick", "grass", "gravel")
"""What an object may lie on."""
TRAIN_FRAC = 2 / 3
"""The left part of every picture is trained on; what is held out is composed from the rest alone."""
LOWEST_CONTRAST = 0.03
MIN_SIDE, MAX_SIDE = 16, 64

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenes:
    """Pictures `[num, 3, side, side]` around zero, and masks `[num, 1, side, side]` of 0 and 1."""

    images: Floats
    masks: Floats


def compose(num: int, side: int, seed: int, *, held_out: bool = False) -> Scenes:
    """That many scenes with one object each: a blob, an ellipse or a polygon.

    The object shows another picture than its surround, turned and mirrored at random, brought to the surround's mean
    and contrast in every channel. The masks are exact.

    Example:
        >>> scenes = compose(4, 32, seed=1)
        >>> scenes.images.shape, scenes.masks.shape, sorted(set(scenes.masks.ravel().tolist()))
        ((4, 3, 32, 32), (4, 1, 32, 32), [0.0, 1.0])
        >>> bool((compose(4, 32, seed=1).images == scenes.images).all())
        True
    """
    check_side(side)
    rng = np.random.default_rng([seed, int(held_out)])
    sources = _sources(held_out=held_out)
    names = list(sources)
    images, masks = np.empty((num, 3, side, side), np.float32), np.empty((num, 1, side, side), np.float32)
    for i in range(num):
        under = EVEN[rng.integers(len(EVEN))]
        over = names[rng.integers(len(names))]
        while over == under:
            over = names[rng.integers(len(names))]
        ground = _tinted(crop(sources[under], side, rng), rng)
        mask = outline(side, rng)
        object_ = _matched(crop(sources[over], side, rng), ground)
        images[i] = np.where(mask, object_, ground)
        masks[i, 0] = mask
    return Scenes(images=standardised(images), masks=masks)


def texture_crops(num: int, side: int, seed: int) -> tuple[Floats, NDArray[np.int64]]:
    """Crops of all the pictures, and which picture each is of: what a backbone is pre-trained on.

    Every crop has the same mean and contrast, so that only texture tells them apart.
    """
    check_side(side)
    rng = np.random.default_rng([seed, 2])
    sources = list(_sources(held_out=False).values())
    labels = rng.integers(len(sources), size=num)
    images = np.empty((num, 3, side, side), np.float32)
    for i, label in enumerate(labels):
        images[i] = _tinted(crop(sources[label], side, rng), rng)
    return standardised(images), labels


def standardised(images: Floats) -> Floats:
    """Colours from 0 to 1, around zero and about as wide as one."""
    return (images - np.float32(0.5)) / np.float32(0.2)


def check_side(side: int) -> None:
    """The side of a scene must fit the pictures and the network."""
    if not MIN_SIDE <= side <= MAX_SIDE or side % 4:
        raise InputError(
            f"img_size is {side}; expected a multiple of 4 from {MIN_SIDE} to {MAX_SIDE} for composed scenes "
            "(your own pictures, --data, may be larger)"
        )


def crop(picture: Floats, side: int, rng: np.random.Generator) -> Floats:
    """A random square of a picture `[3, height, width]`, turned and mirrored; one with contrast if there is any."""
    best: Floats | None = None
    for _ in range(8):
        top, left = (int(rng.integers(extent - side + 1)) for extent in picture.shape[1:])
        one = picture[:, top : top + side, left : left + side]
        if best is None or one.std() > best.std():
            best = one
        if best.std() > LOWEST_CONTRAST:
            break
    assert best is not None
    turned = np.rot90(best, int(rng.integers(4)), axes=(1, 2))
    return np.ascontiguousarray(turned[:, :, ::-1] if rng.integers(2) else turned)


def outline(side: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """The inside of a blob, an ellipse or a polygon around a random place, as `[side, side]`."""
    radius = rng.uniform(0.27, 0.39) * side
    y0, x0 = rng.uniform(0.38 * side, 0.62 * side, size=2)
    y, x = np.mgrid[:side, :side].astype(np.float64)
    angle, distance = np.arctan2(y - y0, x - x0), np.hypot(y - y0, x - x0)
    kind = rng.integers(3)
    turn = rng.uniform(0.0, 2.0 * np.pi)
    if kind == 0:
        waves = [rng.uniform(0.0, 0.22) / k * np.cos(k * angle + rng.uniform(0.0, 2.0 * np.pi)) for k in (2, 3, 4)]
        border = radius * (1.0 + np.sum(waves, axis=0))
    elif kind == 1:
        ratio = rng.uniform(0.6, 1.0)
        border = radius / np.sqrt(np.cos(angle - turn) ** 2 * ratio + np.sin(angle - turn) ** 2 / ratio)
    else:
        half = np.pi / rng.integers(4, 8)
        border = radius * np.cos(half) / np.cos((angle - turn) % (2.0 * half) - half) * 1.15
    inside: NDArray[np.bool_] = distance < border
    return inside


def _sources(*, held_out: bool) -> dict[str, Floats]:
    """Every picture as `[3, height, width]` in 0 to 1: the part for training, or the rest. Even ones at half size."""
    found: dict[str, Floats] = {}
    for name, raw in load_textures().items():
        picture = raw.astype(np.float32) / np.float32(255.0)
        planes = np.repeat(picture[None], 3, axis=0) if picture.ndim == 2 else np.moveaxis(picture, -1, 0)
        if name in EVEN:
            planes = _halved(planes)
        cut = round(planes.shape[2] * TRAIN_FRAC)
        found[name] = planes[:, :, cut:] if held_out else planes[:, :, :cut]
    return found


def _tinted(ground: Floats, rng: np.random.Generator) -> Floats:
    """Brought to a random colour and contrast."""
    spread = rng.uniform(0.14, 0.24)
    colour = rng.uniform(0.35, 0.65, size=(3, 1, 1))
    grey = (ground - ground.mean((1, 2), keepdims=True)) / (ground.std((1, 2), keepdims=True) + 1e-3)
    coloured: Floats = np.clip(grey * spread + colour, 0.0, 1.0).astype(np.float32)
    return coloured


def _matched(one: Floats, ground: Floats) -> Floats:
    """The same mean and contrast as the ground in every channel."""
    unit = (one - one.mean((1, 2), keepdims=True)) / (one.std((1, 2), keepdims=True) + 1e-3)
    like = unit * ground.std((1, 2), keepdims=True) + ground.mean((1, 2), keepdims=True)
    matched: Floats = np.clip(like, 0.0, 1.0).astype(np.float32)
    return matched


def _halved(planes: Floats) -> Floats:
    """Every four pixels in one: finer texture for so small a scene."""
    _, height, width = planes.shape
    blocks = planes[:, : height // 2 * 2, : width // 2 * 2].reshape(3, height // 2, 2, width // 2, 2)
    halved: Floats = blocks.mean((2, 4))
    return halved
