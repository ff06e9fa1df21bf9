"""A `python` and a `trimtab` that need not import torch again: pages run many small commands, and that is most of it.

A warm process forks once per command; the child gets the folder, the environment and the streams of whoever asked, and
runs the same code that the real command would run. There are two: the one behind `trimtab` has torch and trimtab
imported; the one behind `python` has torch alone, because a script that forgets to import a part of trimtab must fail
here as it fails elsewhere.

    python tools/docs_warm.py SOCKET trimtab       # a warm process
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

SHIM = """#!{python} -S
import json, os, socket, sys
words = [{name!r}, *sys.argv[1:]]
if {name!r} == "python" and not (len(words) > 1 and words[1].endswith(".py")):
    os.execv({python!r}, [{python!r}, *words[1:]])
line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
line.connect({path!r})
job = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(line, [len(job).to_bytes(8, "big")], [0, 1, 2])
line.sendall(job)
code = line.recv(1)
line.close()
sys.exit(code[0] if code else 1)
"""


COMMANDS = ("python", "trimtab")


def put_on_path(folder: Path, name: str, path: str) -> None:
    """Write the command that hands over to a warm process."""
    folder.mkdir(parents=True, exist_ok=True)
    shim = folder / name
    shim.write_text(SHIM.format(python=sys.executable, name=name, path=path), encoding="utf-8")
    shim.chmod(0o755)


def start(
    folder: Path, environment: dict[str, str], names: tuple[str, ...] = COMMANDS
) -> list[subprocess.Popen[bytes]]:
    """Start the warm processes behind these commands, and put the commands into `folder`/bin."""
    paths = [str(folder / f"warm-{name}") for name in names]
    found = [
        subprocess.Popen([sys.executable, __file__, path, name], env=environment)
        for path, name in zip(paths, names, strict=True)
    ]
    for path, name, process in zip(paths, names, found, strict=True):
        while not Path(path).exists() and process.poll() is None:
            time.sleep(0.05)
        put_on_path(folder / "bin", name, path)
    return found


def received(line: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]]:
    """A job: its words, folder, environment and streams."""
    head, streams, _, _ = socket.recv_fds(line, 8, 3)
    size, data = int.from_bytes(head, "big"), b""
    while len(data) < size:
        data += line.recv(size - len(data))
    words, folder, environment = json.loads(data)
    return words, folder, environment, list(streams)


def serve(path: str, name: str) -> list[str]:
    """Fork for every job, until nobody needs it; returns, in a child, the words of its job."""
    import torch  # noqa: F401

    if name == "trimtab":
        import trimtab.checkpoint.checkpointer  # noqa: F401

    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind(path)
    door.listen()
    parent = os.getppid()
    gc.freeze()  # what is shared stays shared: the children's collector leaves it alone
    door.settimeout(1.0)
    while os.getppid() == parent:  # whoever started it is gone: so is the need for it
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        try:
            line, _ = door.accept()
        except TimeoutError:
            continue
        line.setblocking(True)
        if os.fork():
            line.close()
            continue
        words, folder, environment, streams = received(line)
        job = os.fork()
        if job:
            code = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
            line.sendall(bytes([code % 256]))
            os._exit(0)
        line.close()
        door.close()
        for stream, number in enumerate(streams):
            os.dup2(number, stream)
            os.close(number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        return words
    sys.exit(0)


def run(words: list[str]) -> None:
    """Do what the real command would do."""
    import logging
    import runpy
    import warnings

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    warnings.simplefilter("error")
    logging.lastResort.setLevel("WARNING")  # type: ignore[union-attr]
    if words[0] == "trimtab":
        from trimtab.cli.app import main

        sys.argv = words
        sys.path.insert(0, "")
        main()
    else:
        sys.argv = words[1:]
        sys.path[0] = str(Path(words[1]).resolve().parent)
        runpy.run_path(words[1], run_name="__main__")


def finish(words: list[str]) -> NoReturn:
    """Run a job to its end, and leave without taking torch apart, which takes longer than most jobs."""
    code: object = 0
    try:
        run(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0) % 256)


if __name__ == "__main__":
    finish(serve(sys.argv[1], sys.argv[2]))
