"""Sample lines in memory as columns: a million of them take a hundred megabytes, and reading one takes microseconds.

Most lines have the same names in the same order as some line before them. The first of such a kind is parsed as JSON;
for those after it a pattern made from it reads the numbers alone, a block of the file at a time. Lines in which the
same values are NaN or infinite are a kind of their own, so that a run that broke early is read as fast as any other.
A line that no pattern fits is JSON again.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

from trimtab.record.format import SampleLine

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Keep = Callable[[str], bool]

_NUMBER = rb"[-+.0-9eE]+"
_DIGITS = b"0123456789.+-eE"
_FEW = 6  # lines that are sooner read one by one than sorted by their kind
_MAX_PATTERNS = 64  # a record in which every line has other names is read as JSON
_MAX_NAMES = 200
_EXACT = 2.0**53  # from here on a float is no longer the whole number that it was read from


class _Group:
    """All lines of one layout and phase that hold the same names."""

    def __init__(self, number: int, layout: int, phase: str, names: tuple[str, ...]) -> None:
        self.number, self.layout, self.phase, self.names = number, layout, phase, names
        self.place, self.seq, self.step, self.branch, self.num_floats = (array("q") for _ in range(5))
        self.values = array("d")
        self.notes: dict[int, dict[str, tuple[str, ...]]] = {}

    def line(self, i: int) -> SampleLine:
        start = i * len(self.names)
        values = self.values[start : start + len(self.names)]
        scalars = dict(zip(self.names, values, strict=True))
        return SampleLine(
            self.seq[i],
            self.step[i],
            self.branch[i],
            self.layout,
            self.phase,
            self.num_floats[i],
            scalars,
            self.notes.get(i, {}),
        )

    def column(self, name: str) -> Floats:
        # A copy of the column alone: a view would keep the array from growing.
        return np.frombuffer(self.values, np.float64).reshape(-1, len(self.names))[:, self.names.index(name)].copy()

    def extend(self, places: Ints, numbers: Floats, branches: Ints, num_floats: Ints) -> None:
        """Take lines at once: of each its seq, its step and its values."""
        self.place.frombytes(places.tobytes())
        self.seq.frombytes(numbers[:, 0].astype(np.int64).tobytes())
        self.step.frombytes(numbers[:, 1].astype(np.int64).tobytes())
        self.branch.frombytes(branches.tobytes())
        self.num_floats.frombytes(num_floats.tobytes())
        self.values.frombytes(np.ascontiguousarray(numbers[:, 2:]).tobytes())


class _Pattern:
    """Reads lines that differ from one that is known in their numbers alone."""

    def __init__(self, group: _Group, line: SampleLine, match: re.Pattern[bytes]) -> None:
        self.group, self.branch, self.num_floats, self.match = group, line.branch, line.num_floats, match
        self.lines = re.compile(match.pattern + rb"\n")
        self.row = [line.scalars[name] for name in group.names]  # what is not finite stands here in every line
        self.finite = [i for i, value in enumerate(self.row) if math.isfinite(value)]

    def values(self, texts: Sequence[bytes]) -> list[float]:
        """The scalars of one line; ValueError where a text cannot be read as a number."""
        row = self.row.copy()
        for i, text in zip(self.finite, texts, strict=True):
            row[i] = float(text)
        return row

    def numbers(self, block: bytes, num: int) -> Floats | None:
        """Seq, step and values of these `num` lines; None where one of them does not fit."""
        found = self.lines.findall(block)
        if len(found) != num:  # each takes its line to the end: as many as lines are all of them
            return None
        try:
            numbers = np.fromiter(map(float, chain.from_iterable(found)), np.float64)
        except ValueError:
            return None
        numbers = numbers.reshape(num, 2 + len(self.finite))
        if numbers[:, :2].max(initial=0.0) >= _EXACT:
            return None
        if len(self.finite) < len(self.row):
            read, numbers = numbers, np.empty((num, 2 + len(self.row)))
            numbers[:, 2:] = self.row
            numbers[:, [0, 1, *(2 + i for i in self.finite)]] = read
        return numbers


class SampleColumns(Sequence[SampleLine]):
    """Every sample line of a record in the order written; of the scalars those whose names `keep` wants.

    Example:
        >>> columns = SampleColumns()
        >>> columns.add(SampleLine(3, 0, 0, 1, "train", 0, {"loss": 0.5}, {}))
        >>> columns.series("loss", "train", lambda layout: True)[1].tolist(), len(columns)
        ([0.5], 1)
    """

    def __init__(self, keep: Keep | None = None) -> None:
        self._keep = keep
        self._groups: dict[tuple[int, str, tuple[str, ...]], _Group] = {}
        self._list: list[_Group] = []
        self._owner, self._index = array("i"), array("i")
        self._patterns: dict[bytes, dict[bytes, _Pattern]] = {}  # by the line without its digits, then by its head
        self._num_learned = 0
        self._foreign: set[bytes] = set()  # shapes of lines that the writer of records did not write
        self._last: _Pattern | None = None
        self._alike = True

    def __len__(self) -> int:
        """How many lines there are."""
        return len(self._owner)

    @overload
    def __getitem__(self, at: int) -> SampleLine: ...

    @overload
    def __getitem__(self, at: slice) -> list[SampleLine]: ...

    def __getitem__(self, at: int | slice) -> SampleLine | list[SampleLine]:
        """A line by its number, or several."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return self._list[self._owner[at]].line(self._index[at])

    def since(self, start: int = 0) -> Iterator[SampleLine]:
        """The lines one by one, as they were written, from number `start` on."""
        for i in range(start, len(self._owner)):
            yield self[i]

    @property
    def layouts(self) -> tuple[int, ...]:
        """The layouts in use, in the order of their first line."""
        return tuple(dict.fromkeys(group.layout for group in self._list))

    def add(self, line: SampleLine, raw: bytes = b"") -> None:
        """Take a line; from its bytes the lines after it are read faster."""
        scalars = line.scalars
        if self._keep is not None:
            scalars = {name: value for name, value in scalars.items() if self._keep(name)}
        key = (line.layout, line.phase, tuple(scalars))
        if (group := self._groups.get(key)) is None:
            group = self._groups[key] = _Group(len(self._list), *key)
            self._list.append(group)
        if line.notes:
            group.notes[len(group.seq)] = line.notes
        self._put(group, line.seq, line.step, line.branch, line.num_floats)
        group.values.extend(scalars.values())
        if raw and not line.notes and len(line.scalars) <= _MAX_NAMES:
            self._learn(line, group, raw)

    def read(self, raw: bytes) -> bool:
        """Take a line by a known pattern; False where none fits, and it has to be parsed."""
        pattern = self._last
        found = pattern.match.fullmatch(raw) if pattern is not None else None
        if found is None:
            pattern = self._patterns.get(raw.translate(None, _DIGITS), {}).get(_head(raw))
            found = pattern.match.fullmatch(raw) if pattern is not None else None
            if found is None or pattern is None:
                return False
            self._last = pattern
        assert pattern is not None
        seq, step, *texts = found.groups()
        try:
            values = pattern.values(texts)
        except ValueError:
            return False
        self._put(pattern.group, int(seq), int(step), pattern.branch, pattern.num_floats)
        pattern.group.values.extend(values)
        return True

    def read_block(self, block: bytes) -> Iterator[tuple[int, bytes]]:
        """Take many whole lines by the patterns that fit; every other line is given back with its number in the block.

        They come in order: whoever asks for the next one has parsed the last, and added it if it is a sample.
        """
        num = int(np.count_nonzero(np.frombuffer(block, np.uint8) == ord("\n")))
        if self._alike and self._last is not None:
            numbers = self._last.numbers(block, num)
            if numbers is not None:
                self._commit([(self._last, np.arange(num), numbers)])
                return
        lines = block.split(b"\n")[:-1]
        shapes = block.translate(None, _DIGITS).split(b"\n")[:-1]
        first = 0
        for i, shape in enumerate(shapes):
            if shape not in self._patterns:
                yield from self._read_stretch(first, lines[first:i], shapes[first:i])
                first = i + 1
                yield i, lines[i]
        yield from self._read_stretch(first, lines[first:], shapes[first:])
        self._alike = first < num and shapes.count(shapes[-1]) == num

    def _read_stretch(self, first: int, lines: list[bytes], shapes: list[bytes]) -> Iterator[tuple[int, bytes]]:
        """Take lines whose shapes are all known; those that do not fit are given back."""
        taken = self._sorted(lines, shapes) if len(lines) > _FEW else None
        if taken is None:
            yield from ((i, line) for i, line in enumerate(lines, first) if not self.read(line))
        else:
            self._commit(taken)

    def _sorted(self, lines: list[bytes], shapes: list[bytes]) -> list[tuple[_Pattern, Ints, Floats]] | None:
        """Every pattern with the places of its lines and their numbers; None where a line has no pattern."""
        alike: dict[bytes, list[int]] = {}
        for i, shape in enumerate(shapes):
            alike.setdefault(shape, []).append(i)
        taken = []
        for shape, places in alike.items():
            heads = self._patterns[shape]
            by_pattern: dict[_Pattern, list[int]] = {next(iter(heads.values())): places}
            if len(heads) > 1:
                by_pattern = {}
                for i in places:
                    pattern = heads.get(_head(lines[i]))
                    if pattern is None:
                        return None
                    by_pattern.setdefault(pattern, []).append(i)
            for pattern, its in by_pattern.items():
                numbers = pattern.numbers(b"\n".join([lines[i] for i in its]) + b"\n", len(its))
                if numbers is None:
                    return None
                taken.append((pattern, np.array(its), numbers))
        return taken

    def _commit(self, taken: list[tuple[_Pattern, Ints, Floats]]) -> None:
        """Add lines to their groups, in the order written."""
        num, base = sum(len(places) for _, places, _ in taken), len(self._owner)
        owner, index = np.empty(num, np.int32), np.empty(num, np.int32)
        for group in dict.fromkeys(pattern.group for pattern, _, _ in taken):
            own = [one for one in taken if one[0].group is group]
            places = np.concatenate([places for _, places, _ in own])
            order = np.argsort(places, kind="stable")
            places = places[order]
            owner[places] = group.number
            index[places] = len(group.seq) + np.arange(len(places))
            group.extend(
                base + places,
                np.concatenate([numbers for _, _, numbers in own])[order],
                np.concatenate([np.full(len(p), pattern.branch, np.int64) for pattern, p, _ in own])[order],
                np.concatenate([np.full(len(p), pattern.num_floats, np.int64) for pattern, p, _ in own])[order],
            )
        self._owner.frombytes(owner.tobytes())
        self._index.frombytes(index.tobytes())

    def series(self, name: str, phase: str, wanted: Callable[[int], bool]) -> tuple[Ints, Floats]:
        """Steps and values of one scalar, over the layouts that are wanted, in the order written."""
        groups = [g for g in self._list if g.phase == phase and name in g.names and wanted(g.layout)]
        if not groups:
            return np.empty(0, np.int64), np.empty(0, np.float64)
        steps = np.concatenate([np.array(g.step, np.int64) for g in groups])
        values = np.concatenate([g.column(name) for g in groups])
        if len(groups) > 1:
            order = np.argsort(np.concatenate([np.array(g.place, np.int64) for g in groups]), kind="stable")
            steps, values = steps[order], values[order]
        return steps, values

    def names(self, phase: str, wanted: Callable[[int], bool]) -> tuple[str, ...]:
        """The scalars that any line of this phase holds."""
        found = (name for g in self._list if g.phase == phase and wanted(g.layout) for name in g.names)
        return tuple(dict.fromkeys(found))

    def steps(self, phase: str, wanted: Callable[[int], bool]) -> Ints:
        """The step of every line of this phase, in the order written."""
        groups = [g for g in self._list if g.phase == phase and wanted(g.layout)]
        if not groups:
            return np.empty(0, np.int64)
        if len(groups) == 1:
            return np.array(groups[0].step, np.int64)
        order = np.argsort(np.concatenate([np.array(g.place, np.int64) for g in groups]), kind="stable")
        return np.concatenate([np.array(g.step, np.int64) for g in groups])[order]

    def with_tables(self) -> Iterator[tuple[int, str, Ints, Ints, Ints]]:
        """Of every kind of line: layout, phase, and of those that had a table seq, step and branch."""
        for g in self._list:
            had = np.array(g.num_floats, np.int64) > 0
            if had.any():
                seq, step, branch = (np.array(numbers, np.int64)[had] for numbers in (g.seq, g.step, g.branch))
                yield g.layout, g.phase, seq, step, branch

    def _put(self, group: _Group, seq: int, step: int, branch: int, num_floats: int) -> None:
        group.place.append(len(self._owner))
        self._owner.append(group.number)
        self._index.append(len(group.seq))
        group.seq.append(seq)
        group.step.append(step)
        group.branch.append(branch)
        group.num_floats.append(num_floats)

    def _learn(self, line: SampleLine, group: _Group, raw: bytes) -> None:
        """Make a pattern from a line, if the writer of records wrote it: in that order, and nothing else."""
        shape = raw.translate(None, _DIGITS)
        if max(self._num_learned, len(self._foreign)) >= _MAX_PATTERNS or shape in self._foreign:
            return
        phase = re.escape(json.dumps(line.phase).encode())
        head = rb'\{"t":"sample","seq":([0-9]{1,18}),"step":([0-9]{1,18}),"branch":%d,"layout":%d,' % (
            line.branch,
            line.layout,
        )
        head += rb'"phase":%s,"tab":%d,"scalars":\{' % (phase, line.num_floats)
        kept = set(group.names)
        parts, not_finite = [], {}
        for name, value in line.scalars.items():
            number = b"(%s)" % _NUMBER if name in kept else _NUMBER
            if not math.isfinite(value):
                number, not_finite[name] = b"null", repr(value)
            parts.append(re.escape(json.dumps(name).encode()) + b":" + number)
        tail = f',"nf":{json.dumps(not_finite, separators=(",", ":"))}' if not_finite else ""
        match = re.compile(head + b",".join(parts) + rb"\}" + re.escape(tail.encode()) + rb"\}")
        if match.fullmatch(raw) is None:
            self._foreign.add(shape)
            return
        self._num_learned += 1
        self._last = _Pattern(group, line, match)
        self._patterns.setdefault(shape, {})[_head(raw)] = self._last


def _head(raw: bytes) -> bytes:
    """What is the same in many lines: the numbers of branch, layout and table, and which scalars are not finite."""
    head = raw[raw.find(b',"branch":') : raw.find(b',"scalars":{')][:200]
    at = raw.rfind(b'},"nf":{')
    return head if at < 0 else head + raw[at:]
