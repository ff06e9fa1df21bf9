"""A device without one: every tensor counts as out of the host's reach, though it lies in its memory.

The guard then goes the way it goes on an accelerator: nothing is read in the step, what probes want is sent, and all
of it is judged `lag` steps later.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from trimtab.sample import transfer


def _nowhere(tensor: Tensor) -> bool:
    return False


@contextmanager
def simulated_device() -> Iterator[None]:
    """Guards made inside take every tensor for one on a device."""
    known = transfer.is_here
    users = [m for n, m in list(sys.modules.items()) if n.startswith("trimtab.") and vars(m).get("is_here") is known]
    for module in users:
        module.is_here = _nowhere  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in users:
            module.is_here = known  # type: ignore[attr-defined]
