"""What is wrong with a user's own data, told with file and row, before training as far as it can be known then."""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.core.errors import InputError

NUM_NAMED = 5


class DataError(InputError):
    """Data that cannot be trained on; each of its problems names the file, and the row where there are rows."""

    def __init__(self, problems: Iterable[str] | str) -> None:
        if isinstance(problems, str) and "Original Traceback" in problems:  # PyTorch's text for that of a worker
            problems = problems.rpartition(f"{type(self).__name__}: ")[2].strip()
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        more = len(self.problems) - NUM_NAMED
        lines = [*self.problems[:NUM_NAMED], *([f"and {more} more"] if more > 0 else [])]
        super().__init__("\n  ".join(lines))

    def __reduce__(self) -> tuple[type[DataError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)  # it may come from a worker process


def refuse(problems: Iterable[str]) -> None:
    """Raise a DataError if there is any problem.

    Example:
        >>> refuse([])
        >>> refuse(["train.csv, row 3: 'price' is 'abc'; expected a number"])
        Traceback (most recent call last):
            ...
        trimtab.train.data_problems.DataError: train.csv, row 3: 'price' is 'abc'; expected a number
    """
    found = tuple(problems)
    if found:
        raise DataError(found)
