"""The closing lines name what there was: guards of the program's own, children, other optimizers, other programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.run.running import SCRIPTS, Ran, Workplace
from trimtab.record.reader import read_run
from trimtab.report.summary import Health, summarise
from trimtab.run.children import guarded_command


def script(workplace: Workplace, text: str, *words: str, own_process: bool = False, **env: str) -> Ran:
    (workplace.folder / "program.py").write_text(textwrap.dedent(text))
    return workplace.guarded(*words, "program.py", own_process=own_process, **env)


def records(workplace: Workplace) -> list[Path]:
    return sorted(path.parent for path in (workplace.folder / "trimtab_runs").glob("*/run.jsonl"))


OWN = """
import torch
import trimtab

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with trimtab.Guard(model, optimizer, run_dir="mine") as guard:
    for i in range(20):
        loss = model(torch.randn(8, 4) * (float("nan") if i == 12 else 1.0)).square().mean()
        loss.backward()
        guard.step(loss)
        optimizer.zero_grad()
"""


def test_a_guard_of_the_programs_own_is_told_with_what_it_found(workplace: Workplace) -> None:
    said = script(workplace, OWN)
    assert "nothing to guard" not in said.err
    (line,) = [line for line in said.our_err if "your own guard" in line]
    assert "Linear, 20 steps, 1 update kept out of the weights" in line
    assert "nonfinite-loss" in line
    assert "trimtab:   trimtab report mine" in said.our_err
    assert records(workplace) == []
    told = json.loads(script(workplace, OWN, "--json").err.splitlines()[-1])
    assert [(run["own"], run["steps"]) for run in told["runs"]] == [(True, {"": 20})]


QUACKS = """
import torch

torch.manual_seed(0)

class Descent:
    def __init__(self, params):
        self.groups = [{"params": list(params), "lr": 0.1}]

    @property
    def param_groups(self):  # as in fastai: made anew each time
        return [dict(group) for group in self.groups]

    def zero_grad(self):
        for p in self.groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p in self.groups[0]["params"]:
            p -= 0.1 * p.grad

def train():
    model = torch.nn.Linear(4, 1)
    optimizer = Descent(model.parameters())
    for i in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 4) * (float("nan") if i == 12 else 1.0)).square().mean().backward()
        optimizer.step()
    return torch.isfinite(model.weight).all().item()

print("finite", train())
"""


def test_an_optimizer_of_another_making_is_guarded_if_it_has_what_a_guard_needs(workplace: Workplace) -> None:
    said = script(workplace, QUACKS)
    assert said.finite
    (line,) = [line for line in said.our_err if "20 steps" in line]
    assert line.startswith("trimtab: Linear, 20 steps, 1 update kept out of the weights; found")
    (folder,) = records(workplace)
    assert len(read_run(folder).series("loss")[0]) == 20


HAND = """
import torch

w = torch.zeros(3, requires_grad=True)
for _ in range(6):
    (w - 1).square().sum().backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
        w.grad = None
"""
OTHER = """
import torch

torch.manual_seed(0)

class BaseOptimizer:
    pass

class Momentum(BaseOptimizer):
    def __init__(self, variables):
        self.variables = list(variables)

    @torch.no_grad()
    def apply(self, gradients):
        for variable, gradient in zip(self.variables, gradients, strict=True):
            variable -= 0.1 * gradient

model = torch.nn.Linear(4, 1)
optimizer = Momentum(model.parameters())
for _ in range(6):
    model.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.apply([p.grad for p in model.parameters()])
"""
BUILT = "import torch; optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())"
STARTED = "import subprocess, sys; [subprocess.run([sys.executable, '-I', 'no_torch.py'], input=b'') for _ in range(2)]"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HAND, ["no optimizer was stepped, though backward() was called 6 times: updates made by hand"]),
        (OTHER, ["no PyTorch optimizer was stepped. Seen instead: __main__.Momentum. A guard needs"]),
        (BUILT, ["no optimizer was stepped (1 Adam built); there was nothing to guard"]),
        (STARTED, ["no PyTorch optimizer was stepped; there was", "are not guarded (no_torch.py 2 times); put"]),
    ],
    ids=["by hand", "another optimizer", "only built", "programs"],
)
def test_what_could_not_be_guarded_is_named(workplace: Workplace, text: str, told: list[str]) -> None:
    said = script(workplace, text)
    assert (said.code, len(said.our_err)) == (0, len(told)), said.err
    for part, line in zip(told, said.our_err, strict=True):
        assert part in line


def test_a_program_that_is_started_as_a_command_is_guarded_too(workplace: Workplace) -> None:
    text = """
        import subprocess, sys
        done = subprocess.run([sys.executable, "-u", "plain.py"], capture_output=True, text=True)
        print(done.args[1:])
        print(done.stdout, end="")
        sys.exit(done.returncode)
    """
    said = script(workplace, text, NAN_AT="20")
    assert (said.code, said.finite) == (0, True)
    assert said.out.splitlines()[0] == "['-u', 'plain.py']"
    (line,) = [line for line in said.our_err if "child process" in line]
    assert "30 steps, 1 update kept out of the weights" in line


@pytest.mark.parametrize(
    ("words", "guarded"),
    [
        (["plain.py", "--a"], ["CHILD", "START", "plain.py", "--a"]),
        (["-u", "-W", "error", "plain.py"], ["-u", "-W", "error", "CHILD", "START", "plain.py"]),
        (["-Xdev", "-m", "package.train"], ["-Xdev", "CHILD", "START", "-m", "package.train"]),
        (["-m", "pip", "list"], None),
        (["-m", "http.server"], None),
        (["-c", "pass"], None),
        (["-I", "plain.py"], None),
        (["missing.py"], None),
        ([], None),
    ],
)
def test_which_commands_are_guarded(words: list[str], guarded: list[str] | None) -> None:
    found = guarded_command([sys.executable, *words], "START", SCRIPTS)
    short = None if found is None else ["CHILD" if word.endswith("child.py") else word for word in found]
    assert short == (None if guarded is None else [sys.executable, *guarded])


def test_a_launcher_that_is_no_python_program_is_refused_with_the_command_that_works(workplace: Workplace) -> None:
    said = workplace.guarded("env", "python", "plain.py")
    assert said.code == 2
    assert "put trimtab behind it: LAUNCHER ... -m trimtab run train.py" in said.err


@pytest.mark.long
def test_trainings_in_children_are_told_by_the_first_process_with_records_of_their_own(workplace: Workplace) -> None:
    said = workplace.guarded("spawned_training.py", own_process=True, NAN_AT="20")
    assert said.finite
    lines = [line for line in said.our_err if "child process" in line]
    assert len(lines) == 2
    assert all("30 steps, 1 update kept out of the weights" in line for line in lines)
    assert len(said.findings) == 1, "both processes found the same"
    pids = {int(re.findall(r"child process (\d+)", line)[0]) for line in lines}
    assert {int(folder.name.split("-")[2]) for folder in records(workplace)} == pids
    for folder in records(workplace):
        assert summarise(read_run(folder)).health in (Health.RECOVERED, Health.SICK)
    assert not any(Path(os.environ.get("TMPDIR", "/tmp")).glob(f"trimtab-run-{next(iter(pids))}-*"))


KILLED = """
import os, signal
import torch
import torch.multiprocessing as mp

torch.manual_seed(0)

def train(how):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(10):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGTERM)

if __name__ == "__main__":
    for how in ("killed", "terminated"):
        process = mp.get_context("fork").Process(target=train, args=(how,))
        process.start()
        process.join()
        print(process.exitcode)
"""


def test_a_child_that_is_killed_is_named_and_one_that_is_terminated_closes_its_record(workplace: Workplace) -> None:
    said = script(workplace, KILLED)
    assert said.out.split() == ["-9", "-15"]
    assert sum("did not report how it ended" in line for line in said.our_err) == 1
    assert sum("ended by SIGTERM" in line for line in said.our_err) == 1
    assert sorted(str(summarise(read_run(folder)).health) for folder in records(workplace)) == [
        "interrupted",
        "unfinished",
    ]


def test_a_forked_child_leaves_the_parents_record_and_checkpoints_alone(workplace: Workplace) -> None:
    said = workplace.guarded("--checkpoint", "saved", "train_and_child.py")
    assert said.code == 0
    assert sum("trimtab report" in line for line in said.our_err) == 2
    steps = [re.findall(r"([\d,]+) steps", line)[0] for line in said.our_err if " steps" in line]
    assert steps == ["30", "25"]
    parent, child = (
        read_run(folder) for folder in sorted(records(workplace), key=lambda folder: -len(read_run(folder)))
    )
    assert (len(parent), len(child)) == (30, 25)


def test_fifty_trainings_with_the_same_trouble_are_one_line(workplace: Workplace) -> None:
    text = """
        import torch
        torch.manual_seed(0)
        models = [torch.nn.Linear(4, 1) for _ in range(50)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
        for i in range(8):
            x = torch.randn(8, 4) * (float("nan") if i == 5 else 1.0)
            for model, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    """
    said = script(workplace, text)
    assert len(said.findings) == 1
    assert "and 44 more trainings, 44 of them with findings" in said.our_err[-1]


def test_a_spawned_process_that_trains_nothing_does_not_load_the_guard(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import sys
            import multiprocessing as mp

            def look(queue):
                import torch
                queue.put(sorted(name for name in sys.modules if name.startswith("trimtab.")))

            if __name__ == "__main__":
                context = mp.get_context("spawn")
                queue = context.Queue()
                process = context.Process(target=look, args=(queue,))
                process.start()
                print(queue.get())
                process.join()
            """
        )
    )
    command = [sys.executable, "-m", "trimtab", "run", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert "trimtab.run.children" in done.stdout
    assert "trimtab.guard.guard" not in done.stdout
