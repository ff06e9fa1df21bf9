"""How programs end under `trimtab run`: by signals, in every other way, and without a word that is not theirs."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.matrix import sampled
from tests.run import signals
from tests.run.running import SOURCE
from trimtab.record.reader import read_run
from trimtab.report.summary import Health, summarise

ENV = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
TRAIN = """
import asyncio, atexit, ctypes, gc, multiprocessing, os, signal, sys, threading, time
import torch

torch.manual_seed(0)  # PyTorch seeds itself from the clock otherwise, and some starts give a finding

def train(steps=10, bad=-1):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4) * (float("nan") if i == bad else 1.0)).square().mean().backward()
        optimizer.step()
    return model, optimizer
"""


def ended(folder: Path, text: str, *words: str, ignored: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program under guard in a process of its own, as a shell would start it."""
    (folder / "program.py").write_text(TRAIN + textwrap.dedent(text))
    command = [sys.executable, "-W", "error", "-m", "trimtab", "run", *words, "program.py"]
    if ignored is not None:  # as `nohup` and a shell's background jobs start it
        command = ["sh", "-c", f"trap '' {ignored}; exec \"$@\"", "sh", *command]
    return subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=120, check=False)


def reason(folder: Path) -> str | None:
    (record,) = (folder / "trimtab_runs").glob("*/run.jsonl")
    closing = read_run(record.parent).closing
    return None if closing is None else closing.reason


def test_exiting_at_once_loses_nothing_of_the_record(tmp_path: Path) -> None:
    said = ended(tmp_path, "train()\nimport os\nos._exit(4)")
    assert said.returncode == 4
    assert "trimtab report" in said.stderr
    assert reason(tmp_path) == "os._exit"


@pytest.mark.long
def test_a_dozen_signals_at_random_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m tests.run.signals --count 200` sends more of them, and measures: here no time decides."""
    monkeypatch.setattr(signals, "LONGEST_LOSS_S", 30.0)
    plans = [plan for plan in signals.plans(24, seed=1) if plan.moment in ("record begins", "first 250 ms")]
    assert len(plans) == 12
    results = signals.run_all(plans, jobs=2)
    assert [(r.plan, r.wrong) for r in results if r.wrong] == []
    assert sum(r.folders for r in results) >= 6


@pytest.mark.parametrize("number", sampled({"TERM": signal.SIGTERM, "HUP": signal.SIGHUP}, "TERM"))
def test_a_signal_with_its_default_action_closes_the_record_and_kills(tmp_path: Path, number: int) -> None:
    said = ended(tmp_path, f"train()\nos.kill(os.getpid(), {int(number)})\ntime.sleep(60)\nprint('not reached')")
    assert (said.returncode, said.stdout) == (-number, "")
    assert reason(tmp_path) == signal.Signals(number).name
    assert f"Linear, 10 steps, ended by {signal.Signals(number).name}, no findings" in said.stderr


@pytest.mark.long
def test_so_it_does_where_the_main_thread_hangs_outside_of_python(tmp_path: Path) -> None:
    text = """
        kept = train()
        mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        libc.pthread_mutex_lock(mutex)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        libc.pthread_mutex_lock(mutex)  # never returns, and no signal makes it
    """
    said = ended(tmp_path, text)
    assert said.returncode == -signal.SIGTERM
    assert reason(tmp_path) == "SIGTERM"


def test_a_program_sees_the_default_action_and_may_replace_it(tmp_path: Path) -> None:
    text = """
        kept = train()
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.getsignal(signal.SIGHUP) is signal.SIG_DFL)
        before = signal.signal(signal.SIGTERM, lambda number, frame: print("mine", callable(before)))
        print(before is signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        print(signal.signal(signal.SIGTERM, signal.SIG_IGN).__name__)
        os.kill(os.getpid(), signal.SIGTERM)
        print(signal.signal(signal.SIGTERM, signal.SIG_DFL) is signal.SIG_IGN)
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    """
    said = ended(tmp_path, text)
    assert said.stdout.split() == ["True", "True", "True", "mine", "False", "<lambda>", "True", "True"]
    assert said.returncode == -signal.SIGTERM
    assert reason(tmp_path) == "SIGTERM"


@pytest.mark.long
def test_a_forked_child_has_the_default_actions(tmp_path: Path) -> None:
    text = """
        kept = train()
        seen = set()
        for i in range(40):  # at once, and a little later
            child = os.fork()
            if child == 0:
                time.sleep(60)
            time.sleep(0.0001 * i)
            os.kill(child, signal.SIGTERM)
            seen.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(seen, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    """
    said = ended(tmp_path, "import warnings; warnings.simplefilter('ignore')\n" + textwrap.dedent(text))
    assert (said.returncode, said.stdout) == (0, "{-15} set()\n"), said.stderr
    assert reason(tmp_path) == "closed"
    assert said.stderr.count("10 steps") == 1


@pytest.mark.long
def test_an_event_loop_keeps_its_own_signals(tmp_path: Path) -> None:
    text = """
        async def main():
            loop = asyncio.get_running_loop()
            done = asyncio.Event()
            loop.add_signal_handler(signal.SIGTERM, done.set)
            train()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(done.wait(), 30)
            print("heard")
        asyncio.run(main())
    """
    said = ended(tmp_path, text)
    assert (said.returncode, said.stdout) == (0, "heard\n")
    assert reason(tmp_path) == "closed"


@pytest.mark.parametrize(
    ("number", "words"),
    sampled(
        {
            "INT": (signal.SIGINT, ()),
            "INT with checkpoints": (signal.SIGINT, ("--checkpoint", "saved")),
            "HUP": (signal.SIGHUP, ()),
            "TERM": (signal.SIGTERM, ()),
        },
        ["INT with checkpoints"],
    ),
)
def test_a_signal_that_was_ignored_from_the_start_stays_ignored(
    tmp_path: Path, number: int, words: tuple[str, ...]
) -> None:
    text = f"""
        train()
        print(signal.getsignal({int(number)}) is signal.SIG_IGN)
        os.kill(os.getpid(), {int(number)})
        train()
        print("here")
    """
    said = ended(tmp_path, text, *words, ignored=number)
    assert (said.returncode, said.stdout) == (0, "True\nhere\n")
    assert "Traceback" not in said.stderr


def test_an_interrupted_program_leaves_a_closed_record_that_says_so(tmp_path: Path) -> None:
    said = ended(tmp_path, "train()\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)")
    assert said.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in said.stderr
    assert reason(tmp_path) == "KeyboardInterrupt"


@pytest.mark.parametrize("number", sampled({"TERM": signal.SIGTERM, "KILL": signal.SIGKILL}, "KILL"))
def test_a_guard_of_the_programs_own_leaves_signals_alone_and_its_record_is_unfinished(
    tmp_path: Path, number: int
) -> None:
    text = f"""
        import trimtab
        model, optimizer = train(0)
        guard = trimtab.Guard(model, optimizer, run_dir="run")
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1))
        for _ in range(20):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
        while os.path.getsize("run/run.jsonl") < 20 * 50:  # it is written by itself, without being asked
            time.sleep(0.01)
        os.kill(os.getpid(), {int(number)})
        time.sleep(60)
    """
    (tmp_path / "program.py").write_text(TRAIN + textwrap.dedent(text))
    command = [sys.executable, "program.py"]
    said = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=120, check=False)
    assert (said.returncode, said.stdout, said.stderr) == (-number, "True -1\n", "")
    run = read_run(tmp_path / "run")
    assert run.info is not None
    assert summarise(run).health is Health.UNFINISHED


def test_without_a_guard_nothing_is_installed(tmp_path: Path) -> None:
    said = ended(tmp_path, "print(threading.active_count(), signal.set_wakeup_fd(-1))")
    assert said.stdout == "1 -1\n"


# -- the end of the interpreter ------------------------------------------------------------------------------------

SHAPES = {
    "plain": "kept = train()",
    "dropped": "train(); gc.collect()",
    "in a cycle": "kept = [train()]; kept.append(kept); del kept",
    "inner loops": "for _ in range(70): train(2)",
    "with a finding": "kept = train(20, bad=12)",
    "in a thread": "t = threading.Thread(target=train); t.start(); t.join()",
    "in a daemon thread": "threading.Thread(target=train, args=(10**9,), daemon=True).start(); time.sleep(0.5)",
    "own guard": (
        "import trimtab; model, optimizer = train(2); guard = trimtab.Guard(model, optimizer); "
        "model(torch.ones(2, 4)).sum().backward(); guard.step(torch.ones(()))"
    ),
    "kept in a class": "class Keep: pass\nKeep.me = train(); sys.modules['kept_here'] = Keep",
}
ENDS = {
    "falls off": (0, ""),
    "sys.exit": (3, "sys.exit(3)"),
    "os._exit": (4, "os._exit(4)"),
    "trains at exit": (0, "atexit.register(train, 3)"),
    "collects at exit": (0, "atexit.register(gc.collect); gc.disable()"),
    "closed stderr": (0, "sys.stderr.close()"),
}


@pytest.mark.parametrize(
    ("shape", "end"),
    sampled(
        {f"{shape}-{end}": (shape, end) for shape, end in zip(SHAPES, itertools.cycle(ENDS), strict=False)},
        ["plain-falls off", "with a finding-collects at exit"],
    ),
)
def test_nothing_of_ours_is_heard_when_the_interpreter_goes_down(tmp_path: Path, shape: str, end: str) -> None:
    code, last = ENDS[end]
    said = ended(tmp_path, f"{SHAPES[shape]}\n{last}")
    assert (said.returncode, said.stdout) == (code, ""), said.stderr
    assert [line for line in said.stderr.splitlines() if not line.startswith("trimtab")] == []


def test_an_error_is_told_once_and_nothing_else(tmp_path: Path) -> None:
    said = ended(tmp_path, "kept = train()\nraise ValueError('mine')")
    theirs = [line for line in said.stderr.splitlines() if not line.startswith("trimtab")]
    assert said.returncode == 1
    assert theirs[0] == "Traceback (most recent call last):"
    assert theirs[-1] == "ValueError: mine"
    assert not any("Exception ignored" in line or "trimtab/" in line for line in theirs)
    assert reason(tmp_path) == "ValueError"
