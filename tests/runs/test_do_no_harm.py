"""Healthy programs: bit-identical with and without the guard, and not a word from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.matrix import sampled
from tests.runs.programs import PROGRAMS, Ready, Result, Setup, drive, unguarded
from trimtab import Guard

USUAL = """
    mlp_adam cnn_batchnorm_cosine sparse_embedding_two_optimizers gan_alternating accumulation
    float16_scaler_fused contrastive_temperature lbfgs_closure policy_gradient_noise
"""
"""One for each kind of loop; `pytest -m long` runs the other programs."""


@cache
def plain(name: str) -> Result:
    return drive(PROGRAMS[name], lambda setup: lambda ready: unguarded(setup, ready))


def through_guard(guards: list[Guard]) -> Callable[[Setup], Callable[[Ready], Tensor]]:
    def make(setup: Setup) -> Callable[[Ready], Tensor]:
        guard = Guard(setup.model, setup.optimizers, scaler=setup.scaler)
        guards.append(guard)

        def step(ready: Ready) -> Tensor:
            if ready.closure is not None:
                told = []

                def closure() -> Tensor:
                    told.append(ready.closure())
                    return told[-1]

                guard.step(closure)
                return told[0]
            for loss in ready.losses[:-1]:
                guard.observe(loss=loss)
            guard.step(ready.losses[-1], optimizer=ready.optimizer)
            return ready.losses[-1]

        return step

    return make


def through_hooks(guards: list[Guard]) -> Callable[[Setup], Callable[[Ready], Tensor]]:
    def make(setup: Setup) -> Callable[[Ready], Tensor]:
        guard = Guard.attach(setup.model, setup.optimizers, scaler=setup.scaler)
        guards.append(guard)

        def step(ready: Ready) -> Tensor:
            for loss in ready.losses:
                guard.observe(loss=loss)
            return unguarded(setup, ready)

        return step

    return make


@pytest.mark.parametrize("name", sampled(list(PROGRAMS), USUAL))
@pytest.mark.parametrize("way", [through_guard, through_hooks])
def test_healthy_runs_are_bit_identical_and_silent(name: str, way: Callable[..., object]) -> None:
    guards: list[Guard] = []
    guarded = drive(PROGRAMS[name], way(guards))
    (guard,) = guards
    guard.close()
    want = plain(name)
    assert guarded.losses == want.losses
    assert len(guarded.state) == len(want.state)
    for mine, theirs in zip(guarded.state, want.state, strict=True):
        assert torch.equal(mine, theirs)
    assert guard.findings == []
    assert guard.rejected == 0
    assert guard.health()["overall_healthy"]


@pytest.mark.parametrize("name", sampled(list(PROGRAMS), USUAL))
def test_act_mode_does_nothing_to_a_healthy_run(name: str) -> None:
    guards: list[Guard] = []

    def make(setup: Setup) -> Callable[[Ready], Tensor]:
        guards.append(Guard.attach(setup.model, setup.optimizers, scaler=setup.scaler, mode="act", run_dir=False))

        def step(ready: Ready) -> Tensor:
            for loss in ready.losses:
                guards[0].observe(loss=loss)
            return unguarded(setup, ready)

        return step

    acted = drive(PROGRAMS[name], make)
    guards[0].close()
    assert acted.losses == plain(name).losses


@pytest.mark.parametrize("name", sampled(list(PROGRAMS), USUAL))
def test_the_programs_really_learn(name: str) -> None:
    losses = plain(name).losses
    assert all(x == x and abs(x) < 1e6 for x in losses)
    if name not in ("gan_alternating", "policy_gradient_noise"):  # theirs need not fall
        head, tail = losses[: max(len(losses) // 10, 1)], losses[-max(len(losses) // 10, 1) :]
        assert sum(tail) / len(tail) < sum(head) / len(head)
