"""Camouflaged objects in two stages: what is run, and what is expected of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from recipes_claims import NOT_RUN, Found, Judged, at_least, below, by_seed, claim, equal
from recipes_faults import fault_rows, few
from recipes_jobs import Job

ARMS: dict[str, dict[str, object]] = {
    "clean": {},
    "inf-pixel guarded": {"fault": "inf-pixel"},
    "inf-pixel unguarded": {"fault": "inf-pixel", "guarded": False},
    "stage2-lr guarded": {"fault": "stage2-lr"},
    "stage2-lr unguarded": {"fault": "stage2-lr", "guarded": False},
}
WENT_BACK = r": rewind \(|roll the weights back"
NUM_KILLED = 2
"""With so many seeds a process is killed, the default one among them."""
RECOVERS = (
    "A rate of 1 does not destroy the unguarded run: its schedule ends near zero, and what is left of the network "
    "learns again. It misses the goal that the guarded run reaches."
)
ROTATION: dict[str, object] = {
    "stage": "all",
    "metric": "IoU",
    "epochs": 111,
    "stage1_epochs": 1,
    "pretrain_epochs": 0,
    "num_images": 16,
    "img_size": 16,
}
"""As small as can be: it is about the checkpoints."""


def jobs(seeds: Sequence[int], *, quick: bool) -> Iterator[Job]:
    """Every arm with every seed, one process killed per seed, one long run."""
    for seed in seeds:
        for arm, how in ARMS.items():
            if "guarded" in how and seed not in few(seeds):
                continue
            spec = {"recipe": "segment", "seed": seed, "quick": quick, **how}
            yield Job(section="segment", name=f"{arm}/{seed}", kind="train", spec=spec)
    for seed in seeds[:NUM_KILLED]:
        spec = {"name": "killed_and_resumed", "recipe": "segment", "seed": seed, "quick": True}
        yield Job(section="segment", name=f"killed/{seed}", kind="trial", spec=spec)
    spec = {"name": "rotation", "recipe": "segment", "seed": seeds[-1], **ROTATION}
    yield Job(section="segment", name="rotation", kind="trial", spec=spec)


def judge(found: Found, seeds: Sequence[int], *, quick: bool) -> Judged:
    """What must be shown of it."""

    def of(arm: str, *path: str | int) -> dict[str, object]:
        mine = seeds[:NUM_KILLED] if arm == "killed" else few(seeds) if arm.endswith("unguarded") else seeds
        return by_seed(mine, lambda seed: found.get(f"{arm}/{seed}", *path))

    def gap(seed: int) -> object:
        clean, held = (found.get(f"{arm}/{seed}", "score") for arm in ("clean", "inf-pixel guarded"))
        return NOT_RUN if NOT_RUN in (clean, held) else held - clean

    def rewound(seed: int) -> object:
        actions = found.get(f"stage2-lr guarded/{seed}", "actions")
        return NOT_RUN if actions == NOT_RUN else any(re.search(WENT_BACK, line) for line in actions)

    def share(seed: int) -> object:
        """The rate of the slowest group as a share of the fastest one's, in the last stage."""
        rates = found.get(f"clean/{seed}", "group_rates")
        if rates == NOT_RUN or not rates:
            return NOT_RUN
        last = [groups for stage, groups in rates if stage == rates[-1][0] and len(groups) > 1 and max(groups) > 0]
        return round(min(last[0]) / max(last[0]), 6) if last else NOT_RUN

    def rotated(_: int) -> object:
        """Whether exactly the last three and one of the best are left."""
        left, best, num = (found.get("rotation", name) for name in ("left", "best", "epochs"))
        if NOT_RUN in (left, best, num):
            return NOT_RUN
        return any(left == sorted({epoch, num - 2, num - 1, num}) for epoch in best)

    last, wild = seeds[-1:], of("stage2-lr unguarded", "score")
    claims = [
        claim("IoU, clean", of("clean", "score"), at_least(0.85)),
        claim("findings on the clean run", by_seed(seeds, lambda s: found.count(f"clean/{s}", "findings")), equal(0)),
        claim("stage 2: rate of the backbone / rate of the head", by_seed(seeds, share), equal(0.1)),
        claim("one Inf pixel, guarded: IoU minus clean", by_seed(seeds, gap), at_least(-0.01)),
        claim("one Inf pixel, unguarded: IoU", of("inf-pixel unguarded", "score"), equal(0.0)),
        claim("one Inf pixel, unguarded: weights finite", of("inf-pixel unguarded", "finite"), equal(False)),
        claim("stage-2 rate of 1, guarded: IoU", of("stage2-lr guarded", "score"), at_least(0.85)),
        claim("stage-2 rate of 1, guarded: rolled back", by_seed(seeds, rewound), equal(True)),
        claim("stage-2 rate of 1, unguarded: IoU", wild, below(0.85)),
        claim("killed by SIGKILL within an epoch", of("killed", "codes", 1), equal(-9)),
        claim("killed, then resumed: weights bit-identical", of("killed", "identical"), equal(True)),
        claim("epochs with a checkpoint each", by_seed(last, lambda _: found.get("rotation", "epochs")), at_least(110)),
        claim("epochs whose checkpoints are left", by_seed(last, lambda _: str(found.get("rotation", "left")))),
        claim("they are the newest three and the best", by_seed(last, rotated), equal(True)),
    ]
    return Judged(
        title="segment: camouflaged objects of real textures, two stages",
        about=f"{'Quick' if quick else 'Default'} size, one thread. The processes that are killed and resumed run at "
        "quick size, one thread, and are compared bit by bit with one that was left alone.",
        claims=claims,
        notes=[RECOVERS] if any(isinstance(iou, float) and iou > 0.5 for iou in wild.values()) else [],
        summary=fault_rows(
            found, few(seeds), "IoU", {"inf-pixel": "one pixel of Inf", "stage2-lr": "stage 2 at a rate of 1"}
        ),
    )
