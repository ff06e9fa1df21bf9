"""`trimtab ui`: a local web page of all runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli._shell import OK, command, emit, fail

NAME = "ui"


@command
def run(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="A directory of runs.  [default: ./trimtab_runs and ./runs]", show_default=False
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Any but this machine's own asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 6070,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with the address.")] = False,
) -> int:
    """Serve a web page of all runs; live ones update by themselves. It only reads. Ctrl-C ends it."""
    if directory is not None and not directory.is_dir():
        fail(f"there is no folder {directory}; expected a directory of runs, such as trimtab_runs")
    from trimtab.report.ui_server import UiServer

    try:
        server = UiServer(directory, host, port)
    except OSError as error:
        fail(f"cannot listen on {host} port {port}: {error.strerror or error}; try --port 0 for any free port")
    if as_json:
        emit({"url": server.url})
    else:
        print(f"trimtab ui: {server.url}   (Ctrl-C ends it)", flush=True)
        if server.token:
            print("Others can reach this address, unencrypted. Whoever has the token can read these runs.", flush=True)
    if open_it:
        import webbrowser

        webbrowser.open(server.url)
    try:
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)
    finally:
        server.ending.set()
        server.server_close()
    return OK
