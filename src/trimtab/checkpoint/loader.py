"""A data loader that knows where it is: a run that stops in the middle of an epoch goes on with the very next batch.

`Quarantine` holds the samples that it leaves out, by index, or by a hash of their content where data has no index.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import random
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, get_worker_info

from trimtab.checkpoint import rng
from trimtab.checkpoint.parts import different, refuse
from trimtab.checkpoint.rng import HostState
from trimtab.core.errors import CheckpointError, InputError

log = logging.getLogger("trimtab")
_Index = TypeVar("_Index", covariant=True)


class ResumableLoader:
    """The same batches as the `DataLoader` it is given, and `state_dict`/`load_state_dict` for the exact place.

    Works with any sampler or batch sampler that draws the same order from the same generators, with any number of
    workers, whose own random numbers go on too. Samples that were already seen are not loaded again; only data without
    indices (`IterableDataset`) is read from the beginning of the epoch and dropped. A state taken after the last batch,
    inside the loop, resumes with none left; one taken after the loop resumes with the next epoch. Loading while a loop
    is under way makes that loop go on from the place loaded. What a dataset draws from a generator of its own is out
    of reach, and so is a random stream without indices whose workers outlast the epoch.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from trimtab.checkpoint import ResumableLoader
        >>> def build(): return ResumableLoader(DataLoader(range(8), batch_size=2))
        >>> first = build()
        >>> batches = iter(first)
        >>> next(batches).tolist(), next(batches).tolist()
        ([0, 1], [2, 3])
        >>> second = build()
        >>> second.load_state_dict(first.state_dict())
        >>> [batch.tolist() for batch in second]
        [[4, 5], [6, 7]]
    """

    def __init__(self, loader: DataLoader[Any], *, quarantine: Quarantine | None = None) -> None:
        if not isinstance(loader, DataLoader):
            raise InputError(
                f"the loader is a {type(loader).__name__}; expected a torch DataLoader. One that has state_dict and "
                "load_state_dict of its own is used as it is"
            )
        if not getattr(loader, "in_order", True):
            raise InputError("the loader has in_order=False: its place cannot be known; build it with in_order=True")
        self.quarantine = Quarantine() if quarantine is None else quarantine
        self.before_next: Callable[[], None] | None = None
        """Called between two iterations, before the next batch is fetched: the moment at which a state is whole."""
        self._loader = loader
        self._indexed = not isinstance(loader.dataset, IterableDataset)
        self._order = Order(loader, self.quarantine)
        self._inner: DataLoader[Any] | None = None
        self._shifted = False  # the workers are not in the order a new epoch wants them
        self._epochs = self._turn = 0
        self._place: Run | None = None  # None between two epochs
        self._live: Run | None = None  # what the newest loop reads; the place may be elsewhere once it was loaded
        self._waiting = False  # the place was loaded, and no loop has gone there yet
        self._counted: Counted | None = None
        self._generators: dict[int, HostState] = {}
        self._base_seed: int | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # while being copied there is no loader yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def epoch(self) -> int:
        """How many epochs are complete."""
        return self._epochs

    @property
    def last_ids(self) -> object:
        """The indices in the batch handed out last; None before the first one, and for data without indices."""
        return self._place.mark.ids if self._place is not None else None

    def leave_out(self, ids: Iterable[object] = (), hashes: Iterable[str] = ()) -> int:
        """Put samples in quarantine, from the next batch on; returns how many were not in it yet."""
        return self.quarantine.add(ids, hashes)

    # -- one epoch -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on in the one that was loaded."""
        return self._batches(self._begin())  # not a generator itself: a loader draws its numbers when it is begun

    def _batches(self, run: Run) -> Iterator[object]:
        while True:
            if run is self._live and self.before_next is not None:
                self.before_next()
            if run is self._live and self._outdated(run):
                run = self._begin()
            delivery = next(run.iterator, None)
            if delivery is None:
                break
            run.batches += 1
            run.mark = run.marks.popleft() if self._indexed else run.mark
            if run is self._live and delivery.generators is not None:
                self._generators[delivery.worker] = delivery.generators
            if not delivery.dropped:
                yield delivery.data
        if run is self._live:
            self._live = self._place = None
            self._epochs += 1

    def _outdated(self, run: Run) -> bool:
        """Whether a state was loaded since, or workers still prepare samples that are now in quarantine."""
        if run.turn == self._turn and run.hidden != len(self.quarantine) and self._loader.num_workers:
            self.load_state_dict(self.state_dict())
        return run.turn != self._turn

    def _begin(self) -> Run:
        run = self._same_epoch(self._place) if self._waiting and self._place is not None else self._next_epoch()
        run.turn, run.hidden, run.marks = self._turn, len(self.quarantine), self._order.marks
        self._waiting, self._counted = False, None
        self._place = self._live = run
        return run

    def _next_epoch(self) -> Run:
        start: EpochStart = {"rng": rng.capture_host(), "generators": capture(self._loader)}
        lasting = bool(self._loader.persistent_workers and self._loader.num_workers)
        if lasting and (self._shifted or self._inner is None) and self._base_seed is not None:
            run = Run(start, fresh=False)  # these workers have been at work before: no seed is drawn for them
            run.iterator = self._replaced(0, self._order.begin())
            return run
        if self._inner is None:
            self._inner = self._copy(self._loader.worker_init_fn)
        fresh = not lasting or self._inner._iterator is None
        if fresh:
            self._generators.clear()
        run = Run(start, fresh=fresh)
        run.iterator = iter(self._inner)
        self._base_seed = getattr(run.iterator, "_base_seed", None)
        return run

    def _same_epoch(self, run: Run) -> Run:
        if self._counted is not None:
            run.iterator = self._replaced(run.batches, self._counted)
            return run
        before = rng.capture_host()
        set_back(self._loader, run.start)
        self._inner = self._copy(self._loader.worker_init_fn)
        run.iterator = iter(self._inner)
        for _ in range(run.batches):
            next(run.iterator, None)
        rng.restore_host(before)
        return run

    def _replaced(self, batches: int, counted: Counted) -> Iterator[Delivery]:
        """New workers instead of earlier ones, without drawing a seed for them."""
        shift = batches % self._loader.num_workers if self._loader.num_workers else 0
        begin = Begin(self._loader.worker_init_fn, self._generators, self._base_seed, shift)
        inner = self._copy(begin)
        inner.generator = torch.Generator()
        self._order.resumed = counted
        try:
            return iter(inner)
        finally:
            self._order.resumed, inner.generator = None, self._loader.generator
            # Workers that last are asked again in the next epoch; others are replaced by new ones with a seed drawn.
            self._inner, self._shifted = (inner if self._loader.persistent_workers else None), shift != 0

    def _copy(self, worker_init_fn: Callable[[int], None] | None) -> DataLoader[Any]:
        """The loader with our order and our delivery; the one that was given stays as it is."""
        inner = copy.copy(self._loader)
        in_lists = self._loader.batch_sampler is not None
        # A loader allows no new sampler once it is built, but a copy that has not begun takes any.
        if self._indexed:
            inner.__dict__["batch_sampler" if in_lists else "sampler"] = self._order
        inner.__dict__["_iterator"] = None
        inner.collate_fn = Deliver(self._loader.collate_fn, self.quarantine, in_lists)
        inner.worker_init_fn = worker_init_fn
        return inner

    # -- its place -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """The exact place, as plain data and tensors."""
        place = self._place
        lasting = place is not None or self._loader.persistent_workers
        return {
            "epoch": self._epochs,
            "place": None if place is None else place.state(),
            "generators": capture(self._loader) if place is None else {},
            "workers": {str(worker): state for worker, state in self._generators.items() if lasting},
            "base_seed": self._base_seed,
            "loader": described(self._loader),
            "quarantine": self.quarantine.state_dict(),
        }

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """Why the place in `state` is none in this loader, one line each; nothing is changed."""
        if not {"epoch", "place", "loader"} <= set(state):
            return ["loader: the checkpoint holds the place of another kind of loader"]
        here, saved = described(self._loader), state["loader"]
        names = (
            ("sampler",) if _spread_otherwise(here, saved) else ("batch_size", "drop_last", "sampler", "num_samples")
        )
        return [different("loader", n, str(here[n]), str(saved.get(n))) for n in names if here[n] != saved.get(n)]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; a `CheckpointError`, and nothing changed, where that cannot be."""
        refuse(self.differences(state))
        workers = state["loader"]["num_workers"]
        if workers != self._loader.num_workers:
            message = "the loader had %d workers and now has %d: the order stays, random numbers drawn in them differ"
            log.warning(message, workers, self._loader.num_workers)
        place = None if state["place"] is None else Run.of(state["place"])
        here = described(self._loader)
        if place is not None and _spread_otherwise(here, state["loader"]):
            place = _spread(place, here, state["loader"])
        counted = self._replay(place, workers) if place is not None and self._indexed else None
        if place is None:
            restore(self._loader, state["generators"])
        self.quarantine.load_state_dict(state["quarantine"])
        self._epochs, self._place, self._waiting, self._counted = state["epoch"], place, place is not None, counted
        self._generators = {int(worker): kept for worker, kept in state["workers"].items()}
        self._base_seed, self._inner, self._shifted = state["base_seed"], None, False
        self._turn += 1

    def keep(self) -> Callable[[], None]:
        """A function that puts everything back as it is now, a loop under way included."""
        fields, own, hidden = dict(vars(self)), capture(self._loader), copy.deepcopy(vars(self.quarantine))

        def put_back() -> None:
            vars(self).update(fields)
            vars(self.quarantine).update(hidden)
            restore(self._loader, own)

        return put_back

    def _replay(self, run: Run, num_workers: int) -> Counted:
        """Draw the order of the epoch again up to the place; the global generators end up as they are now."""
        before, own = rng.capture_host(), capture(self._loader)
        try:
            set_back(self._loader, run.start)
            return self._order.replay(run.mark, self._loader.generator, fresh=run.fresh, num_workers=num_workers)
        except BaseException:
            restore(self._loader, own)
            raise
        finally:
            rng.restore_host(before)


def resumable(loader: DataLoader[Any], *, quarantine: Quarantine | None = None) -> DataLoader[Any] | ResumableLoader:
    """The loader itself where it can say where it is, such as torchdata's `StatefulDataLoader`; else a wrapped one."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return loader
    return ResumableLoader(loader, quarantine=quarantine)


class EpochStart(TypedDict):
    """The generators when an epoch began: the global ones, and the loader's own."""

    rng: HostState
    generators: dict[str, object]


class Run:
    """One epoch under way: how it began, and how far it has come."""

    def __init__(self, start: EpochStart, fresh: bool, batches: int = 0, mark: Mark | None = None) -> None:
        self.start, self.fresh, self.batches, self.mark = start, fresh, batches, mark or Mark()
        self.iterator: Iterator[Delivery] = iter(())
        self.marks: deque[Mark] = deque()
        self.turn = self.hidden = 0

    def state(self) -> dict[str, object]:
        """As plain data and tensors."""
        place = {"batches": self.batches, "drawn": self.mark.drawn, "check": self.mark.check, "fresh": self.fresh}
        return {**place, "start": dict(self.start)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Run:
        """What `state` was taken of, before anybody reads it."""
        mark = Mark(drawn=state["drawn"], check=state["check"])
        return cls(state["start"], state["fresh"], state["batches"], mark)


def _spread_otherwise(here: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether the samples of an epoch were spread over another number of processes."""
    return bool(here["num_replicas"] and saved.get("num_replicas") and here["num_replicas"] != saved["num_replicas"])


def _spread(place: Run, here: Mapping[str, Any], saved: Mapping[str, Any]) -> Run:
    """The same place in an epoch whose samples are spread over another number of processes.

    All of them together have drawn as many samples from the beginning of the same order; where that cannot be, a few
    less, which come twice then.
    """
    together, num = place.mark.drawn * saved["num_replicas"], here["num_replicas"]
    drawn = together // num
    size = here["batch_size"] or 1
    drawn -= drawn % size
    if twice := together - drawn * num:
        log.warning(
            "%d samples of this epoch come twice: %d processes shared it, now %d do", twice, saved["num_replicas"], num
        )
    return Run(place.start, place.fresh, drawn // size, Mark(drawn=drawn, check=UNKNOWN))


def set_back(loader: DataLoader[Any], start: EpochStart) -> None:
    """Put every generator back to where it was when the epoch began."""
    rng.restore_host(start["rng"])
    restore(loader, start["generators"])


def described(loader: DataLoader[Any]) -> dict[str, object]:
    """What must be the same for a place to mean the same; the number of workers only counts for random numbers."""
    try:
        num_samples = len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:
        num_samples = None
    return {
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "sampler": type(loader.sampler).__name__,
        "num_samples": num_samples,
        "num_workers": loader.num_workers,
        "num_replicas": getattr(loader.sampler, "num_replicas", None),
    }


_Generators = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


class _Source(NamedTuple):
    """One thing that decides the order of samples: where it is, how its state is read, and how it is set."""

    path: str
    get: Callable[[], object]
    set: Callable[[Any], object]


def capture(loader: DataLoader[Any]) -> dict[str, object]:
    """The state of everything that decides the order of a loader's samples, but for the global generators."""
    return {source.path: source.get() for source in _sources(loader)}


def restore(loader: DataLoader[Any], state: Mapping[str, object]) -> None:
    """Put back what `capture` took; what is new here stays as it is."""
    for source in list(_sources(loader)):
        if source.path in state:
            source.set(state[source.path])


def _sources(loader: DataLoader[Any]) -> Iterator[_Source]:
    """Generators, epochs, and samplers with a state of their own."""
    seen: set[int] = set()
    if isinstance(loader.generator, torch.Generator):
        seen.add(id(loader.generator))
        yield _generator("generator", loader.generator)
    for root in ("batch_sampler", "sampler"):
        yield from _inside(getattr(loader, root, None), root, seen)


def _inside(owner: object, path: str, seen: set[int]) -> Iterator[_Source]:
    if owner is None or id(owner) in seen or not hasattr(owner, "__dict__"):
        return
    seen.add(id(owner))
    if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
        yield _Source(path, owner.state_dict, owner.load_state_dict)
        return
    if hasattr(owner, "set_epoch") and isinstance(getattr(owner, "epoch", None), int):
        yield _Source(f"{path}.epoch", partial(getattr, owner, "epoch"), partial(setattr, owner, "epoch"))
    for name, value in sorted(vars(owner).items()):
        if isinstance(value, _Generators) and id(value) not in seen:
            seen.add(id(value))
            yield _generator(f"{path}.{name}", value)
        elif isinstance(value, Sampler):
            yield from _inside(value, f"{path}.{name}", seen)


def _generator(path: str, one: _Generators) -> _Source:
    if isinstance(one, torch.Generator):
        return _Source(path, one.get_state, lambda state: one.set_state(state.cpu().clone()))
    if isinstance(one, np.random.Generator):
        bits = one.bit_generator
        return _Source(path, partial(getattr, bits, "state"), partial(setattr, bits, "state"))
    if isinstance(one, np.random.RandomState):
        return _Source(path, partial(one.get_state, legacy=False), one.set_state)
    return _Source(path, one.getstate, one.setstate)


UNKNOWN = -1
"""In place of a checksum: what was drawn was drawn by others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where the sampler stood when a batch had been drawn; `check` sums up all that was drawn until then."""

    drawn: int = 0
    check: int = 0
    ids: object = None


class Counted:
    """What a sampler yields, counted; begun no earlier than its reader begins, because beginning may draw numbers."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.drawn, self.check = 0, 0
        self._source = source
        self._inner: Iterator[Any] | None = None
        self._ahead: list[object] = []

    def __iter__(self) -> Counted:
        if self._inner is None:
            self._inner = iter(self._source)
        return self

    def __next__(self) -> Any:
        value = self._ahead.pop() if self._ahead else next(self._inner or iter(()))
        self.drawn += 1
        self.check = zlib.crc32(repr(value).encode(), self.check)
        return value

    def look_ahead(self) -> None:
        """Draw one value now and hand it out next: a loader with workers draws before it is asked for a batch."""
        if not self._ahead:
            self._ahead.extend(islice(self._inner or (), 1))


class Order:
    """Stands where a loader keeps its sampler: the same indices, without those in quarantine, and a mark per batch."""

    def __init__(self, loader: DataLoader[Any], quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self._batch: BatchSampler | None = None
        self._of_lists = loader.batch_sampler is not None
        self._original: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._source = self._original
        if type(self._original) is BatchSampler:  # quarantine is enforced before batches are made, so they stay full
            self._batch, self._source = self._original, self._original.sampler
        self.marks: deque[Mark] = deque()
        self.resumed: Counted | None = None

    def __len__(self) -> int:
        return len(cast(Sized, self._original))

    def __iter__(self) -> Iterator[object]:
        """Begin an epoch, or go on in one that was `resumed`. A loader with workers calls this twice, and so can we."""
        counted = self.resumed or self.begin()
        self.marks = deque()
        return self._marked(self._batches(counted), counted, self.marks)

    def begin(self) -> Counted:
        """Begin an epoch: a BatchSampler begins its sampler with the first batch, a loader its own at once."""
        counted = Counted(self._source)
        return counted if self._batch is not None else iter(counted)

    def replay(self, mark: Mark, generator: torch.Generator | None, *, fresh: bool, num_workers: int) -> Counted:
        """Draw again what was drawn until `mark`, in the order of draws of a loader; no sample is loaded.

        The generators must be as they were when the epoch began. `fresh` says that workers, if any, began with it.
        """
        counted = self.begin()
        if fresh:
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)  # the seed of the workers
            if num_workers:
                counted = self.begin()
        # Where nothing was drawn yet, and no worker waits, the sampler has yet to begin.
        drawn = sum(1 for _ in islice(iter(counted), mark.drawn)) if mark.drawn or num_workers else 0
        if drawn != mark.drawn or mark.check not in (counted.check, UNKNOWN):
            raise CheckpointError(
                f"the sampler ({type(self._source).__name__}) does not draw the same samples again: "
                f"{mark.drawn} were drawn before the checkpoint, and these {drawn} are others. It must draw from a "
                "generator of its own, or all at the beginning of an epoch, and the dataset must be the same"
            )
        if num_workers:
            counted.look_ahead()
        return counted

    def _batches(self, counted: Counted) -> Iterator[object]:
        if self._batch is not None:
            kept = QuarantineSampler(counted, self._quarantine)
            return iter(BatchSampler(kept, self._batch.batch_size, self._batch.drop_last))
        return self._kept_lists(counted) if self._of_lists else iter(QuarantineSampler(counted, self._quarantine))

    def _kept_lists(self, lists: Counted) -> Iterator[list[object]]:
        for whole in lists:
            kept = [one for one in whole if one not in self._quarantine]
            if kept or not whole:
                yield kept

    @staticmethod
    def _marked(batches: Iterator[object], counted: Counted, marks: deque[Mark]) -> Iterator[object]:
        for ids in batches:
            marks.append(Mark(drawn=counted.drawn, check=counted.check, ids=ids))
            yield ids


class QuarantineState(TypedDict):
    """What a `Quarantine` saves."""

    ids: list[Hashable]
    hashes: list[str]


class Quarantine:
    """The indices and content hashes of samples that must not be seen again; shared by all that enforce it.

    Example:
        >>> from trimtab.checkpoint import Quarantine, QuarantineSampler
        >>> quarantine = Quarantine()
        >>> quarantine.add(ids=[3, 5])
        2
        >>> list(QuarantineSampler(range(6), quarantine))
        [0, 1, 2, 4]
    """

    def __init__(self, ids: Iterable[object] = (), hashes: Iterable[str] = ()) -> None:
        self._ids: dict[Hashable, None] = {}
        self._hashes: dict[str, None] = {}
        self.add(ids, hashes)

    def add(self, ids: Iterable[object] = (), hashes: Iterable[str] = ()) -> int:
        """Leave these out from now on; returns how many were not yet left out."""
        before = len(self)
        self._ids.update(dict.fromkeys(map(plain_id, ids)))
        self._hashes.update(dict.fromkeys(hashes))
        return len(self) - before

    def __len__(self) -> int:
        return len(self._ids) + len(self._hashes)

    def __contains__(self, sample_id: object) -> bool:
        return bool(self._ids) and plain_id(sample_id) in self._ids

    @property
    def ids(self) -> tuple[Hashable, ...]:
        """Indices left out, in the order they came."""
        return tuple(self._ids)

    @property
    def hashes(self) -> tuple[str, ...]:
        """Content hashes left out, in the order they came."""
        return tuple(self._hashes)

    def hides(self, item: object) -> bool:
        """Whether the content of this sample is left out; nothing is hashed while there are no hashes."""
        return bool(self._hashes) and content_hash(item) in self._hashes

    def state_dict(self) -> QuarantineState:
        """Plain data to go on from."""
        return {"ids": list(self._ids), "hashes": list(self._hashes)}

    def load_state_dict(self, state: QuarantineState) -> None:
        """Leave out what was left out then as well. What is left out now stays so: a rewind brings nothing back."""
        self.add(state["ids"], state["hashes"])


class QuarantineSampler(Sampler[_Index]):
    """Another sampler without the samples in quarantine; its length is that of the other, so an upper bound."""

    def __init__(self, sampler: Iterable[_Index], quarantine: Quarantine) -> None:
        self.sampler, self.quarantine = sampler, quarantine

    def __iter__(self) -> Iterator[_Index]:
        """Every index of the other sampler that is not in quarantine at the moment it is drawn."""
        return (one for one in iter(self.sampler) if one not in self.quarantine)

    def __len__(self) -> int:
        return len(cast(Sized, self.sampler))


def plain_id(sample_id: object) -> Hashable:
    """An index as it can be compared and written down: tensors and numpy scalars become numbers."""
    if isinstance(sample_id, Tensor | np.generic):
        return sample_id.item()
    return tuple(map(plain_id, sample_id)) if isinstance(sample_id, list | tuple) else sample_id


def content_hash(item: object) -> str:
    """A name for a sample that depends on nothing but its content: the same in every process, run and machine.

    Tensors and arrays count with type, shape and values; dicts and sequences with what they hold. Anything else counts
    with its `repr`, and must have one that says what it is.

    Example:
        >>> content_hash({"x": torch.ones(2), "y": 1}) == content_hash({"x": torch.ones(2), "y": 1})
        True
        >>> content_hash(torch.zeros(2)) == content_hash(torch.zeros(1, 2))
        False
    """
    digest = hashlib.sha256()
    _feed(digest, item)
    return digest.hexdigest()


def _feed(digest: hashlib._Hash, item: object) -> None:
    if isinstance(item, Tensor):
        values = item.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(f"tensor {item.dtype} {tuple(item.shape)} ".encode())
        digest.update(values.view(torch.uint8).numpy().data)
    elif isinstance(item, np.ndarray) and item.dtype != object:
        digest.update(f"array {item.dtype} {item.shape} ".encode() + item.tobytes())
    elif isinstance(item, bytes | bytearray):
        digest.update(f"bytes {len(item)} ".encode() + item)
    elif isinstance(item, Mapping):
        digest.update(f"mapping {len(item)} ".encode())
        for key, value in item.items():
            _feed(digest, key)
            _feed(digest, value)
    elif isinstance(item, list | tuple | np.ndarray):
        digest.update(f"sequence {len(item)} ".encode())
        for value in item:
            _feed(digest, value)
    else:
        text = repr(item).encode()
        digest.update(f"{type(item).__name__} {len(text)} ".encode() + text)


try:
    from torch.utils.data._utils.worker import _generate_state
except ImportError:  # a version that seeds numpy in another way, or not at all
    _generate_state = None  # type: ignore[assignment]


class Delivery(NamedTuple):
    """A batch as it comes from the inner loader: the data, who made it, and its generators if they moved."""

    data: object
    worker: int
    generators: HostState | None
    dropped: bool


class Deliver:
    """Makes a batch as the loader's own `collate_fn` does, and says what random numbers were left afterwards.

    Samples whose content is in quarantine are left out before; where nothing remains, there is no batch.
    """

    def __init__(self, collate: Callable[[Any], object], quarantine: Quarantine, in_lists: bool) -> None:
        self._collate, self._quarantine, self._in_lists = collate, quarantine, in_lists
        self._last: HostState | None = None

    def __call__(self, samples: Any) -> Delivery:
        """One batch, or one sample where the loader makes no batches."""
        if self._in_lists and self._quarantine.hashes:
            kept = [one for one in samples if not self._quarantine.hides(one)]
            dropped = bool(samples) and not kept
        else:
            kept, dropped = samples, not self._in_lists and self._quarantine.hides(samples)
        data = None if dropped else self._collate(kept)
        info = get_worker_info()
        if info is None:
            return Delivery(data, -1, None, dropped)
        return Delivery(data, info.id, self._moved(), dropped)

    def _moved(self) -> HostState | None:
        """The generators of this process, or None where they have not moved since the last batch."""
        now = rng.capture_host()
        now["torch"] = np.asarray(now["torch"])  # a tensor would cost a file of shared memory per batch
        if self._last is not None and _same(now, self._last):
            return None
        self._last = now
        return now


class Begin:
    """Starts a worker instead of an earlier one: with its number, and its generators as it left them."""

    def __init__(
        self,
        own: Callable[[int], object] | None,
        generators: Mapping[int, HostState],
        base_seed: int | None,
        shift: int,
    ) -> None:
        self._own, self._generators, self._base_seed, self._shift = own, dict(generators), base_seed, shift

    def __call__(self, worker: int) -> None:
        """Called in the new process, before its first sample."""
        info: Any = get_worker_info()
        former = (worker + self._shift) % info.num_workers
        # The next batch was due from that worker, and goes to the first of these.
        object.__setattr__(info, "id", former)  # its own refuses any change
        if self._base_seed is not None:
            object.__setattr__(info, "seed", self._base_seed + former)
            _seed(self._base_seed, former)
        if self._own is not None:
            self._own(former)
        if former in self._generators:
            rng.restore_host(self._generators[former])


def _seed(base_seed: int, worker: int) -> None:
    """As a loader seeds its workers."""
    random.seed(base_seed + worker)
    torch.manual_seed(base_seed + worker)
    if _generate_state is not None:
        np.random.seed(_generate_state(base_seed, worker))  # type: ignore[no-untyped-call]


def _same(one: HostState, other: HostState) -> bool:
    return (
        np.array_equal(one["torch"], other["torch"])
        and np.array_equal(one["python"]["words"], other["python"]["words"])
        and one["python"]["gauss"] == other["python"]["gauss"]
        and np.array_equal(one["numpy"]["keys"], other["numpy"]["keys"])
        and one["numpy"]["place"] == other["numpy"]["place"]
        and one["numpy"]["has_gauss"] == other["numpy"]["has_gauss"]
        and one["numpy"]["cached"] == other["numpy"]["cached"]
    )
