"""Six modalities: what is run, and what is expected of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from recipes_claims import NOT_RUN, Found, Judged, Table, at_least, below, by_seed, claim, equal, span, told
from recipes_faults import fault_claims, fault_rows, few
from recipes_jobs import Job

OBJECTIVES = ("axis", "joint", "full", "pairwise")
SAME: dict[str, object] = {"batch_size": 8}
"""Where every loss takes part: the original builds batch^6."""
FAULTS = {"nan-image": "pictures with NaN"}
ORIGINAL = ("original", "original, guarded")
COMPARED = 2
"""So many seeds compare the losses, the default one among them."""
MEASURES = {"r1": "R@1, leave one out", "r5": "R@5, leave one out", "pairs_r1": "R@1, pairs", "pairs_r5": "R@5, pairs"}


def jobs(seeds: Sequence[int], *, quick: bool) -> Iterator[Job]:
    """The default run with every seed, and each objective and the original on the same data, steps and batches."""
    for seed in seeds:
        base = {"recipe": "clip6", "seed": seed, "quick": quick}
        runs: dict[str, dict[str, object]] = {"default": {}}
        for data in ("emoji", "views") if seed in seeds[:COMPARED] else ():
            for objective in OBJECTIVES:
                runs[f"{data} {objective}"] = {"data": data, "objective": objective, **SAME}
            runs[f"{data} original"] = {"data": data, "loss": "original", "guarded": False, **SAME}
            if seed in few(seeds):
                runs[f"{data} original, guarded"] = {"data": data, "loss": "original", **SAME}
        for fault in FAULTS if seed in few(seeds) else ():
            runs[f"{fault} guarded"] = {"fault": fault}
            runs[f"{fault} unguarded"] = {"fault": fault, "guarded": False}
        for name, given in runs.items():
            yield Job(section="clip6", name=f"{name}/{seed}", kind="train", spec={**base, **given})


def judge(found: Found, seeds: Sequence[int], *, quick: bool) -> Judged:
    """What must be shown of it."""

    def of(run: str, measure: str = "r1") -> dict[str, object]:
        mine = seeds if run == "default" else few(seeds) if run.endswith(", guarded") else seeds[:COMPARED]
        return by_seed(mine, lambda seed: found.get(f"{run}/{seed}", "metrics", measure))

    def times(objective: str) -> dict[str, object]:
        def ratio(seed: int) -> object:
            ours, theirs = (found.get(f"emoji {one}/{seed}", "metrics", "r1") for one in (objective, "original"))
            guarded = found.get(f"emoji original, guarded/{seed}", "metrics", "r1", default=0.0)
            return NOT_RUN if NOT_RUN in (ours, theirs) else ours / max(theirs, guarded, 1e-9)

        return by_seed(seeds[:COMPARED], ratio)

    claims = [
        claim("default run: R@1, leave one out", of("default")),
        claim("default run: R@5, leave one out", of("default", "r5")),
        claim(
            "findings on the default run",
            by_seed(seeds, lambda seed: found.count(f"default/{seed}", "findings")),
            equal(0),
        ),
        *fault_claims(found, few(seeds), FAULTS, clean="default"),
        *(claim(f"emoji, {one}: R@1 / R@1 of the original", times(one), at_least(5.0)) for one in OBJECTIVES),
        *(claim(f"six generated views, {one}: R@1", of(f"views {one}"), at_least(0.80)) for one in OBJECTIVES),
        claim("six generated views, original: R@1", of("views original"), below(0.10)),
        claim("six generated views, original under a guard: R@1", of("views original, guarded"), below(0.10)),
    ]
    original = span(of("emoji original").values())
    rows = []
    for run in ("default", *(f"{data} {one}" for data in ("emoji", "views") for one in (*OBJECTIVES, *ORIGINAL))):
        columns = [list(of(run, measure).values()) for measure in MEASURES]
        rows.append([run, *(told(statistics.fmean(c)) if NOT_RUN not in c else NOT_RUN for c in columns)])
    return Judged(
        title="clip6: emoji and their names in five languages",
        about=f"{'Quick' if quick else 'Default'} size, one thread. The default run (`axis`, `norm`) "
        "has a batch of its own; the others share data, steps and a batch of 8, where the original's `[B]^6` tensor "
        "still fits. Leave one out: each modality is looked for with the other five among all held-out tuples; pairs: "
        "with one other.",
        claims=claims,
        tables=[
            Table(title="Means over the seeds", head=["run", *MEASURES.values()], rows=rows),
            *_by_pair(found, seeds[1:] or seeds),
        ],
        summary=[
            *fault_rows(found, few(seeds), "R@1, given the other five", FAULTS, "default"),
            ["R@1 at a batch of 8", span(of("emoji axis").values()), "the loss of the document instead", "", original],
        ],
    )


def _by_pair(found: Found, seeds: Sequence[int]) -> Iterator[Table]:
    """Who finds whom in the default run."""
    seen = [found.get(f"default/{seed}", "facts", "retrieval", default=None) for seed in seeds]
    if None in seen:
        return
    names, num = seen[0]["names"], seen[0]["num"]

    def mean(which: str, *place: int) -> str:
        values = [one[which] for one in seen]
        for index in place:
            values = [value[index] for value in values]
        return f"{statistics.fmean(values):.2f}"

    places = range(len(names))
    rows = [[names[p], *("" if p == q else mean("pairs_r1", p, q) for q in places)] for p in places]
    rows.append(["all others", *(mean("left_out_r1", q) for q in places)])
    title = (
        f"Default run: R@1 among {num} held-out tuples (by chance {1 / num:.4f}), given the row, looking for the column"
    )
    yield Table(title=title, head=["given", *names], rows=rows)
