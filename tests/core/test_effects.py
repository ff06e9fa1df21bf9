"""What became of an action, told by the steps before and after it."""

from __future__ import annotations

import json
import math

import pytest

from tests.core.test_pipeline import plain
from trimtab.core.config import Config
from trimtab.core.effects import MAX_WATCHED, Effects, TakenBack
from trimtab.core.pipeline import Brain
from trimtab.core.types import Action, Outcome, Sample

CUT = Action(kind="cut_lr", args={"factor": 0.1})


def outcome(at: int, action: Action = CUT, *, applied: bool = True) -> Outcome:
    return Outcome(at=at, action=action, applied=applied, detail="LR multiplier 1 -> 0.1", optimizer="gen")


def told(before: list[dict[str, float]], after: list[dict[str, float]]) -> str:
    effects = Effects(len(after))
    for i, scalars in enumerate(before):
        assert list(effects.see(plain(i, **scalars))) == []
    effects.watch(outcome(len(before)))
    found = [o for i, scalars in enumerate(after, len(before)) for o in effects.see(plain(i, **scalars))]
    (effect,) = found
    assert (effect.at, effect.action, effect.applied, effect.optimizer) == (len(before), CUT, True, "gen")
    return effect.detail


def test_loss_and_norm_that_fall_have_been_helped() -> None:
    detail = told([{"loss": 3.21, "grad_norm": 14.0}] * 20, [{"loss": 2.97, "grad_norm": 13.0}] * 20)
    assert detail == "20 steps later: loss 3.21 -> 2.97 (median), gradient norm 14 -> 13 (median): helped"


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([{"loss": 1.0}] * 20, [{"loss": 1.001}] * 20, "no better"),
        ([{"loss": 1.0}] * 20, [{"loss": 1.2}] * 20, "worse"),
        ([{"loss": 1.0 + 0.5 * (i % 2)} for i in range(20)], [{"loss": 1.3}] * 20, "no better"),  # within the noise
        ([{"loss": -1.0}] * 20, [{"loss": -2.0}] * 20, "helped"),
        ([{"loss": -2.0}] * 20, [{"loss": -1.0}] * 20, "worse"),
        ([{"grad_norm": 14.0}] * 20, [{"grad_norm": 2.1}] * 20, "helped"),
        ([{"grad_norm": 2.0}] * 20, [{"grad_norm": 9.0}] * 20, "worse"),
        ([{}] * 19 + [{"loss": 30.0}], [{}] * 20, "helped"),  # one spike, and none after it
        ([{}] * 20, [{}] * 19 + [{"loss": 30.0}], "worse"),
        ([{"loss": math.nan}] * 5 + [{}] * 15, [{}] * 20, "helped"),
        ([{}] * 20, [{"grad_norm": math.inf}] * 20, "worse"),
        ([{"loss": math.nan}] * 20, [{"loss": math.nan}] * 20, "no better"),
        ([{"loss": math.nan}] + [{}] * 19, [{"loss": 4.0}] * 20, "worse"),  # finite, but at what price
        ([], [{}] * 20, "no better"),
    ],
)
def test_verdicts(before: list[dict[str, float]], after: list[dict[str, float]], verdict: str) -> None:
    assert told(before, after).endswith(f": {verdict}")


def test_only_finite_values_are_weighed_and_lost_steps_are_counted() -> None:
    detail = told([{"loss": math.nan}] * 15 + [{"loss": 2.0}] * 5, [{"loss": 1.0}] * 19 + [{"loss": math.inf}])
    assert "loss 2 -> 1 (median)" in detail
    assert "non-finite steps 15 -> 1" in detail


def test_an_overflow_that_a_scaler_provoked_is_not_a_lost_step() -> None:
    overflow = {"grad_norm": math.inf, "routine_overflow": 1.0}
    assert "non-finite" not in told([overflow] * 10 + [{}] * 10, [{}] * 20)


def test_the_highest_are_told_where_they_tell_a_story() -> None:
    detail = told([{}] * 19 + [{"loss": 30.0, "grad_norm": 1e3}], [{}] * 20)
    assert "loss 1 -> 1 (median), 30 -> 1 (highest), gradient norm 1 -> 1 (median), 1e+03 -> 1 (highest)" in detail


def test_steps_under_way_when_the_action_came_are_left_out() -> None:
    effects = Effects(2)
    for i in range(5):
        list(effects.see(plain(i)))
    effects.watch(outcome(7))  # decided about step 4, known at step 6
    losses = {5: 99.0, 6: 99.0, 7: 1.0, 8: 1.0}
    found = [(i, o.detail) for i, loss in losses.items() for o in effects.see(plain(i, loss=loss))]
    assert [i for i, _ in found] == [8]
    assert "loss 1 -> 1" in found[0][1]


def test_what_has_no_effect_to_measure_is_not_followed() -> None:
    effects = Effects(1)
    effects.watch(outcome(0, applied=False))
    effects.watch(outcome(0, Action(kind="skip")))
    effects.watch(outcome(0, Action(kind="stop")))
    assert list(effects.see(plain(0))) == []
    effects.watch(outcome(1))
    validation = plain(1)
    validation = Sample(step=1, layout=validation.layout, table=validation.table, scalars={}, phase="val")
    assert list(effects.see(validation)) == []
    assert len(list(effects.see(plain(1)))) == 1


def test_memory_is_bounded() -> None:
    effects = Effects(5)
    for i in range(100):
        list(effects.see(plain(i)))
        effects.watch(outcome(10**6))
    state = effects.state_dict()
    assert len(state["ring"]) == 5
    assert len(state["watched"]) == MAX_WATCHED


def test_nothing_measured_is_said() -> None:
    effects = Effects(1)
    blank = plain(0)
    effects.watch(outcome(0))
    (effect,) = effects.see(Sample(step=0, layout=blank.layout, table=blank.table, scalars={}))
    assert effect.detail == "1 step later: nothing was measured: no better"


def test_the_state_round_trips() -> None:
    one, two = Effects(4), Effects(4)
    for i in range(6):
        list(one.see(plain(i, loss=math.nan if i == 4 else 3.0)))
    one.watch(outcome(6))
    list(one.see(plain(6)))
    two.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
    assert one.state_dict() == two.state_dict()
    for i in range(7, 10):
        first, second = list(one.see(plain(i))), list(two.see(plain(i)))
        assert first == second
    assert len(first) == 1


def test_the_brain_tells_once_after_the_configured_number_of_steps() -> None:
    brain = Brain.from_config(Config.from_dict({"mode": "act", "policy": {"effect_after": 5}}))
    found = []
    for i in range(60):
        burst = {"loss": 30.0, "grad_norm": 1e3} if i == 40 else {"loss": 1.0 + 0.01 * (i % 3)}
        sample = plain(i, **burst)
        _, decision = brain.advance(sample, seen_at=i)
        itself, *effects = brain.records(sample)
        assert itself is sample
        found += [(i, e.at) for e in effects if isinstance(e, Outcome)]
        for action in decision.actions:
            done = Outcome(at=decision.at, action=action, applied=True)
            assert brain.did(done) is done
        if i == 43:
            state = json.loads(json.dumps(brain.state_dict()))
            brain = Brain.from_config(Config.from_dict({"mode": "act", "policy": {"effect_after": 5}}))
            brain.load_state_dict(state)
    assert found == [(45, 41), (45, 41)]  # gone back, and a smaller rate


def test_a_brain_that_does_not_act_measures_nothing() -> None:
    brain = Brain.from_config(Config())
    assert brain.did(outcome(0)) == outcome(0)
    for i in range(30):
        sample = plain(i)
        brain.advance(sample, seen_at=i)
        assert len(brain.records(sample)) == 1
    del (state := brain.state_dict())["effects"]
    brain.load_state_dict(state)  # one from before there was any


REWIND = Action(kind="rewind", args={"before": 15.0, "back": 0.0})


def rewound(trouble: float, after: list[dict[str, float]], *more: Action) -> list[str]:
    """What is told of a rewind, and of what was done with it; gradients were at 1, and up to `trouble` in it."""
    effects = Effects(len(after))
    for i in range(20):
        list(effects.see(plain(i)))
    effects.watch(outcome(20, REWIND), TakenBack(1.0, trouble))
    for action in more:
        effects.watch(outcome(20, action))
    found = [o for i, scalars in enumerate(after, 20) for o in effects.see(plain(i, **scalars))]
    return [o.detail for o in found]


@pytest.mark.parametrize(
    ("trouble", "after", "verdict"),
    [
        (50.0, [{"loss": 1.0, "grad_norm": 1.0}] * 20, "helped"),
        (math.inf, [{"loss": 1.0, "grad_norm": 1.0}] * 20, "helped"),
        # A loss that rose while nothing else did: it is lower because it was taken back, which proves nothing.
        (1.0, [{"loss": 1.0, "grad_norm": 1.0}] * 20, "no trouble since"),
        (50.0, [{"loss": 1.0, "grad_norm": 30.0}] * 20, "no better"),
        (
            50.0,
            [{"loss": 1.0 + 0.1 * i, "grad_norm": 1.0} for i in range(20)],
            "no better",
        ),
        (
            50.0,
            [{"loss": 1.0, "grad_norm": 1.0}] * 19 + [{"loss": math.nan}],
            "the trouble came back",
        ),
    ],
)
def test_a_rewind_is_not_judged_by_the_loss_it_took_back(
    trouble: float, after: list[dict[str, float]], verdict: str
) -> None:
    details = rewound(trouble, after, CUT)
    assert len(details) == 2
    assert all(
        detail.endswith(f": {verdict}") for detail in details
    )  # the cut came with it: nobody can tell them apart


def test_a_rewind_that_had_to_be_done_again_did_not_help() -> None:
    effects = Effects(10)
    for i in range(20):
        list(effects.see(plain(i)))
    effects.watch(outcome(20, REWIND), TakenBack(1.0, 9.0))
    for i in range(20, 25):
        list(effects.see(plain(i)))
    effects.watch(outcome(25, REWIND), TakenBack(1.0, 9.0))
    state = json.loads(json.dumps(effects.state_dict()))
    effects = Effects(10)
    effects.load_state_dict(state)
    told = [o.detail for i in range(25, 40) for o in effects.see(plain(i))]
    assert told[0].endswith(": the trouble came back")
