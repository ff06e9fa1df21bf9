"""Textures and photographs in the public domain, to compose pictures from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.data.arrays import read_arrays

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def load_textures() -> dict[str, NDArray[np.uint8]]:
    """Nine square pictures by name: grey ones `[side, side]`, coloured ones `[side, side, 3]`.

    `brick`, `grass` and `gravel` are even textures of 384 pixels; `camera`, `chelsea`, `coffee`, `hubble`, `retina` and
    `rocket` are photographs of 192.

    Example:
        >>> textures = load_textures()
        >>> sorted(textures)
        ['brick', 'camera', 'chelsea', 'coffee', 'grass', 'gravel', 'hubble', 'retina', 'rocket']
        >>> textures["brick"].shape, textures["coffee"].shape
        ((384, 384), (192, 192, 3))
    """
    return read_arrays("textures")
