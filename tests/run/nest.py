"""Starts programs quickly: a process that has imported PyTorch once forks itself for each of them.

A request is one JSON line on stdin, the answer is the exit code on stdout. A plain program is run as `python` does it,
a guarded one through the command line of trimtab. Either ends as in an interpreter of its own (threads are waited for,
exit handlers run), except that memory is not cleaned up: that alone takes a second. How programs end is tested without.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import runpy
import signal
import sys
import threading
import types
from typing import Any, NoReturn


def main() -> None:
    import numpy  # noqa: F401
    import torch._dynamo
    import torch.utils.data

    import trimtab.rules  # noqa: F401

    torch.set_num_threads(1)
    read_a_command_line()
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page that is shared
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            ended(request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def read_a_command_line() -> None:
    """What reading the first one imports and compiles is half of the time of a short guarded program."""
    from trimtab.cli.app import main as trimtab

    hook = sys.excepthook
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        trimtab(["--version"])
    sys.excepthook = hook


def ended(request: dict[str, Any]) -> NoReturn:
    code, interrupted = 0, False
    try:
        become(request)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if interrupted:  # so does an interpreter of its own end, for the shell to know
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def become(request: dict[str, Any]) -> None:
    for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        opened = os.open(request[name], flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[1:1] = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    if request["guarded"]:
        from trimtab.cli.app import main as trimtab

        trimtab(request["words"])
    else:
        plain(request["words"])


def plain(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv[:], sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if os.path.isdir(words[0]):
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")
        return
    path = os.path.abspath(words[0])
    sys.argv[:], sys.path[0] = words, os.path.dirname(path)
    script = types.ModuleType("__main__")
    script.__file__ = path
    sys.modules["__main__"] = script
    inner = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_globals is not script.__dict__:
            trace = trace.tb_next
        inner(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, script.__dict__)


if __name__ == "__main__":
    main()
