"""The state of learning-rate schedulers, taken with their class and compared before it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trimtab.recover.compare import copied, different, labelled, missing_and_extra


def capture(scheduler: Any) -> dict[str, Any]:
    """The state of every scheduler, with its class."""
    return {
        label: {"class": type(one).__name__, "state": one.state_dict()} for label, one in labelled(scheduler).items()
    }


def differences(scheduler: Any, saved: Mapping[str, Any]) -> list[str]:
    """Why `saved` does not belong to these schedulers, one line each."""
    here = capture(scheduler)
    lines = missing_and_extra("scheduler", here, saved, "schedulers")
    for label in (label for label in here if label in saved):
        part = "scheduler" if len(here) == 1 else f"scheduler {label}"
        ours, theirs = here[label], saved[label]
        if ours["class"] != theirs["class"]:
            lines.append(different(part, "its class", ours["class"], theirs["class"]))
            continue
        num_here, num_saved = (len(entry["state"].get("base_lrs", ())) for entry in (ours, theirs))
        if num_here != num_saved:
            lines.append(different(part, "the number of base learning rates", str(num_here), str(num_saved)))
    return lines


def load(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Load the state of every scheduler."""
    for label, one in labelled(scheduler).items():
        one.load_state_dict(copied(saved[label]["state"]))


def keep(scheduler: Any) -> Callable[[], None]:
    """A function that puts the schedulers back as they are now."""
    before = copied(capture(scheduler))
    return lambda: load(scheduler, before)
