"""A training that is built twice, with one seed: does it take the same steps?"""

from __future__ import annotations

from collections.abc import Callable

from trimtab.checks.drive import Options, make_call
from trimtab.checks.target import Target
from trimtab.checks.watch import Watch


def two_builds_agree(
    build: Callable[[], Target], options: Options, ours: bool, seed: Callable[[], None], num: int
) -> bool:
    """Whether the losses of the first steps are the same, to the bit."""
    seen: list[list[float | None]] = []
    for _ in range(2):
        seed()
        target = build()
        seed()
        watch, losses = Watch(target.model), list[float | None]()
        with watch.listening():
            for _, batch in zip(range(num), target.loader, strict=False):
                call, _ = make_call(target, batch, watch, options, ours=ours)
                losses.append(call.loss)
        seen.append(losses)
    return seen[0] == seen[1]
