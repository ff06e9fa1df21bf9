"""WIRE020: the loader raises an exception."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class LoaderException:
    """The loader raises an exception.

    ## What it means
    An item of the data set cannot be read or put into a batch. Training ends when it comes to that item.

    ## How it is checked
    The loader is read as far as time allows.

    ## What to try
    1. Go to the line that is named. Items of different size need a `collate_fn` that pads them.
    2. With `num_workers` set to 0 the traceback shows the place in your data set.
    """

    code: ClassVar[str] = "WIRE020"
    name: ClassVar[str] = "loader-exception"
    title: ClassVar[str] = "the loader gives its batches"
    causes: ClassVar[tuple[str, ...]] = ("step-exception", "empty-batch", "not-learning")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report an exception of the loader."""
        scan = probe.scan
        if probe.watched_only:
            yield not_applicable(self, "the script reads its own data")
            return
        if scan.error:
            yield failed(
                self,
                f"the loader raised {scan.error}",
                f"after {scan.num} batches{f', at {scan.where}' if scan.where else ''}",
                "for batch in loader: pass  # with num_workers=0, to see the place",
                ("loader",),
            )
        else:
            yield passed(self, f"{scan.num_seen} in {scan.seconds:.2f} s", num_batches=float(scan.num))
