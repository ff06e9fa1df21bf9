"""The same batches as the loader alone, and after a restart the very next ones, whatever draws the order."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from trimtab.checkpoint import rng, state
from trimtab.checkpoint.format.tree import flatten, unflatten
from trimtab.checkpoint.loader import Begin, Quarantine, QuarantineSampler, ResumableLoader, content_hash, resumable
from trimtab.core.errors import CheckpointError, InputError

SIZE, EPOCHS = 14, 3


class Noisy(Dataset[Tensor]):
    """Every sample is its index and one random number of each kind, as an augmentation would draw them."""

    loaded: list[int]

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.loaded = size, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        drawn = torch.tensor([random.random(), np.random.rand(), random.gauss(0, 1)])
        return torch.cat([torch.tensor([float(index)]), torch.rand(1), drawn])


class Eager(Sampler[int]):
    """Draws from the global generator when it is asked for an iterator, not with the first index."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE).tolist())


class Numpy(Sampler[int]):
    """Owns a generator of numpy and draws one index at a time."""

    def __init__(self) -> None:
        self.random, self.other = np.random.default_rng(int(torch.randint(1000, ()))), random.Random(3)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield int(self.random.integers(SIZE)) if self.other.random() < 0.8 else 0


class Pairs(Sampler[list[int]]):
    """A batch sampler of its own kind: batches of unlike sizes, in random order."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        for start in torch.randperm(5, generator=self.generator).tolist():
            yield [(start + self.epoch + k) % SIZE for k in range(1 + start % 3)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shared(data: Any, seed: int) -> dict[str, Any]:
    """One generator for the loader and its sampler, as many scripts have it."""
    generator = seeded(seed)
    return {"sampler": RandomSampler(data, generator=generator), "generator": generator, "batch_size": 4}


KINDS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "in order": lambda data, seed: {"batch_size": 4},
    "shuffled": lambda data, seed: {"batch_size": 4, "shuffle": True},
    "shuffled, drop_last": lambda data, seed: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "own generator": lambda data, seed: {"batch_size": 4, "shuffle": True, "generator": seeded(seed)},
    "shared generator": shared,
    "with replacement": lambda data, seed: {
        "sampler": RandomSampler(data, replacement=True, num_samples=40, generator=seeded(seed)),
        "batch_size": 8,
    },
    "weighted": lambda data, seed: {"sampler": WeightedRandomSampler([1.0] * 7 + [2.0] * 7, SIZE), "batch_size": 4},
    "subset": lambda data, seed: {"sampler": SubsetRandomSampler(range(3, 13)), "batch_size": 3},
    "eager": lambda data, seed: {"sampler": Eager(), "batch_size": 4},
    "numpy": lambda data, seed: {"sampler": Numpy(), "batch_size": 4},
    "batch sampler": lambda data, seed: {"batch_sampler": Pairs()},
    "batch sampler of torch": lambda data, seed: {"batch_sampler": BatchSampler(RandomSampler(data), 5, False)},
    "eager, no batches": lambda data, seed: {"sampler": Eager(), "batch_size": None},
    "distributed": lambda data, seed: {
        "sampler": DistributedSampler(data, num_replicas=2, rank=1, shuffle=True),
        "batch_size": 2,
    },
}


def build(kind: str, seed: int, **more: Any) -> DataLoader[Any]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    data = Noisy()
    return DataLoader(data, **KINDS[kind](data, seed), **more)


def stream(loader: Any, epochs: int = EPOCHS, first: int = 0) -> Iterator[list[Any]]:
    """Batches of several epochs, with dropout in between drawing from the same generators."""
    for epoch in range(first, epochs):
        for part in (loader.sampler, loader.batch_sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        for batch in loader:
            yield [epoch, batch.tolist(), float(torch.rand(())), random.random(), float(np.random.rand())]
        torch.rand(3)  # validation at the end of an epoch


def moved(sections: dict[str, Any]) -> dict[str, Any]:
    """Through what a file can hold."""
    tree, tensors = flatten(sections)
    return unflatten(tree, {key: one.clone() for key, one in tensors.items()})


WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
]
names = ["alone", "workers", "persistent workers"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_batches_as_the_loader_alone(kind: str) -> None:
    expected = list(stream(build(kind, 0)))
    assert len(expected) >= 9
    assert list(stream(ResumableLoader(build(kind, 0)))) == expected


@pytest.mark.parametrize("more", WORKERS[1:], ids=names[1:])
@pytest.mark.parametrize("kind", ["shared generator", "eager", "batch sampler"])
def test_the_same_batches_as_the_loader_alone_with_workers(kind: str, more: dict[str, Any]) -> None:
    expected = list(stream(build(kind, 0, **more), 2))
    assert list(stream(ResumableLoader(build(kind, 0, **more)), 2)) == expected


def cut(loader: ResumableLoader, num: int) -> tuple[list[Any], dict[str, Any]]:
    """The first batches, and the state after the last of them, while the loop is still under way."""
    batches = stream(loader)
    seen = [next(batches) for _ in range(num)]
    return seen, moved(state.capture(loader=loader))


def goes_on(kind: str, num: int, expected: list[Any], **more: Any) -> ResumableLoader:
    first = ResumableLoader(build(kind, 0, **more))
    seen, saved = cut(first, num)
    assert seen == expected[:num]
    other = ResumableLoader(build(kind, 77, **more))
    state.restore(saved, loader=other)
    assert list(stream(other, first=saved["loader"]["epoch"])) == expected[num:]
    return other


@pytest.mark.parametrize("kind", KINDS)
def test_b29_goes_on_from_every_place(kind: str) -> None:
    expected = list(stream(build(kind, 0)))
    for num in range(1, len(expected) + 1, 1 if len(expected) < 15 else 4):
        other = goes_on(kind, num, expected)
        assert other.epoch == EPOCHS


@pytest.mark.parametrize("more", WORKERS[1:], ids=names[1:])
@pytest.mark.parametrize("kind", ["shuffled", "shared generator", "eager"])
def test_b29_goes_on_with_workers_and_their_random_numbers(kind: str, more: dict[str, Any]) -> None:
    expected = list(stream(build(kind, 0, **more)))
    for num in (1, 4, 7):  # the next worker is the second; the end of an epoch; the middle of one
        goes_on(kind, num, expected, **more)


@pytest.mark.parametrize("more", WORKERS, ids=names)
def test_a_state_between_two_epochs_begins_the_next_one(more: dict[str, Any]) -> None:
    expected = list(stream(build("shared generator", 0, **more)))
    first = ResumableLoader(build("shared generator", 0, **more))
    seen = list(stream(first, 1))
    saved = moved(state.capture(loader=first))
    other = ResumableLoader(build("shared generator", 77, **more))
    state.restore(saved, loader=other)
    rest = list(stream(other, first=1))
    assert seen + rest == expected
    assert len(rest) == 8


def test_exactly_at_the_end_of_an_epoch_inside_the_loop_none_is_left_and_then_a_full_epoch() -> None:
    loader = ResumableLoader(build("shuffled", 0))
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    saved = moved(state.capture(loader=loader))
    other = ResumableLoader(build("shuffled", 5))
    state.restore(saved, loader=other)
    assert [len(list(other)) for _ in range(3)] == [0, 4, 4]


@pytest.mark.parametrize("num", [0, 1])
@pytest.mark.parametrize("more", WORKERS, ids=names)
def test_begun_and_saved_before_the_first_batch(more: dict[str, Any], num: int) -> None:
    def batches(loader: Any) -> list[Any]:
        return [batch.tolist() for batch in loader] + [float(torch.rand(()))]

    expected = batches(iter(build("eager", 0, **more)))
    first = ResumableLoader(build("eager", 0, **more))
    running = iter(first)
    taken = [next(running).tolist() for _ in range(num)]
    saved = moved(state.capture(loader=first))
    other = ResumableLoader(build("eager", 9, **more))
    state.restore(saved, loader=other)
    assert taken + batches(other) == expected


def test_a_restart_after_a_restart() -> None:
    expected = list(stream(build("shuffled", 0, num_workers=2)))
    loader, seen = ResumableLoader(build("shuffled", 0, num_workers=2)), []
    epoch = 0
    for again in range(1, 5):
        batches = stream(loader, first=epoch)
        seen += [next(batches) for _ in range(3)]
        saved = moved(state.capture(loader=loader))
        loader, epoch = ResumableLoader(build("shuffled", again, num_workers=2)), saved["loader"]["epoch"]
        state.restore(saved, loader=loader)
        assert moved(state.capture(loader=loader))["loader"]["place"]["drawn"] == saved["loader"]["place"]["drawn"]
    assert seen == expected[:12]


def test_samples_already_seen_are_not_loaded_again() -> None:
    first = ResumableLoader(build("shuffled", 0))
    _, saved = cut(first, 3)
    other = ResumableLoader(build("shuffled", 1))
    state.restore(saved, loader=other)
    assert len(next(iter(other))) == SIZE - 12
    assert len(other.dataset.loaded) == SIZE - 12


def test_the_numbers_of_the_workers_matter() -> None:
    """Without the workers' own generators the last test of their numbers would pass for any loader without noise."""
    expected = list(stream(build("shuffled", 0, num_workers=2)))
    _, saved = cut(ResumableLoader(build("shuffled", 0, num_workers=2)), 3)
    saved["loader"]["workers"] = {}
    other = ResumableLoader(build("shuffled", 77, num_workers=2))
    state.restore(saved, loader=other)
    rest = list(stream(other))
    assert [one[1][0][0] for one in rest] == [one[1][0][0] for one in expected[3:]]
    assert rest != expected[3:]


def test_the_number_and_seed_of_a_worker_are_those_of_the_one_it_replaces() -> None:
    class Who(Dataset[Tensor]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Tensor:
            info: Any = get_worker_info()
            return torch.tensor([index, info.id, info.seed])

    def begin(worker: int) -> None:
        torch.manual_seed(worker)

    def loader() -> ResumableLoader:
        return ResumableLoader(DataLoader(Who(), batch_size=1, num_workers=2, worker_init_fn=begin))

    first = loader()
    batches = [batch.tolist() for batch in first]
    running = iter(first)
    again = next(running).tolist()
    saved = moved(state.capture(loader=first))
    other = loader()
    state.restore(saved, loader=other)
    rest = [again, *(batch.tolist() for batch in other)]
    assert [one[0][:2] for one in rest] == [one[0][:2] for one in batches]
    assert {one[0][2] - one[0][1] for one in rest} == {again[0][2]}


def test_another_number_of_workers_keeps_the_order_and_says_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    expected = [batch[:, 0].tolist() for batch in build("shuffled", 0)]
    first = ResumableLoader(build("shuffled", 0))
    running = iter(first)
    next(running)
    saved = moved(state.capture(loader=first))
    other = ResumableLoader(build("shuffled", 3, num_workers=2))
    state.restore(saved, loader=other)
    assert [batch[:, 0].tolist() for batch in other] == expected[1:]
    assert "had 0 workers and now has 2" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch_size": 7, "shuffle": True}, "loader: batch_size is 4 in the checkpoint, 7 here"),
        ({"batch_size": 4, "shuffle": True, "drop_last": True}, "loader: drop_last is False in the checkpoint, True"),
        ({"batch_size": 4}, "loader: sampler is RandomSampler in the checkpoint, SequentialSampler here"),
    ],
)
def test_another_batch_size_or_order_is_refused_and_nothing_changes(wrong: dict[str, Any], words: str) -> None:
    _, saved = cut(ResumableLoader(build("shuffled", 0)), 2)
    other = ResumableLoader(DataLoader(Noisy(), **wrong))
    running = iter(other)
    next(running)
    model = torch.nn.Linear(2, 2)
    weight = model.weight.detach().clone()
    before, position = rng.capture(), other.state_dict()["place"]["drawn"]
    with pytest.raises(CheckpointError, match=words):
        state.restore(saved | {"model": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}}, loader=other, model=model)
    assert torch.equal(model.weight, weight)
    assert torch.equal(rng.capture()["torch"], before["torch"])
    assert other.state_dict()["place"]["drawn"] == position
    assert len(list(running)) == len(other) - 1


def test_another_dataset_is_refused() -> None:
    _, saved = cut(ResumableLoader(build("shuffled", 0)), 2)
    with pytest.raises(CheckpointError, match="num_samples is 14 in the checkpoint, 20 here"):
        state.restore(saved, loader=ResumableLoader(DataLoader(Noisy(20), batch_size=4, shuffle=True)))


def test_a_sampler_that_cannot_draw_the_same_again_is_told() -> None:
    class Unsteady(Sampler[int]):
        def __len__(self) -> int:
            return SIZE

        def __iter__(self) -> Iterator[int]:
            return (random.SystemRandom().randrange(10**9) % SIZE for _ in range(SIZE))

    def loader() -> ResumableLoader:
        return ResumableLoader(DataLoader(Noisy(), sampler=Unsteady(), batch_size=4))

    _, saved = cut(loader(), 2)
    other = loader()
    before = rng.capture()
    with pytest.raises(CheckpointError, match=r"Unsteady.*does not draw the same samples again"):
        state.restore({"loader": saved["loader"]}, loader=other)
    assert torch.equal(rng.capture()["torch"], before["torch"])
    assert other.state_dict()["place"] is None


def test_the_place_of_another_kind_of_loader_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the place of another kind of loader"):
        ResumableLoader(build("shuffled", 0)).load_state_dict({"_snapshot": 3})


def test_loading_while_a_loop_is_under_way_takes_the_loop_back() -> None:
    loader = ResumableLoader(build("shuffled", 0))
    ids, saved = [], {}
    for batch in loader:
        ids.append(batch[:, 0].tolist())
        if len(ids) == 1:
            saved = moved(state.capture(loader=loader))
        if len(ids) == 3:
            state.restore(saved, loader=loader)
    assert len(ids) == 6
    assert ids[1:3] == ids[3:5]
    assert loader.epoch == 1


def test_a_part_that_fails_after_the_loader_leaves_the_loop_alone() -> None:
    class Fails:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, given: dict[str, Any]) -> None:
            raise KeyError("no")

    expected = [batch.tolist() for batch in build("own generator", 0)]
    loader = ResumableLoader(build("own generator", 0))
    running = iter(loader)
    seen = [next(running).tolist()]
    saved = moved(state.capture(loader=loader, ema=Fails()))
    saved["loader"]["quarantine"]["ids"] = [1, 2, 3]
    seen.append(next(running).tolist())
    with pytest.raises(CheckpointError, match=r"ema could not be loaded \(.*and ema could not be put back"):
        state.restore(saved, loader=loader, ema=Fails())
    assert seen + [batch.tolist() for batch in running] == expected
    assert len(loader.quarantine) == 0


# -- what is left out -------------------------------------------------------------------------------------------------


def ids_of(loader: Any) -> list[list[int]]:
    return [batch[:, 0].int().tolist() for batch in loader]


@pytest.mark.parametrize("more", WORKERS, ids=names)
def test_samples_in_quarantine_are_never_seen_again(more: dict[str, Any]) -> None:
    loader = ResumableLoader(build("shuffled", 0, **more))
    running = iter(loader)
    first = next(running)[:, 0].int().tolist()
    bad = sorted(set(range(SIZE)) - set(first))[:3]
    assert loader.leave_out([*bad, bad[0]]) == 3
    rest = [index for batch in ids_of(running) for index in batch]
    assert sorted(first + rest) == sorted(set(range(SIZE)) - set(bad))
    for _ in range(2):
        shuffled = [index for batch in ids_of(loader) for index in batch]
        assert sorted(shuffled) == sorted(set(range(SIZE)) - set(bad))
    running = iter(loader)
    next(running)
    other = ResumableLoader(build("shuffled", 8, **more))
    state.restore(moved(state.capture(loader=loader)), loader=other)
    expected = ids_of(running)
    assert ids_of(other) == expected
    assert other.quarantine.ids == tuple(bad)
    assert all(set(batch).isdisjoint(bad) for batch in ids_of(other))


def test_batches_stay_full_without_what_is_left_out() -> None:
    quarantine = Quarantine([1, 3])
    loader = ResumableLoader(DataLoader(Noisy(), batch_size=4), quarantine=quarantine)
    assert ids_of(loader) == [[0, 2, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]]
    assert len(loader) == 4


def test_a_batch_sampler_of_its_own_kind_loses_samples_and_empty_batches() -> None:
    loader = ResumableLoader(DataLoader(Noisy(), batch_sampler=[[0, 1], [2, 3], [4]]), quarantine=Quarantine([1, 4]))
    assert ids_of(loader) == [[0], [2, 3]]


def test_a_rewind_does_not_bring_back_what_was_left_out_since() -> None:
    loader = ResumableLoader(build("in order", 0))
    saved = moved(state.capture(loader=loader))
    loader.leave_out([0])
    state.restore(saved, loader=loader)
    assert ids_of(loader)[0] == [1, 2, 3, 4]


def test_last_ids_names_the_samples_of_the_batch() -> None:
    loader = ResumableLoader(build("shuffled", 0, num_workers=2))
    assert loader.last_ids is None
    for batch in loader:
        assert loader.last_ids == batch[:, 0].int().tolist()


def test_a_sampler_alone_can_leave_out_too() -> None:
    quarantine = Quarantine([torch.tensor(2), np.int64(4)])
    sampler = QuarantineSampler(SequentialSampler(range(6)), quarantine)
    assert list(sampler) == [0, 1, 3, 5]
    assert len(sampler) == 6
    quarantine.add([("a", 1)])
    assert ("a", 1) in quarantine
    again = Quarantine()
    again.load_state_dict(unflatten(*flatten(quarantine.state_dict())))
    assert again.ids == (2, 4, ("a", 1))


# -- data without indices ---------------------------------------------------------------------------------------------


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, 12, step):
            noise = torch.rand(1) if info is not None else torch.zeros(1)
            yield {"x": torch.tensor([index]), "noise": noise}


def stream_loader(**more: Any) -> DataLoader[Any]:
    torch.manual_seed(0)
    return DataLoader(Stream(), batch_size=2, **more)


def read(loader: Any) -> list[Any]:
    return [(batch["x"].flatten().tolist(), batch["noise"].tolist()) for batch in loader]


@pytest.mark.parametrize("more", WORKERS[:2], ids=names[:2])
def test_data_without_indices_is_read_again_up_to_the_place(more: dict[str, Any]) -> None:
    expected = read(stream_loader(**more))
    loader = ResumableLoader(stream_loader(**more))
    running = iter(loader)
    next(running), next(running), next(running)
    saved = moved(state.capture(loader=loader))
    other = ResumableLoader(stream_loader(**more))
    torch.manual_seed(50)
    state.restore(saved, loader=other)
    drawn = float(torch.rand(()))
    state.restore(saved, loader=other)
    assert read(other) == expected[3:]
    assert float(torch.rand(())) == drawn
    assert len(read(other)) == len(expected)


@pytest.mark.parametrize("more", WORKERS[:2], ids=names[:2])
def test_data_without_indices_is_left_out_by_its_content(more: dict[str, Any]) -> None:
    class Plain(Stream):
        def __iter__(self) -> Iterator[Any]:
            return ({"x": one["x"]} for one in super().__iter__())

    bad = [content_hash({"x": torch.tensor([index])}) for index in (0, 1, 2, 5)]
    loader = ResumableLoader(DataLoader(Plain(), batch_size=2, **more), quarantine=Quarantine(hashes=bad))
    for _ in range(2):
        seen = sorted(index for batch in loader for index in batch["x"].flatten().tolist())
        assert seen == [3, 4, 6, 7, 8, 9, 10, 11]
    single = ResumableLoader(DataLoader(Plain(), batch_size=None), quarantine=Quarantine(hashes=bad))
    assert [int(one["x"]) for one in single] == [3, 4, 6, 7, 8, 9, 10, 11]


def test_a_content_hash_depends_on_content_and_on_nothing_else() -> None:
    items = [
        torch.ones(2),
        torch.ones(2, dtype=torch.float64),
        torch.ones(1, 2),
        np.ones(2, dtype=np.float32),
        [1, 2],
        [[1], 2],
        "a",
        b"a",
        {"a": 1},
        {"b": 1},
        1,
        1.0,
        True,
        None,
    ]
    assert len({content_hash(one) for one in items}) == len(items)
    assert content_hash((1, "x")) == content_hash([1, "x"])
    assert content_hash(torch.ones(4)[::2]) == content_hash(torch.ones(2))
    assert content_hash("x") == "ad1fdb801cb9e79c2aeea90563d969fde153d0fa22860020f3f130cc3689a7aa"


# -- what is no DataLoader --------------------------------------------------------------------------------------------


def test_a_loader_with_a_state_of_its_own_is_used_as_it_is() -> None:
    class Stateful:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, given: dict[str, Any]) -> None: ...

    own = Stateful()
    assert resumable(own) is own
    assert isinstance(resumable(DataLoader(range(3))), ResumableLoader)
    with pytest.raises(InputError, match="the loader is a list; expected a torch DataLoader"):
        ResumableLoader([1, 2])  # type: ignore[arg-type]


def test_a_loader_that_gives_up_its_order_is_refused() -> None:
    with pytest.raises(InputError, match="in_order=False"):
        ResumableLoader(DataLoader(Noisy(), num_workers=1, in_order=False))


def test_what_workers_are_given_can_be_sent_to_another_process() -> None:
    loader = ResumableLoader(build("shuffled", 0, num_workers=2), quarantine=Quarantine(hashes=["x"]))
    copied = pickle.loads(pickle.dumps(loader._copy(Begin(None, {0: rng.capture_host()}, 3, 1)).collate_fn))
    assert copied([torch.ones(1)]).data.tolist() == [[1.0]]
    begin = pickle.loads(pickle.dumps(Begin(None, {0: rng.capture_host()}, 3, 1)))
    assert isinstance(begin, Begin)


def test_the_loader_that_was_given_stays_as_it_is_and_its_attributes_are_there() -> None:
    inner = build("shuffled", 0)
    sampler, collate = inner.batch_sampler, inner.collate_fn
    loader = ResumableLoader(inner)
    list(loader)
    assert (inner.batch_sampler, inner.collate_fn) == (sampler, collate)
    assert loader.batch_size == 4
    assert len(loader.dataset) == SIZE
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = loader.nothing_like_it
