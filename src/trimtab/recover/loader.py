"""A data loader that knows where it is: a run that stops in the middle of an epoch goes on with the very next batch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trimtab.core.errors import InputError
from trimtab.recover import chance, rng
from trimtab.recover.compare import different, refuse
from trimtab.recover.order import Counted, Order
from trimtab.recover.place import Run, described, set_back
from trimtab.recover.sampler import Quarantine
from trimtab.recover.workers import Begin, Deliver

log = logging.getLogger("trimtab")


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
        >>> from trimtab.recover import ResumableLoader
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
        self._generators: dict[int, Any] = {}
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
    def last_ids(self) -> Any:
        """The indices in the batch handed out last; None before the first one, and for data without indices."""
        return self._place.mark.ids if self._place is not None else None

    def leave_out(self, ids: Iterable[Any] = (), hashes: Iterable[str] = ()) -> int:
        """Put samples in quarantine, from the next batch on; returns how many were not in it yet."""
        return self.quarantine.add(ids, hashes)

    # -- one epoch -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on in the one that was loaded."""
        return self._batches(self._begin())  # not a generator itself: a loader draws its numbers when it is begun

    def _batches(self, run: Run) -> Iterator[Any]:
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
        start = {"rng": rng.capture_host(), "generators": chance.capture(self._loader)}
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

    def _replaced(self, batches: int, counted: Counted) -> Iterator[Any]:
        """New workers in the place of earlier ones, and no number drawn for them."""
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

    def _copy(self, worker_init_fn: Any) -> DataLoader[Any]:
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

    def state_dict(self) -> dict[str, Any]:
        """The exact place, as plain data and tensors."""
        place = self._place
        lasting = place is not None or self._loader.persistent_workers
        return {
            "epoch": self._epochs,
            "place": None if place is None else place.state(),
            "generators": chance.capture(self._loader) if place is None else {},
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
        return [
            different("loader", name, str(here[name]), str(saved.get(name)))
            for name in ("batch_size", "drop_last", "sampler", "num_samples")
            if here[name] != saved.get(name)
        ]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; a `CheckpointError`, and nothing changed, where that cannot be."""
        refuse(self.differences(state))
        workers = state["loader"]["num_workers"]
        if workers != self._loader.num_workers:
            told = "the loader had %d workers and now has %d: the order stays, random numbers drawn in them differ"
            log.warning(told, workers, self._loader.num_workers)
        place = None if state["place"] is None else Run.of(state["place"])
        counted = self._replay(place, workers) if place is not None and self._indexed else None
        if place is None:
            chance.restore(self._loader, state["generators"])
        self.quarantine.load_state_dict(state["quarantine"])
        self._epochs, self._place, self._waiting, self._counted = state["epoch"], place, place is not None, counted
        self._generators = {int(worker): kept for worker, kept in state["workers"].items()}
        self._base_seed, self._inner, self._shifted = state["base_seed"], None, False
        self._turn += 1

    def keep(self) -> Callable[[], None]:
        """A function that puts everything back as it is now, a loop under way included."""
        fields, own, hidden = dict(vars(self)), chance.capture(self._loader), copy.deepcopy(vars(self.quarantine))

        def put_back() -> None:
            vars(self).update(fields)
            vars(self.quarantine).update(hidden)
            chance.restore(self._loader, own)

        return put_back

    def _replay(self, run: Run, num_workers: int) -> Counted:
        """Draw the order of the epoch again up to the place; the global generators end up as they are now."""
        before, own = rng.capture_host(), chance.capture(self._loader)
        try:
            set_back(self._loader, run.start)
            return self._order.replay(run.mark, self._loader.generator, fresh=run.fresh, num_workers=num_workers)
        except BaseException:
            chance.restore(self._loader, own)
            raise
        finally:
            rng.restore_host(before)


def resumable(loader: Any, *, quarantine: Quarantine | None = None) -> Any:
    """The loader itself where it can say where it is, such as torchdata's `StatefulDataLoader`; else a wrapped one."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return loader
    return ResumableLoader(loader, quarantine=quarantine)
