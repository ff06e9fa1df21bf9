"""The small data set that ships with trimtab; where it comes from is in NOTICE.md beside this file."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

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
    import numpy as np

    with files("trimtab.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        return arrays["x"], arrays["y"]
