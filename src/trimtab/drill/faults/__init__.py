"""The fault catalogue: every trouble by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from trimtab.core.errors import InputError
from trimtab.core.suggest_name import did_you_mean
from trimtab.drill.faults.amp import AMP
from trimtab.drill.faults.data import DATA
from trimtab.drill.faults.dynamics import DYNAMICS
from trimtab.drill.faults.numerics import NUMERICS
from trimtab.drill.faults.state import STATE
from trimtab.drill.faults.wiring import WIRING
from trimtab.drill.score import Fault

FAULTS: dict[str, Fault] = {one.name: one for one in (*DATA, *NUMERICS, *DYNAMICS, *WIRING, *STATE, *AMP)}
GROUPS = tuple(dict.fromkeys(one.group for one in FAULTS.values()))


def choose(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> tuple[Fault, ...]:
    """The faults that are wanted, by name or by group.

    Example:
        >>> [one.name for one in choose(["amp"], ["clip-before-unscale"])]
        ['scale-collapses']
    """
    for word in (*select, *ignore):
        if word not in FAULTS and word not in GROUPS:
            listed = f"groups: {', '.join(GROUPS)}; faults: {', '.join(FAULTS)}"
            hint = did_you_mean(word, (*FAULTS, *GROUPS), otherwise=listed)
            raise InputError(f"there is no fault or group {word!r}; {hint}")
    wanted = [one for one in FAULTS.values() if not select or one.name in select or one.group in select]
    chosen = tuple(one for one in wanted if one.name not in ignore and one.group not in ignore)
    if not chosen:
        raise InputError("no fault is left after --select and --ignore; choose at least one")
    return chosen


def fairly(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """One fault of each group in turn: where time runs out, no group goes without."""
    groups = [[one for one in faults if one.group == group] for group in GROUPS]
    return tuple(one for one in chain.from_iterable(zip_longest(*groups)) if one is not None)
