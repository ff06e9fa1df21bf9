"""`trimtab watch`: a run while it is going, on a terminal; plain lines where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli._shell import OK, command, console, emit, plain
from trimtab.cli.report import RunArgument

if TYPE_CHECKING:
    from trimtab.report.live_view import LiveRun

NAME = "watch"
QUIT = ("q", "Q", "\x03", "\x04")


@command
def run(
    run_dir: RunArgument = None,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600.0, help="Seconds between two looks.")
    ] = 1.0,
    num_steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Steps the run will make, if its record does not say.", show_default=False),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and end.")] = False,
) -> int:
    """Watch a run: curves, the health of each module, the last findings, steps per second. `q` quits.

    Without a terminal it prints a line whenever there is news, until the run ends.
    """
    from trimtab.record.reader import find_run
    from trimtab.report.live_view import follow, render_live

    live = follow(str(find_run(run_dir)), num_steps)
    if as_json:
        emit(_state(live))
        return OK
    out = console()
    if once:
        out.print(render_live(live, out.width, 200, keys=False))
    elif out.is_terminal and sys.stdin.isatty():
        with suppress(KeyboardInterrupt):  # as good a way to leave as q
            _screen(live, interval_s)
    else:
        _lines(live, interval_s)
    return OK


def _state(live: LiveRun) -> dict[str, object]:
    entry = live.entry
    series = {}
    for (optimizer, name), values in live.series.items():
        series[f"{optimizer}/{name}" if optimizer else name] = plain(values.values[-1])
    return {
        "run_dir": str(entry.folder),
        "state": entry.state.value,
        "num_steps": live.num_steps,
        "total_steps": live.total,
        "steps_per_s": live.rate(),
        "eta_s": live.eta_s(),
        "last": series,
        "findings": live.follower.run.findings,
    }


def _screen(live: LiveRun, interval_s: float) -> None:
    from rich.live import Live

    from trimtab.report.live_view import render_live

    out = console(whole_screen=True)
    with _keys() as pressed, Live(console=out, screen=True, auto_refresh=False) as screen:
        while True:
            # The size is asked for every time: a resize or a new terminal behind ssh shows at the next look.
            screen.update(render_live(live, out.width, out.height), refresh=True)
            looked_s = time.monotonic()
            size = out.size
            while time.monotonic() - looked_s < interval_s and out.size == size:
                if pressed(min(0.2, interval_s)) in QUIT:
                    return
            live.update()


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys as they are pressed, without return; the terminal is as before afterwards."""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield _windows_key
        return
    import os
    import select

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(wait_s: float) -> str:
        ready, _, _ = select.select([fd], [], [], wait_s)
        if not ready:
            return ""
        return os.read(fd, 1).decode("ascii", "replace") or QUIT[0]  # a terminal that is gone

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _windows_key(wait_s: float) -> str:
    import msvcrt

    hit, key = getattr(msvcrt, "kbhit"), getattr(msvcrt, "getwch")  # noqa: B009  (not there elsewhere)
    end_s = time.monotonic() + wait_s
    while time.monotonic() < end_s:
        if hit():
            return str(key())
        time.sleep(0.05)
    return ""


def _lines(live: LiveRun, interval_s: float) -> None:
    from trimtab.report.live_view import ended_words, plain_lines

    told, news = 0, True
    while True:
        if news:
            for line in plain_lines(live, told):
                print(line, flush=True)
            told = len(live.follower.run.findings)
        if live.ended:
            print(ended_words(live), flush=True)
            return
        time.sleep(interval_s)
        news = live.update()
