"""What is asked of every recipe: how long a command takes, whether doctor passes, and what a guard adds to a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recipes_claims import Claim, Found, Judged, Table, below, claim, equal
from recipes_jobs import Job
from recipes_overhead import ARMS, GUARDED

DEFAULT_S, QUICK_S = 180.0, 20.0
OVERHEAD: dict[str, dict[str, object]] = {
    "charlm": {"rounds": 16, "block": 50, "steps": 1000, "metrics_file": "", "preset": "documented"},
    "segment": {"rounds": 14, "block": 4},
}


def times_jobs(names: Sequence[str], *, quick: bool) -> Iterator[Job]:
    """Every recipe as people start it, and its doctor; nothing else runs meanwhile."""
    for name in names:
        for size in ("quick",) if quick else ("quick", "default"):
            words = ["train", name, *(["--quick"] if size == "quick" else [])]
            yield Job(section="times", name=f"{name} {size}", kind="command", spec={"words": words}, alone=True)
        words = ["doctor", f"trimtab.train.recipes.{name}:target"]
        yield Job(section="times", name=f"{name} doctor", kind="command", spec={"words": words})


def judge_times(found: Found, names: Sequence[str], *, quick: bool) -> Judged:
    """Under three minutes, under 20 s, and no finding of the guard or of doctor."""
    sizes = {"quick": QUICK_S} if quick else {"default": DEFAULT_S, "quick": QUICK_S}
    claims: list[Claim] = []
    for size, limit in sizes.items():
        times = {name: found.get(f"{name} {size}", "wall_s") for name in names}
        words = "`trimtab train NAME --quick`" if size == "quick" else "`trimtab train NAME`"
        claims.append(claim(f"{words}: seconds in all", times, below(limit)))
        alarms = {name: found.count(f"{name} {size}", "answer", "runs", 0, "findings") for name in names}
        claims.append(claim(f"{words}: findings", alarms, equal(0)))
    codes = {name: found.get(f"{name} doctor", "code") for name in names}
    claims.append(claim("`trimtab doctor trimtab.train.recipes.NAME:target`: exit code", codes, equal(0)))
    return Judged(
        title="Every recipe as people start it",
        about="The whole command, start-up and evaluation included, default seed, alone on the machine with the "
        "threads torch takes by itself.",
        claims=claims,
    )


def overhead_jobs(names: Sequence[str], *, quick: bool) -> Iterator[Job]:
    """The two recipes whose overhead was promised."""
    for name, how in OVERHEAD.items():
        if name in names:
            spec = {"recipe": name, **how, **({"rounds": 4} if quick else {})}
            yield Job(section="overhead", name=name, kind="overhead", spec=spec, alone=True)


def judge_overhead(found: Found, names: Sequence[str]) -> Judged:
    """What was measured beside what the documents promise."""
    rows = []
    measured = [name for name in OVERHEAD if name in names]
    for name in measured:
        for arm in ARMS:
            if not (times := found.get(name, arm, default=None)):
                continue
            adds = [_percent(times.get(f"{kind}_adds")) for kind in ("processor", "wall")]
            rows.append([name, arm, f"{times['processor_ms']:.2f}", f"{1000 / times['wall_ms']:.1f}", *adds])
    adds = {name: _first(found.get(name, GUARDED, "processor_adds")) for name in measured}
    return Judged(
        title="What a guard adds to a step",
        about="Four trainings of one seed take turns in one process, one thread. The documents promise 1 to 2 % for "
        "monitoring and about 5 % for everything.",
        claims=[claim("processor time that the recipe's guard adds, %", adds, below(5.0))],
        tables=[
            Table(
                title="Median step, and the mean of the paired differences to the bare training ± standard error",
                head=["recipe", "arm", "processor ms", "steps/s", "adds, processor %", "adds, clock %"],
                rows=rows,
            )
        ],
    )


def _percent(adds: Sequence[float] | None) -> str:
    return "" if adds is None else f"{adds[0]:+.1f} ± {adds[1]:.1f}"


def _first(adds: object) -> object:
    return adds[0] if isinstance(adds, list | tuple) else adds
