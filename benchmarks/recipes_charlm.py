"""The language model: what is run, and what is expected of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recipes_claims import Found, Judged, above, below, by_seed, claim, equal
from recipes_faults import fault_rows, few
from recipes_jobs import Job

MISMATCH = "targets[0] should equal inputs[1] -> MISMATCH!"
ARMS: dict[str, dict[str, object]] = {
    "clean": {},
    "sgd guarded": {"fault": "sgd-lr-1"},
    "sgd unguarded": {"fault": "sgd-lr-1", "guarded": False},
    "shuffled": {"fault": "shuffled-targets"},
    "only shuffled": {"fault": "only-shuffled"},
}


def jobs(seeds: Sequence[int], *, quick: bool) -> Iterator[Job]:
    """Every arm with every seed."""
    yield Job(section="charlm", name="counts", kind="letter_counts")
    for seed in seeds:
        for arm, how in ARMS.items():
            if arm == "only shuffled" and seed not in few(seeds):
                continue
            spec = {"recipe": "charlm", "seed": seed, "quick": quick, "metrics_file": "", "preset": "documented", **how}
            yield Job(section="charlm", name=f"{arm}/{seed}", kind="train", spec=spec)


def judge(found: Found, seeds: Sequence[int], *, quick: bool) -> Judged:
    """What must be shown of it."""
    letters, pairs = (found.get("counts", name, default=float("nan")) for name in ("letters", "pairs"))
    below_letters = (f"below {letters:.2f}", lambda loss: loss < letters)

    def of(arm: str, *path: str) -> dict[str, object]:
        return by_seed(seeds, lambda seed: found.get(f"{arm}/{seed}", *path))

    def has(arm: str, finding: str) -> dict[str, object]:
        return by_seed(seeds, lambda seed: finding in found.get(f"{arm}/{seed}", "findings", default=()))

    def diagnosed(seed: int) -> bool:
        said = str(found.get(f"shuffled/{seed}", "facts", "diagnosis"))
        return said.startswith("misaligned") and "chronic clipping" in said

    claims = [
        claim("share of the first 100 steps that was clipped", of("clean", "facts", "clipped_first"), above(0.20)),
        claim("share of the last 100 steps that was clipped", of("clean", "facts", "clipped_last"), below(0.05)),
        claim("validation loss at the end (nats per letter)", of("clean", "score"), below_letters),
        claim(
            "findings on the healthy run",
            by_seed(seeds, lambda seed: found.count(f"clean/{seed}", "findings")),
            equal(0),
        ),
        claim("SGD with a rate of 1, unguarded: weights finite", of("sgd unguarded", "finite"), equal(False)),
        claim("SGD with a rate of 1, guarded: weights finite", of("sgd guarded", "finite"), equal(True)),
        claim("SGD with a rate of 1, guarded: validation loss", of("sgd guarded", "score"), below_letters),
        claim(
            f"shuffled targets: first line is `{MISMATCH}`",
            by_seed(seeds, lambda seed: found.get(f"shuffled/{seed}", "first_line") == MISMATCH),
            equal(True),
        ),
        claim("shuffled targets: finding `chronic-clipping`", has("shuffled", "chronic-clipping"), equal(True)),
        claim("shuffled targets: diagnosis names both", by_seed(seeds, diagnosed), equal(True)),
        claim(
            "only the targets shuffled, the loss a mean as before: share of the last 100 steps clipped",
            by_seed(few(seeds), lambda seed: found.get(f"only shuffled/{seed}", "facts", "clipped_last")),
        ),
        claim(
            "only the targets shuffled: findings",
            by_seed(
                few(seeds), lambda seed: ", ".join(found.get(f"only shuffled/{seed}", "findings", default=())) or "none"
            ),
        ),
        claim(
            "only the targets shuffled: first line says MISMATCH",
            by_seed(few(seeds), lambda seed: found.get(f"only shuffled/{seed}", "first_line") == MISMATCH),
            equal(True),
        ),
    ]
    return Judged(
        title="charlm: a transformer language model on Python's own reference",
        about=f"{'200' if quick else '600'} steps, one thread. On the held-out text, who has only counted letters "
        f"loses {letters:.2f} nats per letter, who has counted pairs of them {pairs:.2f}.",
        claims=claims,
        summary=fault_rows(found, seeds, "nats per letter (less is better)", {"sgd": "SGD with a rate of 1"}),
        notes=[
            "The fault `shuffled-targets` also sums the loss over all places, as the document's system did: that, not "
            "the shuffling, is what clips every step. Targets that are only shuffled (last three lines) are told by "
            "the alignment line.",
        ],
    )
