"""Any function of ours may fail at any time: the training goes on as without a guard, and no finding blames the user.

Each test trains once to learn which functions a step enters, then once for each of them with an error raised at its
entry. Only the outermost frame, the one that PyTorch or the loop calls, cannot contain its own entry.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import trimtab
from tests.matrix import sampled
from trimtab import Config, Finding, Guard
from trimtab.run.auto_guard import AutoGuard

HOME = str(Path(trimtab.__file__).parent)
STEPS = 8
FULL = "TRIMTAB_TEST_FULL" in os.environ
"""Every function at its first, middle and last entry in every loop; else each once, in the middle."""
BOUNDARY = {
    ("/guard/hooks.py", "uncompiled.<locals>.call"),
    ("/guard/hooks.py", "StepHooks._pre"),
    ("/guard/hooks.py", "StepHooks._post"),
    ("/run/auto_guard.py", "AutoGuard._contain"),
    ("/torchutil/patch.py", "_Wrapped.__init__.<locals>.method"),
    ("/torchutil/patch.py", "plain_python.<locals>.entry"),
    ("/torchutil/patch.py", "wrap_attribute.<locals>.wrapper"),
}
"""What contains cannot contain itself, nor can what only decides whether code is being compiled."""
Train = Callable[[bool], tuple[list[Tensor], Guard | None]]


class Injected(Exception):
    """What is raised at the entry of one of our functions."""


def ours(frame: FrameType | None) -> bool:
    if frame is None or not frame.f_code.co_filename.startswith(HOME):
        return False
    return key(frame.f_code) not in BOUNDARY


def inner(frame: FrameType) -> bool:
    """Whether one function of ours calls another; a comprehension is part of the function that it stands in."""
    if frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_code.co_name.endswith("comp>"):
        return False
    return ours(frame) and ours(frame.f_back)


def key(code: CodeType) -> tuple[str, str]:
    return code.co_filename.removeprefix(HOME), code.co_qualname


def entered(train: Callable[[], object]) -> dict[tuple[str, str], int]:
    """How often each function of ours is entered from another one of ours."""
    found: dict[tuple[str, str], int] = {}

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and inner(frame):
            found[key(frame.f_code)] = found.get(key(frame.f_code), 0) + 1

    sys.setprofile(profile)
    try:
        train()
    finally:
        sys.setprofile(None)
    return found


@contextmanager
def failing(target: tuple[str, str], nth: int) -> Iterator[None]:
    """Raise at the `nth` entry of a function of ours from another one of ours."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        if inner(frame) and key(frame.f_code) == target:
            count += 1
            if count == nth:
                raise Injected(f"injected into {target[1]}")

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Loop:
    """One training: `build` happens before anything fails, `steps` is where things fail."""

    def __init__(self, *, guarded: bool, **settings: Any) -> None:
        torch.manual_seed(0)
        self.guard: Guard | None = None
        self.found: list[Finding] = []
        self.build()
        if guarded:
            self.guard = self.attach(run_dir=False, on_finding=self.found.append, **settings)

    model: nn.Module
    optimizer: Any

    def build(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def attach(self, **settings: Any) -> Guard | None:
        return Guard(self.model, self.optimizer, **settings)

    def batch(self, i: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(i)
        x = torch.randn(16, 8, generator=source)
        return x, x[:, :4].argmax(1)

    def step(self, i: int) -> None:
        x, y = self.batch(i)
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        if self.guard is None:
            self.optimizer.step()
        else:
            self.guard.step(loss, (x, y))
        self.optimizer.zero_grad()

    def steps(self) -> None:
        for i in range(STEPS):
            self.step(i)

    def ends(self) -> list[Tensor]:
        if self.guard is not None:
            self.guard.close()
        return [t.detach().clone() for t in self.model.state_dict().values()]


class LossFirst(nn.Module):
    """Answers as Hugging Face's models do: the loss comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.body(x)
        return F.cross_entropy(logits, labels), logits


class Plain(Loop):
    pass


class LossFirstLoop(Loop):
    def build(self) -> None:
        self.model = LossFirst()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, i: int) -> None:
        x, y = self.batch(i)
        loss = self.model(x, labels=y)[0]
        loss.backward()
        if self.guard is not None:
            self.guard.observe(loss=loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def attach(self, **settings: Any) -> Guard:
        return Guard.attach(self.model, self.optimizer, **settings)


class Scaled(Loop):
    def build(self) -> None:
        super().build()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def step(self, i: int) -> None:
        x, y = self.batch(i)
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        if self.guard is not None:
            self.guard.observe(loss=loss, batch=(x, y))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def attach(self, **settings: Any) -> Guard:
        return Guard.attach(self.model, self.optimizer, scaler=self.scaler, **settings)


class Closures(Loop):
    def build(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 4))
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3)

    def step(self, i: int) -> None:
        x, y = self.batch(i)

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            return loss

        if self.guard is None:
            self.optimizer.step(closure)
        else:
            self.guard.step(closure)


class Acting(Loop):
    def build(self) -> None:
        super().build()
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.loader = [self.batch(i) for i in range(STEPS)]

    def attach(self, **settings: Any) -> Guard:
        config = {"activations": True, "full_every": 4}
        return Guard(self.model, self.optimizer, config, mode="act", ema=self.ema, loader=self.loader, **settings)

    def step(self, i: int) -> None:
        super().step(i)
        self.ema.update_parameters(self.model)
        if i % 5 == 4 and self.guard is not None:
            self.guard.validate(0.5)


class Unaware(Loop):
    """A script that knows nothing of a guard, as `trimtab run` finds it; it clips by itself."""

    auto_guard: AutoGuard | None = None

    def attach(self, **settings: Any) -> None:
        self.auto_guard = AutoGuard({"config": Config(), **settings}, lambda training: None)
        self.auto_guard.start()

    def step(self, i: int) -> None:
        x, y = self.batch(i)
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def ends(self) -> list[Tensor]:
        if self.auto_guard is not None:
            self.auto_guard.finish()
        return super().ends()


LOOPS = [Plain, LossFirstLoop, Scaled, Closures, Acting, Unaware]
_SEEN: set[tuple[str, str]] = set()


def outcome(loop: Loop) -> list[Tensor]:
    loop.steps()
    return loop.ends()


@pytest.mark.parametrize("kind", sampled({loop.__name__: loop for loop in LOOPS}, "Plain Acting"))
def test_any_failure_of_ours_leaves_the_training_as_it_is(kind: type[Loop], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="trimtab")
    want = outcome(kind(guarded=False))
    first = kind(guarded=True)
    functions = entered(first.steps)
    first.ends()
    assert len(functions) > 40
    missed = []
    for target, times in functions.items():
        if target[0] == "/core/contain.py" or (target in _SEEN and not FULL):
            continue
        _SEEN.add(target)
        for nth in {1, times // 2 + 1, times} if FULL else {times // 2 + 1}:
            loop = kind(guarded=True)
            try:
                with failing(target, nth):
                    loop.steps()
            except Injected:
                missed.append((target, nth, "raised"))
                loop.ends()
                continue
            if not all(map(torch.equal, loop.ends(), want)):
                missed.append((target, nth, "changed"))
            missed += [(target, nth, finding.name) for finding in loop.found]
    assert missed == [], "\n".join(map(str, missed))
