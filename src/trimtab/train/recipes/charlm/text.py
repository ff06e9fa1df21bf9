"""The text of a language model: any file or folder, read piece by piece, and what its tokens are.

Bytes are read where they lie, by memory mapping. Characters, words and the tokens of a `tokenizers` file are numbered
once into a temporary file that is mapped in the same way: no text has to fit in memory.
"""

from __future__ import annotations

import codecs
import logging
import re
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from trimtab.core.errors import InputError, MissingPackageError
from trimtab.train.data_problems import DataError, refuse

log = logging.getLogger("trimtab")
BYTE, CHAR, WORD = "byte", "char", "word"
PIECE = 1 << 20
"""How much text is read at once, in bytes."""
MANY = 1_000_000
"""More windows than these are not shuffled by a list of all of them."""


# -- files -------------------------------------------------------------------------------------------------------------


def text_files(path: Path) -> list[Path]:
    """The file, or every file of text below the folder, in the order of their paths.

    In a folder, files that hold no text are left out with a warning, and hidden ones without.
    """
    if not path.exists():
        raise InputError(f"the text {path} cannot be read: there is no such file; give a file or a folder of text")
    if path.is_dir():
        below = sorted(one for one in path.rglob("*") if one.is_file() and not _hidden(one, path))
        found = [one for one in below if _is_text(one)]
        if len(found) < len(below):
            first = next(one for one in below if one not in found)
            log.warning(
                "%d files in %s are empty or no text and left out, such as %s", len(below) - len(found), path, first
            )
        if not found:
            raise DataError(f"{path} holds no file of text; give a file, or a folder with some")
        return found
    refuse(file_problems(path, whole=False))
    return [path]


def file_problems(path: Path, *, whole: bool = True) -> Iterator[str]:
    """What is wrong with a file of text, with its line; `whole` reads all of it and also decodes it."""
    line, seen = 1, 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                seen += len((piece.removeprefix(codecs.BOM_UTF8) if line == 1 and not seen else piece).strip())
                if (at := piece.find(b"\0")) >= 0:
                    yield f"{path}, line {line + piece.count(NEWLINE, 0, at)}: a NUL byte; this is not text"
                    return
                if not whole:
                    break
                try:
                    decoder.decode(piece)
                except UnicodeDecodeError as error:
                    where = line + error.object.count(NEWLINE, 0, error.start)
                    yield f"{path}, line {where}: not UTF-8 ({error.reason}); convert the file to UTF-8"
                    return
                line += piece.count(NEWLINE)
        if whole and decoder.getstate()[0]:
            yield f"{path}, line {line}: not UTF-8 (it ends within a character); convert the file to UTF-8"
            return
    except OSError as error:
        yield f"the text {path} cannot be read: {error}; give a file or a folder of text"
        return
    if not seen:
        yield f"the text {path} is empty; give a file with something to learn"


NEWLINE = b"\n"


def _is_text(path: Path) -> bool:
    return not any(file_problems(path, whole=False))


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def pieces_of(files: Iterable[Path], *, cut: bool) -> Iterator[str]:
    """The text of the files, some of it at a time; with `cut` each piece ends between two words where it can."""
    for path in files:
        decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        left = ""
        with path.open("rb") as file:
            while True:
                read = file.read(PIECE)
                text = left + decoder.decode(read, final=not read)
                at = _last_gap(text) if cut and read else len(text)
                left = text[at:]
                if text[:at]:
                    yield text[:at]
                if not read:
                    break


def _last_gap(text: str) -> int:
    """Where the last run of white space begins; the end where there is none."""
    ends = [match.start() for match in re.finditer(r"\s+", text[-4096:])]
    return len(text) - len(text[-4096:]) + ends[-1] if ends and ends[-1] else len(text)


def reference() -> str:
    """Python's own reference, which every Python brings along."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


# -- tokens ------------------------------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """Numbers for text, and text for numbers."""

    @property
    def num_tokens(self) -> int:
        """How many there are."""
        ...

    def encode(self, text: str) -> list[int]:
        """The number of each token."""
        ...

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of these tokens."""
        ...


class Bytes:
    """Every byte of UTF-8 is a token.

    Example:
        >>> Bytes().decode(Bytes().encode("forêt"))
        'forêt'
    """

    num_tokens = 256

    def encode(self, text: str) -> list[int]:
        """The bytes."""
        return list(text.encode("utf-8"))

    def decode(self, numbers: Sequence[int]) -> str:
        """The text; bytes that are no character are shown as �."""
        return bytes(numbers).decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Characters, or words and what is between them, the most frequent first.

    Example:
        >>> tokens = Known.of(["to be or not to be"], words=True)
        >>> tokens.decode(tokens.encode("to be"))
        'to be'
    """

    known: Mapping[str, int]
    words: bool

    @classmethod
    def of(cls, pieces: Iterable[str], *, words: bool = False, most: int = 0) -> Known:
        """The tokens of a text; `most` limits their number, 0: all."""
        counted: Counter[str] = Counter()
        for piece in pieces:
            counted.update(_words(piece) if words else piece)
        ordered = counted.most_common(most or None)
        return cls(known={part: number for number, (part, _) in enumerate(ordered)}, words=words)

    @property
    def num_tokens(self) -> int:
        """How many there are."""
        return len(self.known)

    def encode(self, text: str) -> list[int]:
        """The number of each token; one that is not known counts as the most frequent."""
        return [self.known.get(part, 0) for part in (_words(text) if self.words else text)]

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of these tokens."""
        parts = list(self.known)
        return "".join(parts[number] for number in numbers)


class FromFile:
    """The tokens of a file that the package `tokenizers` wrote (`tokenizer.json`)."""

    def __init__(self, path: Path) -> None:
        try:
            package: Any = import_module("tokenizers")
        except ImportError:
            raise MissingPackageError(
                f"{path} needs the package tokenizers: pip install tokenizers; or use --tokenizer {BYTE}"
            ) from None
        try:
            self._inner: Any = package.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exceptions
            raise InputError(f"{path} cannot be read as a tokenizer: {error}; give a tokenizer.json") from None
        self.num_tokens = int(self._inner.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """The number of each token."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of these tokens."""
        return str(self._inner.decode(list(numbers)))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def tokenizer_of(name: str, pieces: Iterable[str], *, most: int = 0) -> Tokenizer:
    """The tokenizer of that name: `byte`, `char`, `word`, or the path of a file."""
    if name == BYTE:
        return Bytes()
    if name in (CHAR, WORD):
        return Known.of(pieces, words=name == WORD, most=most)
    if not Path(name).is_file():
        raise InputError(f"tokenizer is {name!r}; expected {BYTE}, {CHAR}, {WORD}, or the path of a tokenizer.json")
    return FromFile(Path(name))


# -- windows -----------------------------------------------------------------------------------------------------------


class Stream:
    """Tokens one after another, from several arrays that are mapped and not read.

    Example:
        >>> stream = Stream([np.arange(3), np.arange(3, 8)])
        >>> len(stream), stream.read(1, 4).tolist()
        (8, [1, 2, 3, 4])
    """

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self._arrays = list(arrays)
        self._ends = list(accumulate(len(one) for one in arrays))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, begin: int, num: int) -> NDArray[np.int64]:
        """That many tokens from there on."""
        out, place = np.empty(num, np.int64), 0
        index = bisect_right(self._ends, begin)
        while place < num:
            array = self._arrays[index]
            first = begin + place - (self._ends[index] - len(array))
            some = array[first : first + num - place]
            out[place : place + len(some)] = some
            place, index = place + len(some), index + 1
        return out


def stream_of(files: Sequence[Path], tokens: Tokenizer) -> Stream:
    """The tokens of the files, mapped from the files themselves or from a temporary file; without files the reference.

    Example:
        >>> bytes(stream_of([], Bytes()).read(0, 14).tolist())
        b'The "assert" s'
    """
    if not files:
        return Stream([np.asarray(tokens.encode(reference()))])
    if isinstance(tokens, Bytes):
        return Stream([np.memmap(path, np.uint8, mode="r", offset=_after_mark(path)) for path in files])
    return _numbered(pieces_of(files, cut=not isinstance(tokens, Known) or tokens.words), tokens)


def _after_mark(path: Path) -> int:
    """Where the text of a file begins: behind the byte order mark, which some editors write, and which is no text."""
    with path.open("rb") as file:
        return len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0


def _numbered(pieces: Iterable[str], tokens: Tokenizer) -> Stream:
    kind = np.uint16 if tokens.num_tokens <= 1 << 16 else np.uint32
    with tempfile.TemporaryFile() as file:  # without a name: nothing is left behind, however the run ends
        for piece in pieces:
            file.write(np.asarray(tokens.encode(piece), kind).tobytes())
        file.flush()
        num = file.tell() // np.dtype(kind).itemsize
        return Stream([np.memmap(file, kind, mode="r", shape=(num,))] if num else [])


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of `seq` tokens one after another, and the same one token later.

    Example:
        >>> rows = Windows(Stream([np.arange(7)]), 3)
        >>> [row.tolist() for row in rows[1]]
        [[3, 4, 5], [4, 5, 6]]
    """

    def __init__(self, stream: Stream, seq: int, rows: Sequence[int] | None = None) -> None:
        self._stream, self._seq = stream, seq
        self._rows = range(max(len(stream) - 1, 0) // seq) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, rows: Sequence[int]) -> Windows:
        """Only these rows."""
        return Windows(self._stream, self._seq, rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        tokens = torch.from_numpy(self._stream.read(self._rows[index] * self._seq, self._seq + 1))
        return tokens[:-1], tokens[1:]


class Spread(Sampler[int]):
    """Every row once, far apart from the last: an order for more rows than a list of them should hold.

    Example:
        >>> sorted(Spread(10, torch.Generator().manual_seed(0))) == list(range(10))
        True
    """

    def __init__(self, num: int, generator: torch.Generator) -> None:
        self.num, self.generator = num, generator

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[int]:
        """One epoch, in the order of a step that has no divisor in common with their number."""
        first, step = torch.randint(1, max(self.num, 2), (2,), generator=self.generator).tolist()
        while np.gcd(step, self.num) != 1:
            step += 1
        return ((first + i * step) % self.num for i in range(self.num))


def apart(rows: Windows, first: int, num: int) -> list[int]:
    """Up to `num` rows from `first` on, evenly spread, that do not occur before it: seen text would measure nothing.

    If all of them occur before, as in a text that repeats itself, they are used all the same; a long text is not
    searched.

    Example:
        >>> rows = Windows(Stream([np.array([1, 2, 3, 4, 2, 3, 5, 6, 1, 5, 0])]), 2)
        >>> apart(rows, 2, 2)
        [3, 4]
    """
    held = list(range(first, len(rows)))
    if len(rows) <= MANY // 4:
        texts = ["".join(map(chr, rows[row][0].tolist())) for row in range(len(rows))]
        seen = "".join(texts[:first])
        held = [row for row in held if texts[row] not in seen] or held
    return [held[place * len(held) // min(num, len(held))] for place in range(min(num, len(held)))]
