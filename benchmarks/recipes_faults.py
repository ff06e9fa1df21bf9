"""What is expected of any recipe with any fault: guarded as good as clean, unguarded lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from recipes_claims import NOT_RUN, Claim, Found, at_least, by_seed, claim, equal, span

LOST = 0.5
"""An unguarded run has failed with a score below this share of the clean one's, or with NaN in its weights."""


def few(seeds: Sequence[int]) -> Sequence[int]:
    """The one fresh seed that costly extras are run with; the default one where there is no other."""
    return seeds[1:2] or seeds[:1]


def fault_claims(found: Found, seeds: Sequence[int], faults: Iterable[str], clean: str = "clean") -> Iterator[Claim]:
    """Two for each fault."""
    for fault in faults:

        def ratio(seed: int, fault: str = fault) -> object:
            scores = [found.get(f"{arm}/{seed}", "score") for arm in (f"{fault} guarded", clean)]
            return NOT_RUN if NOT_RUN in scores else scores[0] / scores[1]

        def lost(seed: int, fault: str = fault) -> object:
            run, whole = found.get(f"{fault} unguarded/{seed}"), found.get(f"{clean}/{seed}", "score")
            if "score" not in run or whole == NOT_RUN:
                return NOT_RUN
            return not run["finite"] or not run["score"] >= LOST * whole

        yield claim(f"{fault}, guarded: share of the clean score", by_seed(seeds, ratio), at_least(0.95))
        yield claim(f"{fault}, unguarded: below half of it, or NaN", by_seed(seeds, lost), equal(True))


def fault_rows(
    found: Found, seeds: Sequence[int], what: str, faults: Mapping[str, str], clean: str = "clean"
) -> list[list[str]]:
    """Rows of the short table, one for each fault (by the names of its jobs, and in words)."""

    def scores(arm: str) -> str:
        return span(found.get(f"{arm}/{seed}", "score") for seed in seeds)

    return [
        [what, scores(clean), words, scores(f"{fault} guarded"), scores(f"{fault} unguarded")]
        for fault, words in faults.items()
    ]
