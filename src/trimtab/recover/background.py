"""One save at a time on a thread of its own, from a copy in host memory that is used again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.recover.state import to_host


class Background:
    """Runs one job; the next one waits for it, so that copies never pile up."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._copy: Mapping[str, Any] | None = None

    def copied(self, sections: Mapping[str, Any]) -> Mapping[str, Any]:
        """The sections in host memory, in the place of the last ones once those are written."""
        self.wait()
        self._copy = to_host(sections, into=self._copy)
        return self._copy

    def submit(self, job: Callable[..., object], *args: Any) -> None:
        """Start a job once the last one is done."""
        self.wait()

        def run() -> None:
            try:
                job(*args)
            except BaseException as error:
                self._error = error

        # Not a daemon: the interpreter waits for it at exit, so what was saved is on disk.
        self._thread = threading.Thread(target=run, name="trimtab-checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job, and raise what it raised."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
