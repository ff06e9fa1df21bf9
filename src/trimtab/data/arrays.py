"""Reads the arrays of one shipped file; no file of ours holds a pickle, and none would be opened."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


def read_arrays(name: str) -> dict[str, NDArray[Any]]:
    """Every array of the shipped file `name`.npz, by its key.

    Example:
        >>> sorted(read_arrays("digits"))
        ['x', 'y']
    """
    import numpy as np

    with (
        files("trimtab.data").joinpath(f"{name}.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        return {key: arrays[key] for key in arrays.files}
