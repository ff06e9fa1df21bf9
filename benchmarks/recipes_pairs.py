"""Two images and a question: what is run, and what is expected of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recipes_claims import Found, Judged, Table, at_least, by_seed, claim, equal, told
from recipes_jobs import Job

CLASSES = ("First", "Second", "Similar")


def jobs(seeds: Sequence[int], *, quick: bool) -> Iterator[Job]:
    """A clean run with every seed, its faults with one, and doctor on the training and on each seeded fault of it."""
    for seed in seeds:
        spec = {"recipe": "pairs", "seed": seed, "quick": quick}
        yield Job(section="pairs", name=f"clean/{seed}", kind="train", spec=spec)
    yield Job(section="pairs", name="seeded", kind="trial", spec={"name": "seeded_faults"})


def judge(found: Found, seeds: Sequence[int], *, quick: bool) -> Judged:
    """What must be shown of it."""

    def of(*path: str) -> dict[str, object]:
        return by_seed(seeds, lambda seed: found.get(f"clean/{seed}", *path))

    seeded = found.get("seeded", "faults", default=[])
    claims = [
        claim("accuracy on held-out images", of("score"), at_least(0.85)),
        claim("findings on the healthy run", by_seed(seeds, lambda s: found.count(f"clean/{s}", "findings")), equal(0)),
        claim("doctor on the training: exit code", {"": found.get("seeded", "healthy", "code")}, equal(0)),
        claim("doctor: seeded faults tried", {"": len(seeded)}, at_least(10)),
        claim("doctor: seeded faults with exit code 1", {"": sum(one["code"] == 1 for one in seeded)}),
        claim("doctor: seeded faults named", {"": sum(one["named"] for one in seeded)}),
    ]
    rows = [[one["fault"], ", ".join(one["wanted"]), one["first"], told(one["named"])] for one in seeded]
    return Judged(
        title="pairs: two images and a question",
        about=f"{'Quick' if quick else 'Default'} size, one thread; neither image of a held-out pair was trained on.",
        claims=claims,
        tables=[
            Table(title="Doctor and the seeded faults", head=["fault", "to be named", "first", "named"], rows=rows)
        ],
    )
