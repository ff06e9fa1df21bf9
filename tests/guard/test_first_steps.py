"""The guard alone, with no check run before: what is wired wrongly has its name within the first five steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trimtab import Guard

STEPS = 5


class Net(nn.Module):
    """A head that is tied to nothing, dropout that makes a difference between the modes, and a layer to cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(6, 16), nn.Dropout(0.1)
        self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.between: Callable[[Tensor], Tensor] = lambda h: h

    def forward(self, x: Tensor) -> Tensor:
        h = self.between(torch.tanh(self.first(x)))
        return self.head(self.drop(torch.tanh(self.second(h))))


class Loop:
    """The loop people write; a trouble changes one part of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scaler: Any = None
        self.autocast: torch.dtype | None = None
        self.micro = 1
        self.zero: Callable[[], object] = lambda: self.optimizer.zero_grad()
        self.loss: Callable[[Tensor], Tensor] = lambda loss: loss
        self.batch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, y: (x, y)
        self.before_step: Callable[[], object] = lambda: None
        self.after_step: Callable[[], object] = lambda: None

    def run(self, num_steps: int = STEPS) -> list[str]:
        generator = torch.Generator().manual_seed(1)
        names: list[str] = []
        guard = Guard.attach(
            self.model, self.optimizer, mode="observe", run_dir=False, scaler=self.scaler,
            on_finding=lambda finding: names.append(finding.name),
        )  # fmt: skip
        with guard:
            try:
                for _ in range(num_steps):
                    self.zero()
                    for _ in range(self.micro):
                        drawn = torch.randn(32, 6, generator=generator)
                        x, y = self.batch(drawn, drawn[:, :3].argmax(1))
                        with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None):
                            loss = self.loss(cross_entropy(self.model(x), y))
                        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                        guard.observe(loss=loss, batch=(x, y))
                    self.before_step()
                    if self.scaler is None:
                        self.optimizer.step()
                    else:
                        self.scaler.step(self.optimizer)
                        self.scaler.update()
                    self.after_step()
            except IndexError as error:
                guard.__exit__(type(error), error, error.__traceback__)
        return names


def no_zero(loop: Loop) -> None:
    loop.zero = lambda: None


def dropped(loop: Loop) -> None:
    loop.before_step = lambda: loop.optimizer.zero_grad()


def twice(loop: Loop) -> None:
    loop.after_step = lambda: loop.optimizer.step()


def evaluating(loop: Loop) -> None:
    loop.model.eval()


def cut(loop: Loop) -> None:
    loop.model.between = lambda h: h.detach()


def without_grad(loop: Loop) -> None:
    loop.model.first.forward = torch.no_grad()(loop.model.first.forward)


def times_zero(loop: Loop) -> None:
    loop.loss = lambda loss: loss * 0


def half(loop: Loop) -> None:
    loop.optimizer = torch.optim.Adam(loop.model.head.parameters(), lr=1e-2)


def other_head(loop: Loop) -> None:
    loop.model.head = nn.Linear(16, 3)


def summed(loop: Loop) -> None:
    loop.micro = 4


def clipped_scaled(loop: Loop) -> None:
    loop.autocast, loop.scaler = torch.float16, torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop.before_step = lambda: nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


def scaled_bf16(loop: Loop) -> None:
    loop.autocast, loop.scaler = torch.bfloat16, torch.amp.GradScaler("cpu", init_scale=1024.0)


def label_too_high(loop: Loop) -> None:
    loop.batch = lambda x, y: (x, y + 1)


def nan_input(loop: Loop) -> None:
    loop.batch = lambda x, y: (x * torch.nan, y)


def blank(loop: Loop) -> None:
    loop.batch = lambda x, y: (torch.ones_like(x), y)


def empty(loop: Loop) -> None:
    loop.batch = lambda x, y: (x[:0], y[:0])


def too_fast(loop: Loop) -> None:
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=300.0)


def broken(loop: Loop) -> None:
    def fail(loss: Tensor) -> Tensor:
        raise IndexError("no such column")

    loop.loss = fail


TROUBLES: dict[str, tuple[Callable[[Loop], None], set[str]]] = {
    "stale-gradient": (no_zero, {"stale-gradient"}),
    "missing-gradient": (dropped, {"missing-gradient"}),
    "double-step": (twice, {"double-step"}),
    "eval-mode": (evaluating, {"eval-mode"}),
    "graph-cut": (cut, {"missing-gradient", "no-grad"}),
    "no-grad": (without_grad, {"no-grad", "missing-gradient"}),
    "zero-gradient": (times_zero, {"zero-gradient"}),
    "optimizer-misses-parameters": (half, {"optimizer-misses-parameters"}),
    "stale-optimizer": (other_head, {"stale-optimizer"}),
    "accumulation-not-divided": (summed, {"accumulation-not-divided"}),
    "clip-before-unscale": (clipped_scaled, {"clip-before-unscale"}),
    "needless-scaler": (scaled_bf16, {"needless-scaler"}),
    "label-range": (label_too_high, {"label-range"}),
    "nonfinite-input": (nan_input, {"nonfinite-input"}),
    "constant-batch": (blank, {"constant-batch"}),
    "empty-batch": (empty, {"empty-batch"}),
    "update-ratio": (too_fast, {"update-ratio", "learning-rate"}),
    "step-exception": (broken, {"step-exception"}),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_wrong_wiring_has_its_name_within_five_steps(name: str) -> None:
    trouble, names = TROUBLES[name]
    loop = Loop()
    trouble(loop)
    said = loop.run()
    assert said[0] in names, f"first said: {said}"


def test_right_wiring_has_none() -> None:
    assert Loop().run(40) == []


def test_a_rate_of_zero_has_its_name_when_it_can_be_no_warm_up_any_more() -> None:
    loop = Loop()
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.0)
    assert loop.run(8) == ["learning-rate"]
