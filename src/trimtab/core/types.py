"""Every record that crosses a stage boundary: frozen, numpy only, JSON-able."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trimtab.core.notebook import box, finding_html
from trimtab.core.severity import Severity as Severity

if TYPE_CHECKING:
    from trimtab.core.window import Window


F32 = NDArray[np.float32]

ABSENT = -1.0
"""In the L2 column: this parameter had no gradient at all. A norm is never negative, so nothing else looks like it."""
FROZEN = -2.0
"""In the L2 column: no gradient, and none wanted: the parameter does not require one."""


class Kind(StrEnum):
    """What a row of a table was measured on."""

    GRAD = "grad"
    WEIGHT = "weight"
    UPDATE = "update"
    BUFFER = "buffer"


class Column(StrEnum):
    """What a table holds for each tensor.

    `L2` and the counts of a measured row are always measurements: `L2` is non-finite exactly when the tensor holds a
    non-finite value or its true norm does not fit a float32. The other columns are NaN where they were not measured:
    of weights and updates only the size is wanted, and only gradients need the fractions.
    """

    L2 = "l2"
    ABSMAX = "absmax"
    MEAN = "mean"
    NAN = "nan"
    INF = "inf"
    ZERO_FRAC = "zero_frac"
    UNDERFLOW_FRAC = "underflow_frac"


FULL_COLUMNS: tuple[Column, ...] = tuple(Column)
NORM_COLUMNS: tuple[Column, ...] = (Column.L2,)


_NOWHERE = slice(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names the rows and columns of a table. Rows of one kind are contiguous."""

    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    numel: tuple[int, ...]
    columns: tuple[Column, ...] = FULL_COLUMNS
    optimizer: str = ""
    has_grad_norms: bool = field(init=False, repr=False, compare=False)
    has_weight_norms: bool = field(init=False, repr=False, compare=False)
    _spans: dict[Kind, slice] = field(init=False, repr=False, compare=False)
    _named: dict[Kind, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Looked up several times a step: found once.
        firsts = {kind: self.kinds.index(kind) for kind in set(self.kinds)}
        spans = {kind: slice(first, first + self.kinds.count(kind)) for kind, first in firsts.items()}
        for name, kind in (("has_grad_norms", Kind.GRAD), ("has_weight_norms", Kind.WEIGHT)):
            object.__setattr__(self, name, Column.L2 in self.columns and kind in spans)
        object.__setattr__(self, "_spans", spans)
        object.__setattr__(self, "_named", {kind: self.names[span] for kind, span in spans.items()})

    def named(self, kind: Kind) -> tuple[str, ...]:
        """Names of the rows of `kind`: always the same tuple, so that whoever remembers it can compare by identity."""
        return self._named.get(kind, ())

    def rows(self, kind: Kind) -> slice:
        """Where the rows of `kind` are; an empty slice if there are none."""
        return self._spans.get(kind, _NOWHERE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one attempted optimizer step (or one validation, `phase="val"`) looked like, reduced across ranks.

    `notes` name what a number is about where there is no row for it: parameters that no optimizer holds, tensors that
    were changed between steps, an exception.
    """

    step: int
    branch: int = 0
    layout: Layout
    table: F32
    scalars: Mapping[str, float]
    phase: str = "train"
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def optimizer(self) -> str:
        """Which optimizer made the step; empty where there is only one."""
        return self.layout.optimizer

    def has(self, kind: Kind, column: Column) -> bool:
        """Whether this sample measured `column` for tensors of `kind`."""
        return column in self.layout.columns and self.layout.rows(kind) is not _NOWHERE

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Names of the measured tensors of `kind`."""
        return self.layout.named(kind)

    def col(self, kind: Kind, column: Column) -> F32:
        """One column over the rows of one kind; empty where not measured."""
        layout = self.layout
        rows = layout._spans.get(kind)
        if rows is None or column not in layout.columns:
            return np.empty(0, dtype=np.float32)
        return self.table[rows, layout.columns.index(column)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule's claim about one step, with the numbers it rests on and what to do about it."""

    code: str
    name: str
    step: int
    severity: Severity
    message: str
    subject: tuple[str, ...] = ()
    evidence: Mapping[str, float] = field(default_factory=dict)
    streak: int = 1
    advice: tuple[str, ...] = ()
    optimizer: str = ""

    def __str__(self) -> str:
        where = f" ({self.optimizer})" if self.optimizer else ""
        return f"step {self.step}{where}: {self.code} {self.name}: {self.message}"

    def _repr_html_(self) -> str:
        return finding_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All findings about step `step`, known to the host at step `seen_at`."""

    step: int
    seen_at: int
    findings: tuple[Finding, ...] = ()
    optimizer: str = ""
    phase: str = "train"

    @property
    def worst(self) -> Finding | None:
        """The gravest finding, the first one where several are equally grave."""
        return max(self.findings, key=lambda f: f.severity, default=None)

    def __bool__(self) -> bool:
        """True when something is wrong, so that `if verdict:` reads as "is there trouble?"."""
        return bool(self.findings)

    def _repr_html_(self) -> str:
        num = len(self.findings)
        words = f"{num} finding{'s' * (num != 1)}" if num else "nothing found"
        return box(f"step {self.step:,}: {words}", (), self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing to do: the name of a remedy and its arguments."""

    kind: str
    args: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return in_words(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the policy wants done before step `at`, because of step `about`."""

    about: int
    at: int
    actions: tuple[Action, ...] = ()
    because: tuple[str, ...] = ()
    optimizer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of an action."""

    at: int
    action: Action
    applied: bool
    detail: str = ""
    optimizer: str = ""

    def __str__(self) -> str:
        where = f" ({self.optimizer})" if self.optimizer else ""
        became = f"{'done' if self.applied else 'not done'}{f'; {self.detail}' if self.detail else ''}"
        return f"step {self.at}{where}: {self.action}: {became}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A checkpoint on disk: `candidate` when written, `good` after enough quiet steps, `bad` with the reason.

    One that was asked to clean non-finite values is `repaired`. `parts` names what it holds, `extra` is what was saved
    under that name. `run` names the run that saved it, and `sequence` is its place in the order of saving: what was
    saved last is the newest, whatever its step.
    """

    step: int
    branch: int = 0
    path: Path
    state: str
    digest: str
    run: str = ""
    sequence: int = 0
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    repaired: bool = False
    parts: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The first line of a record: what was trained, by which script and versions, under which settings.

    `host` and `pid` tell whether a run whose record was not closed is still going.
    """

    run_id: str
    started: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    model: str
    num_parameters: int
    optimizers: tuple[str, ...]
    rules: tuple[str, ...]
    script: str = ""
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BrainState:
    """A snapshot of the detectors before step `step`, so that a replay can start in the middle of a thinned record."""

    step: int
    state: Mapping[str, Any]
    optimizer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The last line of a record that was closed properly."""

    steps: Mapping[str, int]
    rejected: int
    findings: int
    reason: str
    dropped: Mapping[str, int] = field(default_factory=dict)


Record = RunInfo | Layout | Sample | Verdict | Decision | Outcome | BrainState | Closing


class Rule(Protocol):
    """A detector: frozen thresholds, documentation, and one pure method."""

    code: ClassVar[str]
    name: ClassVar[str]

    @property
    def severity(self) -> Severity:
        """How grave its findings are."""
        ...

    def check(self, window: Window) -> Iterator[Finding]:
        """Look at the newest sample and its history; yield what is wrong."""
        ...


class Policy(Protocol):
    """Turns verdicts into decisions. State goes in and comes out as plain JSON-able data; nothing is hidden."""

    def init(self) -> Mapping[str, Any]:
        """The state before the first verdict."""
        ...

    def decide(self, state: Mapping[str, object], verdict: Verdict) -> tuple[Mapping[str, Any], Decision]:
        """What to do about a verdict, and the state to decide the next one with."""
        ...


@runtime_checkable
class Sink(Protocol):
    """Receives every record, in order, on a thread of its own."""

    def write(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Flush and let go of everything."""
        ...


Args = Mapping[str, float]


def in_words(action: Action) -> str:
    """An action in words; one of somebody else's making by its name and its numbers.

    Example:
        >>> from trimtab.core.types import Action
        >>> print(Action(kind="rewind", args={"before": 48, "back": 0, "limit": 1}))
        roll the weights back to before step 48, at the learning rate of then
        >>> print(Action(kind="cut_lr", args={"factor": 0.5}))
        multiply the learning rate by 0.5
        >>> print(Action(kind="freeze_layers", args={"first": 3}))
        freeze layers (first 3)
    """
    words = _WORDS.get(action.kind)
    if words is not None:
        return words(action.args)
    numbers = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in action.args.items())
    return action.kind.replace("_", " ") + (f" ({numbers})" if numbers else "")


def _rewind(args: Args) -> str:
    when = f"to before step {int(args['before'])}" if "before" in args else "to before the trouble"
    if args.get("buffers"):
        return f"put the buffers back {when}"
    back = int(args.get("back", 0))
    older = f", {back} state{'' if back == 1 else 's'} further back than the last good one" if back > 0 else ""
    return f"roll the weights back {when}{older}{', at the learning rate of then' if args.get('limit') else ''}"


def _cut_lr(args: Args) -> str:
    text = f"multiply the learning rate by {args.get('factor', 0.5):g}"
    after = args.get("after_rewind")
    if after is None:
        return text
    return text + (", unless the weights went back" if after == 1.0 else f" (by {after:g} if the weights went back)")


_WORDS: Mapping[str, Callable[[Args], str]] = {
    "skip": lambda args: "skip the update",
    "stop": lambda args: "stop the training",
    "skip_data": lambda args: "put the samples of the batch aside",
    "rewind": _rewind,
    "trials": lambda args: f"try out what helps, {int(args.get('steps', 0))} steps each",
    "cut_lr": _cut_lr,
    "back_off_scaler": lambda args: f"multiply the loss scale by {args.get('factor', 0.5):g}",
    "raise_weight_decay": lambda args: f"multiply the weight decay by {args.get('factor', 1.5):g}",
}
