"""Two images and a question: what is run, and what is expected of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recipes_claims import NOT_RUN, Found, Judged, Table, at_least, by_seed, claim, equal
from recipes_faults import fault_claims, fault_rows, few
from recipes_jobs import Job

CLASSES = ("First", "Second", "Similar")
FAULTS = {"nan-pixel": "a pixel of NaN", "lr-10": "a learning rate of 10"}


def jobs(seeds: Sequence[int], *, quick: bool) -> Iterator[Job]:
    """A clean run with every seed, its faults with one, and doctor on the training and on each seeded fault of it."""
    for seed in seeds:
        spec = {"recipe": "pairs", "seed": seed, "quick": quick}
        yield Job(section="pairs", name=f"clean/{seed}", kind="train", spec=spec)
        for fault in FAULTS if seed in few(seeds) else ():
            for arm, guarded in (("guarded", True), ("unguarded", False)):
                more = {**spec, "fault": fault, "guarded": guarded}
                yield Job(section="pairs", name=f"{fault} {arm}/{seed}", kind="train", spec=more)
    only = {"recipe": "pairs", "seed": seeds[-1], "quick": quick, "pretrain_epochs": 0}
    yield Job(section="pairs", name="documented", kind="train", spec=only)
    yield Job(section="pairs", name="seeded", kind="trial", spec={"name": "seeded_faults"})


def judge(found: Found, seeds: Sequence[int], *, quick: bool) -> Judged:
    """What must be shown of it."""

    def of(*path: str) -> dict[str, object]:
        return by_seed(seeds, lambda seed: found.get(f"clean/{seed}", *path))

    def doctor(value: object) -> dict[str, object]:
        return by_seed(seeds[:1], lambda _: value)

    seeded = found.get("seeded", "faults", default=[])
    failed = [one["code"] == 1 for one in seeded]
    first = [one["named"][:1] == [one["wanted"]] for one in seeded]
    claims = [
        claim("accuracy on held-out images", of("score"), at_least(0.85)),
        claim("findings on the healthy run", by_seed(seeds, lambda s: found.count(f"clean/{s}", "findings")), equal(0)),
        claim("swap consistency", of("metrics", "swap_consistency")),
        *(claim(f"accuracy on pairs answered {one}", of("metrics", f"accuracy_{one}")) for one in CLASSES),
        claim(
            "accuracy with the documented constants alone, no stage before",
            by_seed(seeds[-1:], lambda _: found.get("documented", "score")),
        ),
        *fault_claims(found, few(seeds), FAULTS),
        claim("doctor on the sound training: exit code", doctor(found.get("seeded", "healthy", "code")), equal(0)),
        claim(f"doctor: exit code 1, of {len(seeded)} seeded faults", doctor(sum(failed) or NOT_RUN), at_least(10)),
        claim("doctor: its first failure names the seeded fault", doctor(sum(first) or NOT_RUN), at_least(10)),
    ]
    rows = [[one["fault"], str(one["code"]), one["wanted"], ", ".join(one["named"][:3])] for one in seeded]
    return Judged(
        title="pairs: two images and a question",
        about=f"{'Quick' if quick else 'Default'} size, one thread; neither image of a held-out pair was trained on.",
        claims=claims,
        summary=fault_rows(found, few(seeds), "accuracy, three answers", FAULTS),
        tables=[
            Table(title="Doctor and the seeded faults", head=["fault", "exit code", "is named", "failures"], rows=rows)
        ],
    )
