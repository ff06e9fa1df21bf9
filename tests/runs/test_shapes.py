"""Healthy programs of every shape, in mode act: the same output and weights as without trimtab, and not a word from it.

`python -m tests.runs.shape_runs` runs them for thousands of steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import sampled
from tests.run.running import Nest, Ran, Workplace
from tests.runs.shape_runs import FOLDER, HALVES, HELD_OUT, SHAPES, Compared, differences, table

STEPS = "80"
USUAL = ("adder", "char_lm", "diffusion", "gcn", "lora", "loss_dict", "ppo", "simclr")


@pytest.fixture
def place(tmp_path: Path, nest: Nest) -> Workplace:
    return Workplace(tmp_path / "place", nest, FOLDER)


@pytest.mark.parametrize("shape", sampled(SHAPES, USUAL))
def test_a_program_of_any_shape_runs_as_without(shape: str, place: Workplace) -> None:
    plain = place.plain(f"{shape}.py", STEPS)
    guarded = place.guarded("--mode", "act", f"{shape}.py", STEPS)
    assert (plain.code, plain.finite, plain.own_err) == (0, True, [])
    assert differences(plain, guarded) == ()
    assert guarded.findings == []
    assert guarded.our_err != []


def test_the_programs_know_nothing_of_trimtab_and_each_ends_with_a_digest() -> None:
    assert len(SHAPES) == 40
    for path in FOLDER.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "trimtab" not in text
        assert path.stem == "shapes_common" or "ending(" in text


def test_every_second_program_is_held_out() -> None:
    assert HALVES["held-out"] == SHAPES[1::2] == tuple(sorted(HELD_OUT))
    assert HALVES["tuned"] == SHAPES[::2]


def test_another_seed_gives_other_weights(place: Workplace) -> None:
    first, again, other = (place.plain("gcn.py", "20", seed).out for seed in ("0", "0", "1"))
    assert first == again != other


def ran(out: str = "loss 1\nsha256 a\n", err: str = "", code: int = 0) -> Ran:
    return Ran(code=code, out=out, err=err)


def test_a_difference_is_named() -> None:
    assert differences(ran(), ran(err="trimtab: Net, 3 steps, no findings\n")) == ()
    assert differences(ran(), ran(out="loss 1\nsha256 b\n")) == ("stdout: 'sha256 b' instead of 'sha256 a'",)
    assert differences(ran(), ran(out="loss 1\n")) == ("stdout: one of them has more lines",)
    assert differences(ran(), ran(code=70)) == ("exit code 70, 0 without trimtab",)
    assert differences(ran(), ran(err="Warning: x\n")) == ("stderr: Warning: x",)
    assert differences(ran(err="Warning: x\n"), ran()) == ("stderr: a line is missing, or in another place",)


def test_what_was_found_in_a_held_out_program_is_only_counted() -> None:
    def lines(shape: str, code: int = 0) -> str:
        one = Compared(
            shape=shape, seed=0, differs=(), learned=True, steps=9, findings=("LOSS003 said",), actions=("rewind",),
            rejected=1, plain_s=1.0, guarded_s=1.5, guarded=ran(err="IndexError: 7", code=code),
        )  # fmt: skip
        assert not one.harmless
        return "\n".join(table([one], 9, HELD_OUT))

    assert "LOSS003 said" in lines(SHAPES[0])
    assert "DONE rewind" in lines(SHAPES[0])
    assert "LOSS003 said" not in lines(SHAPES[1])
    assert "rewind" not in lines(SHAPES[1])
    assert "IndexError: 7" in lines(SHAPES[1], code=1)
