"""Handwritten digits: images and their classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.data.arrays import read_arrays

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def load_digits() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """1,797 handwritten digits: images `[1797, 64]` with values 0 to 16, and their classes `[1797]`.

    Example:
        >>> x, y = load_digits()
        >>> x.shape, int(x.max()), int(y[0])
        ((1797, 64), 16, 0)
    """
    arrays = read_arrays("digits")
    return arrays["x"], arrays["y"]
