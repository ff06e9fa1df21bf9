"""Tensors of which each process holds a part, in one checkpoint: written and read by `torch.distributed.checkpoint`.

That decides who writes what (of what several hold alike only one does), and which parts of which files make up what a
process holds when it reads, however many there are then. The files are ours: every process writes a checkpoint of
its own (`rank-3`) inside the folder of the whole, with checksums and without a pickle; the first one puts the plan and
their digests into the manifest of the whole, and the marker last.

    step-00000500/  manifest.json  status.json  COMMIT
                    rank-0/  manifest.json  COMMIT  shards.safetensors  rng.safetensors  …
                    rank-1/  …
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load, load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trimtab.checkpoint.format import container
from trimtab.checkpoint.format.manifest import Contents, Manifest, Written, rank_folder
from trimtab.checkpoint.format.tensors import Json, dtype_name, dtype_named, flat
from trimtab.checkpoint.format.tree import Elsewhere
from trimtab.checkpoint.parts import inner_optimizer, joined, labelled, paired, plain_name, whole_model
from trimtab.checkpoint.together import Ranks
from trimtab.core.errors import CheckpointError

SHARDS: Final = "shards"
"""The section of each process with its parts, and that of the whole with the plan."""
SHARED = ("model", "optimizer", "ema", "gradients")
"""Sections whose tensors are stored once where all processes hold the same; the others are each one's own."""
_MAX_CHUNKS = 10_000_000
Where = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a tensor that this process holds: where it lies in the whole, and its values."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor

    @classmethod
    def whole(cls, values: Tensor) -> Chunk:
        """All of a tensor."""
        return cls(tuple(values.shape), (0,) * values.ndim, values)

    @property
    def box(self) -> ChunkStorageMetadata:
        """Its place, in the words of `torch.distributed.checkpoint`."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.values.shape))


def is_shared(value: object) -> bool:
    """Whether a tensor is a part of one that several processes hold."""
    return isinstance(value, Tensor) and hasattr(value, "to_local")


def offsets_of(tensor: Any) -> tuple[int, ...]:
    """Where the part that this process holds begins in the whole."""
    (place,) = tensor.__create_chunk_list__()
    return tuple(place.offsets)


Places = dict[Where, tuple[tuple[int, ...], tuple[int, ...]]]
"""Shape and offsets of each part by its path in the sections."""


def split(sections: Mapping[str, Any]) -> tuple[dict[str, Any], Places]:
    """The sections with the part that this process holds instead of each shared tensor, and where those belong."""
    places: Places = {}

    def local(path: Where, value: Any) -> Any:
        if not is_shared(value):
            return value
        places[path] = tuple(value.shape), offsets_of(value)
        return value.detach().to_local()

    return {name: _mapped(value, (name,), local) for name, value in sections.items()}, places


def _mapped(value: Any, path: Where, leaf: Callable[[Where, Any], Any]) -> Any:
    """A copy of nested containers with every value replaced by what `leaf` returns for it."""
    if isinstance(value, dict):
        whole = copy.copy(value)  # an OrderedDict or defaultdict keeps its kind
        whole.update((key, _mapped(one, (*path, key), leaf)) for key, one in value.items())
        return whole
    if type(value) is list or type(value) is tuple:
        return type(value)(_mapped(one, (*path, index), leaf) for index, one in enumerate(value))
    return leaf(path, value)


def _key(path: Where) -> str:
    name = ""
    for one in path:
        name = joined(name, one)
    return name


# -- writing ------------------------------------------------------------------------------------------------------


def write(ranks: Ranks, path: Path, sections: Mapping[str, Any], places: Places, **about: Any) -> None:
    """Write one checkpoint of what all processes hold, as `container.write` does for one; all of them must call this.

    On an error in any of them CheckpointError is raised in all, and nothing is left behind.
    """
    same = _held_alike(ranks, sections, places)
    own, chunks = _taken_apart(sections, places, same)
    with contextlib.ExitStack() as stack:
        folder = ranks.from_first(lambda: stack.enter_context(container.unfinished(path.parent, path.name)))
        writer = ShardWriter(ranks, folder, own, about)
        try:
            save({}, storage_writer=writer, planner=_SavePlan(chunks), process_group=ranks.group)
        except CheckpointException as error:
            raise _explained(error) from error
        ranks.from_first(stack.close)  # it takes its name


def _explained(error: CheckpointException) -> CheckpointError:
    told = [f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items())]
    return CheckpointError("; ".join(told)[:2000])


def _held_alike(ranks: Ranks, sections: Mapping[str, Any], places: Places) -> set[Where]:
    """The tensors that no process holds a part of, and of which all hold the same values: they are stored once."""
    digests: dict[Where, str] = {}

    def note(path: Where, value: Any) -> None:
        if type(value) in (Tensor, nn.Parameter) and path not in places and _is_plain(value):
            digests[path] = _digest(value)

    for name in SHARED:
        if name in sections:
            _mapped(sections[name], (name,), note)
    all_told = ranks.gathered(lambda: digests)
    return {path for path, digest in digests.items() if all(told.get(path) == digest for told in all_told)}


def _is_plain(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_quantized and not value.is_meta


def _digest(value: Tensor) -> str:
    data = flat(value.detach().cpu().contiguous()).view(torch.uint8)
    kind = f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())}"
    return hashlib.sha256(kind.encode() + data.numpy().tobytes()).hexdigest()


def _taken_apart(
    sections: Mapping[str, Any], places: Places, same: set[Where]
) -> tuple[dict[str, Any], dict[str, Chunk]]:
    """What this process writes for itself, and what all write together, by key."""
    chunks: dict[str, Chunk] = {}

    def leaf(path: Where, value: Any) -> Any:
        if path not in places and path not in same:
            return value
        key = name = _key(path)
        number = 2
        while key in chunks:
            key, number = f"{name}~{number}", number + 1
        chunks[key] = Chunk(*places[path], value) if path in places else Chunk.whole(value)
        return Elsewhere(key)

    return {name: _mapped(value, (name,), leaf) for name, value in sections.items()}, chunks


class _SavePlan(DefaultSavePlanner):
    """Offers the parts of this process; who writes what several hold is decided by the default."""

    def __init__(self, chunks: Mapping[str, Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = chunks

    def create_local_plan(self) -> SavePlan:
        """One item for each part; of a part without elements there is nothing to write."""
        filled = [(key, one) for key, one in self._chunks.items() if one.values.numel() or not math.prod(one.shape)]
        return SavePlan([_item(key, one) for key, one in filled])

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of a part."""
        return self._chunks[write_item.index.fqn].values


def _item(key: str, chunk: Chunk) -> WriteItem:
    about = TensorWriteData(
        chunk=chunk.box, properties=TensorProperties(dtype=chunk.values.dtype), size=torch.Size(chunk.shape)
    )
    return WriteItem(index=MetadataIndex(key, torch.Size(chunk.offsets)), type=WriteItemType.SHARD, tensor_data=about)


class ShardWriter(StorageWriter):
    """Writes the parts of each process to a checkpoint of its own, and makes one of them in the end."""

    def __init__(self, ranks: Ranks, folder: Path, own: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self._ranks, self._folder, self._own, self._about = ranks, folder, own, about

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One object writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        if not self._folder.is_dir():
            raise CheckpointError(
                f"rank {self._ranks.rank} does not see {self._folder}, which rank 0 has just made: "
                "all processes need the same file system for checkpoints"
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing to add."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what is this process's to write; it is on the disk on return."""
        values: dict[str, Any] = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        sections = {**self._own, SHARDS: values}
        about = {name: self._about[name] for name in ("step", "branch", "run", "sequence")}
        container.write(self._folder, rank_folder(self._ranks.rank), sections, **about)
        done: Future[list[WriteResult]] = Future()
        rank = self._ranks.rank
        sizes = [(item.index, values[item.index.fqn].nbytes) for item in plan.items]
        done.set_result([WriteResult(index=i, size_in_bytes=n, storage_data=rank) for i, n in sizes])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """In the first process: note where every part is, and that nothing is missing."""
        written = []
        for rank in range(self._ranks.size):
            folder = self._folder / rank_folder(rank)
            found = container.inspect(folder)  # as the others see it, and not as they say
            written.append(Written(path=folder, digest=found.digest, num_bytes=found.num_bytes))
        writers = {(r.index.fqn, tuple(r.index.offset or ())): r.storage_data for each in results for r in each}
        plan: dict[str, Any] = {}
        for key, about in metadata.state_dict_metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            chunks = [[list(c.offsets), list(c.sizes), writers[key, tuple(c.offsets)]] for c in about.chunks]
            plan[key] = [dtype_name(about.properties.dtype), list(about.size), chunks]
        meta = {**self._about["meta"], "parts": list(self._own)}
        container.commit(self._folder, {SHARDS: plan}, written, **{**self._about, "meta": meta})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Its folder is given when it is built."""
        return False


# -- reading ------------------------------------------------------------------------------------------------------


class ShardReader(StorageReader):
    """Reads a checkpoint of several processes for `torch.distributed.checkpoint.load`; nothing in it is executed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._found = container.inspect(self._path)
        self._files: dict[int, Mapping[str, Tensor]] = {}
        self.plan = plan_of(self._path, self._found)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One object reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What there is, and how it is cut."""
        return Metadata(state_dict_metadata={key: about for key, (about, _) in self.plan.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what is asked for out of the files, which are mapped into memory."""
        for item in plan.items:
            stored = self._stored(item.storage_index)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _stored(self, index: MetadataIndex) -> Tensor:
        about, writers = self.plan[index.fqn]
        offsets = tuple(index.offset or ())
        rank = writers[offsets]
        if rank not in self._files:
            folder = self._path / rank_folder(rank)
            self._files[rank] = container.read(folder, sections=(SHARDS,), verify=False).sections[SHARDS]
        tensor = self._files[rank].get(index.fqn)
        size = next(c.sizes for c in about.chunks if tuple(c.offsets) == offsets)
        if not isinstance(tensor, Tensor) or tensor.shape != size or tensor.dtype is not about.properties.dtype:
            raise CheckpointError(f"{self._path}: what rank {rank} wrote of {index.fqn[:80]!r} is not what was planned")
        return tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Its folder is given when it is built."""
        return False


def keys_in(tree: Json) -> Iterator[str]:
    """The keys of the tensors that a description says are stored by all processes together."""
    if isinstance(tree, Mapping):
        if tree.get("$") == "elsewhere":
            yield str(tree.get("v"))
        else:
            for one in tree.values():
                yield from keys_in(one)
    elif isinstance(tree, list):
        for one in tree:
            yield from keys_in(one)


Planned = dict[str, tuple[TensorStorageMetadata, dict[tuple[int, ...], int]]]
"""What is known of each tensor: its kind and its parts, and which process wrote the part at an offset."""


def plan_of(path: Path, found: Manifest) -> Planned:
    """The plan in a manifest, every number of it checked; CheckpointError where the parts do not make up the whole."""
    try:
        raw = container.read(path, sections=(SHARDS,), verify=False).sections[SHARDS]
        plan = {str(key): _planned(body, len(found.ranks)) for key, body in raw.items()}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: the plan of its parts makes no sense ({str(error)[:200]})") from error
    return plan


def _planned(body: Any, num_ranks: int) -> tuple[TensorStorageMetadata, dict[tuple[int, ...], int]]:
    name, size, parts = body
    shape = _counts(size)
    if len(parts) > _MAX_CHUNKS:
        raise ValueError(f"{len(parts)} parts of one tensor")
    chunks, writers = [], {}
    for offsets, sizes, rank in parts:
        start, extent = _counts(offsets), _counts(sizes)
        inside = len(start) == len(extent) == len(shape)
        if not inside or any(a + n > whole for a, n, whole in zip(start, extent, shape, strict=True)):
            raise ValueError(f"a part of {extent} at {start} of a tensor of {shape}")
        if type(rank) is not int or not 0 <= rank < num_ranks or start in writers:
            raise ValueError(f"rank {rank!r} wrote the part at {start}")
        writers[start] = rank
        chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(extent)))
    if sum(math.prod(c.sizes) for c in chunks) != math.prod(shape):
        raise ValueError(f"its parts do not make up a tensor of {shape}")
    about = TensorStorageMetadata(TensorProperties(dtype=dtype_named(name)), torch.Size(shape), chunks)
    return about, writers


def _counts(values: Any) -> tuple[int, ...]:
    if (
        not isinstance(values, list)
        or len(values) > 64
        or any(type(n) is not int or not 0 <= n < 2**62 for n in values)
    ):
        raise ValueError(f"{str(values)[:80]} are no sizes")
    return tuple(values)


class _LoadPlan(DefaultLoadPlanner):
    """Asks for the parts that this process holds."""

    def __init__(self, chunks: Mapping[str, Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = chunks

    def create_local_plan(self) -> LoadPlan:
        """Which parts of which files make up what this process holds."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, chunk in self._chunks.items():
            about = self.metadata.state_dict_metadata[key]
            assert isinstance(about, TensorStorageMetadata)
            if chunk.values.numel():
                items += create_read_items_for_chunk_list(key, about, [chunk.box])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where the values go."""
        target = self._chunks[read_item.dest_index.fqn].values
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target


def read(path: Path, objects: Mapping[str, Any] | None = None, ranks: Ranks | None = None) -> Contents:
    """Read a checkpoint, whoever wrote it, as the state of these objects in this process.

    Where an object holds a part of a tensor, that part is read; otherwise all of it. Every file is checked before
    anything is handed out: of those that several processes wrote, each checks its share.
    """
    ranks = ranks or Ranks()
    found = container.inspect(path)
    if not found.ranks:
        contents = container.read(path)
        like = _Likeness(objects or {}, contents.sections)
        return replace(contents, sections={n: _mapped(s, (n,), like.cut) for n, s in contents.sections.items()})
    damages = [
        d for r in range(ranks.rank, len(found.ranks), ranks.size) for d in container.damage_of_rank(path, found, r)
    ]
    if damages:
        raise CheckpointError(f"{path} cannot be used: {'; '.join(map(str, damages))}; use another checkpoint")
    contents = container.read(path)  # the plan
    mine = ranks.rank if ranks.rank < len(found.ranks) else 0
    own = container.read(path / rank_folder(mine), verify=False).sections
    own.pop(SHARDS, None)
    if mine != ranks.rank:  # nobody's random numbers are drawn twice
        own.pop("rng", None)
    like = _Likeness(objects or {}, own)
    reader = ShardReader(path)
    chunks: dict[str, Chunk] = {}
    wrapped = {n: _mapped(s, (n,), partial(_wanted, reader.plan, like, chunks)) for n, s in own.items()}
    with warnings.catch_warnings():
        # Each process reads what it needs by itself; PyTorch warns that this is how a single one would do it.
        warnings.simplefilter("ignore")
        try:
            if "no_dist" in inspect.signature(load).parameters:
                load({}, storage_reader=reader, planner=_LoadPlan(chunks), no_dist=True)
            else:  # PyTorch 2.6 has only the older function for that
                load_state_dict({}, reader, no_dist=True, planner=_LoadPlan(chunks))
        except CheckpointException as error:
            raise _explained(error) from error
    sections = {n: _mapped(s, (n,), lambda _, v: v.made() if isinstance(v, _Wanted) else v) for n, s in wrapped.items()}
    return replace(contents, sections=sections)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor to be read, and the one it will be like."""

    values: Tensor
    like: Any

    def made(self) -> Tensor:
        return self.values if self.like is None else as_part(self.values, self.like)


def _wanted(plan: Planned, like: _Likeness, chunks: dict[str, Chunk], path: Where, value: Any) -> Any:
    if not isinstance(value, Elsewhere):
        return value
    if value.key not in plan:
        raise CheckpointError(f"tensor {value.key[:80]!r} is in no plan")
    about, _ = plan[value.key]
    shape, dtype = tuple(about.size), about.properties.dtype
    model = like.of(path, shape)
    if model is None:
        values = torch.empty(shape, dtype=dtype, device="cpu")
        chunks[value.key] = Chunk.whole(values)
    else:
        values = torch.empty(model.to_local().shape, dtype=dtype, device="cpu")
        chunks[value.key] = Chunk(shape, offsets_of(model), values)
    return _Wanted(values, model)


def as_part(values: Tensor, like: Any) -> Tensor:
    """The part of a tensor that this process holds, as one that is distributed like another."""
    from torch.distributed.tensor import DTensor

    mesh = like.device_mesh
    local = values.to(like.to_local().device)
    return DTensor.from_local(local, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


class _Likeness:
    """Which tensor of the objects here what was saved goes into, where several processes hold it."""

    def __init__(self, objects: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        model = whole_model(objects.get("model"))
        self._by_name: dict[str, dict[str, Tensor]] = {}
        if isinstance(model, nn.Module):
            self._by_name["model"] = {plain_name(model, n): v for n, v in model.state_dict(keep_vars=True).items()}
            self._by_name["gradients"] = {plain_name(model, n): p for n, p in model.named_parameters()}
        if isinstance(ema := objects.get("ema"), nn.Module):
            self._by_name["ema"] = {plain_name(ema, n): v for n, v in ema.state_dict(keep_vars=True).items()}
        here, there = labelled(objects.get("optimizer")), saved.get("optimizer", {})
        names = paired(here, {str(label): str(label) for label in there})
        self._optimizers = {names[n]: _parameters(inner_optimizer(one)) for n, one in here.items() if n in names}

    def of(self, path: Where, shape: tuple[int, ...]) -> Any:
        """The tensor at a path of the sections, if this process holds a part of it; None otherwise."""
        found = self._at(path)
        return found if is_shared(found) and tuple(found.shape) == shape else None

    def _at(self, path: Where) -> Any:
        if path[0] in self._by_name and len(path) == 2:
            return self._by_name[path[0]].get(path[1])
        if path[0] == "optimizer" and len(path) == 6 and path[2:4] == ("state", "state") and path[5] != "step":
            return self._optimizers.get(path[1], {}).get(path[4])
        return None

    def cut(self, path: Where, value: Any) -> Any:
        """Of a whole tensor, the part that this process holds."""
        like = self.of(path, tuple(value.shape)) if type(value) is Tensor else None
        if like is None:
            return value
        for dim, (start, length) in enumerate(zip(offsets_of(like), like.to_local().shape, strict=True)):
            value = value.narrow(dim, min(start, value.shape[dim]), length)
        return as_part(value.contiguous(), like)


def _parameters(optimizer: Any) -> dict[object, Tensor]:
    """The parameters of an optimizer by the numbers under which its state is saved."""
    groups = getattr(optimizer, "param_groups", ())
    return dict(enumerate(p for group in groups for p in group["params"]))
