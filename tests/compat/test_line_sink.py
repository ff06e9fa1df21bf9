"""Samples in, documented lines out: cadence, thresholds, pace, and where the lines go."""

from __future__ import annotations

import io
import logging
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.record.record_fakes import INF, INFO, NAN, layout, sample, verdict
from trimtab import InputError
from trimtab.compat.line_sink import LineSink
from trimtab.compat.lines import CADENCE, Pace
from trimtab.core.config import Config
from trimtab.core.types import ABSENT, FROZEN, Record, Sample
from trimtab.record.sinks import adapt, with_preset_lines


def rows(step: int, *norms: float, **scalars: float) -> Sample:
    """A step with these norms of parameters."""
    lay = layout(len(norms))
    one = sample(step, lay=lay, **{"grad_norm": float(np.linalg.norm([n for n in norms if n >= 0])), **scalars})
    return replace(one, table=np.array(norms, np.float32)[:, None])


def told(style: str, records: list[Record], **kwargs: Any) -> list[str]:
    out: list[str] = []
    sink = LineSink(style, write=out.append, **kwargs)
    for record in records:
        sink.write(record)
    sink.close()
    return out


def info(**settings: Any) -> Record:
    return replace(INFO, config=Config.from_dict(settings).to_dict())


def test_a11_every_hundred_steps_and_warnings_at_once() -> None:
    out = told("a11", [rows(s, 3.0, 4.0) for s in range(201)])
    assert out == [
        f"Step {s} - Gradient Health: Global Norm=5.0000, Max=4.0000, Min=3.00e+00, Mean=3.5000" for s in (0, 100, 200)
    ]
    loud = told("a11", [rows(7, 120.0, 5e-8)])
    assert loud == [
        "⚠️ Exploding gradients detected (norm=120.00)!\n   Consider: (1) Gradient clipping, (2) Reducing learning rate",
        "⚠️ Vanishing gradients detected (min norm=5.0e-08)!\n"
        "   Consider: (1) Using residual connections, (2) Changing activation functions",
    ]
    assert told("a11", [rows(7, 99.0, 1.1e-7), rows(8, ABSENT, FROZEN)]) == []
    assert told("a11", [rows(7, 99.0)], every=7)[0].startswith("Step 7 - ")


def test_a11_warnings_do_not_drown_a_log() -> None:
    out = told("a11", [rows(s, 1.0, 1e-9) for s in range(1, 1000)])
    assert len([line for line in out if "Vanishing" in line]) == 4  # steps 1, 101, 301, 701
    worse = told("a11", [rows(1, 120.0), rows(2, 130.0), rows(3, 500.0), rows(4, 400.0)])
    assert [line[:50].split("norm=")[1][:3] for line in worse] == ["120", "500"]


def test_pace_begins_anew_after_quiet() -> None:
    pace = Pace()
    assert [s for s in (0, 1, 50, 100, 150, 250, 300, 5000, 5001) if pace.due(s, 1.0)] == [0, 100, 300, 5000]


def test_b5_only_above_five_times_the_clip() -> None:
    clipped = [sample(s, grad_norm=n, clip_coef=min(1.0, 0.5 / n)) for s, n in enumerate((0.4, 2.4, 2.6))]
    assert told("b5", [info(clip=0.5), *clipped]) == ["⚠️  High gradient norm detected: 2.60 (clipped to 0.5)"]
    assert told("b5", clipped) == ["⚠️  High gradient norm detected: 2.60 (clipped to 0.5)"]  # told by the coefficient
    assert told("b5", [info(clip=0.5), sample(0, grad_norm=9.0)]) == []  # mode observe: nothing was clipped


def test_b8_average_and_maximum_with_every_validation() -> None:
    train = [sample(s, grad_norm=n, loss=n) for s, n in enumerate((0.25, 0.75, NAN))]
    val = sample(2, phase="val", **{"val_loss": 9.0, "val/IoU": 0.5845, "val/Dice": 0.735})
    out = told("b8", [*train, val, *train[:2]])
    assert out == [
        "   Gradient norm - Avg: 0.500, Max: 0.750",
        "Loss: 0.5000 | IoU: 0.5845 | Dice: 0.7350",
        "   Gradient norm - Avg: 0.500, Max: 0.750",
    ]
    assert told("b8", [sample(0, phase="val", val_loss=2.5)]) == ["Val loss: 2.5000"]
    assert told("b8", train[:2], every=1) == [
        "   Gradient norm - Avg: 0.250, Max: 0.250",
        "   Gradient norm - Avg: 0.750, Max: 0.750",
    ]


def test_b9_on_gradients_and_loss_but_not_on_routine_overflow() -> None:
    bad = {"grad_norm": INF, "nonfinite_grads": 1.0, "loss": 1.0}
    assert told("b9", [sample(5, **bad)]) == [
        "❌ NaN/Inf detected in gradients at batch 5!\n   Gradient norm: inf\n   This indicates gradient explosion."
    ]
    assert told("b9", [sample(5, **bad, routine_overflow=1.0)]) == []
    assert told("b9", [sample(6, grad_norm=1.0, loss=NAN)])[0] == (
        "❌ NaN/Inf detected in loss at batch 6!\n   Loss: nan"
    )
    assert told("b9", [sample(6, grad_norm=1.0)]) == []


def test_b7_a_progress_bar_shows_loss_and_norm() -> None:
    seen = []

    class Bar:
        def set_postfix(self, values: dict[str, str], refresh: bool) -> None:
            seen.append((values, refresh))

    told("b9", [sample(0, loss=2.371, grad_norm=0.4234), sample(0, phase="val", val_loss=1.0)], bar=Bar())
    assert seen == [({"loss": "2.37", "grad": "0.423"}, False)]


def test_c4_only_with_measured_values(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trimtab")
    facts = {"loss": 3.2, "grad_norm": 2.0, "clip_coef": 0.75, "lr/0": 5e-5}
    whole = {**facts, "weight_norm": 11.25}
    out = told("c4", [info(full_every=10), sample(0, **whole), sample(5, **whole), sample(10, **facts)])
    assert out == [
        "[Step 0] Loss: 3.2000 | Grad norm: 2.0000 -> 1.5000 (clipped: YES) | Param norm: 11.2500 | LR: 0.000050"
    ]
    assert caplog.messages == []
    assert told("c4", [sample(20, **whole, lr_multiplier=0.1)])[0].endswith("LR: 0.000005")
    assert told("c4", [info(), sample(0, grad_norm=1.0), sample(10, grad_norm=1.0)]) == []
    assert ["full_every = 10" in m for m in caplog.messages] == [True, False]
    assert "guard.observe(loss=...)" in caplog.messages[1]


def test_d2_both_norms_every_step() -> None:
    out = told("d2", [sample(0, grad_norm=2.5, clip_coef=0.4), sample(1, grad_norm=0.5)])
    assert out == [
        "Gradient norm before clipping: 2.500000",
        "Gradient norm after clipping: 1.000000",
        "Gradient norm before clipping: 0.500000",
        "Gradient norm after clipping: 0.500000",
    ]


def test_e13_counts_and_names_what_is_wrong() -> None:
    out = told("e13", [rows(0, 3.0, 0.0, ABSENT, FROZEN, 4.0, grad_norm=5.0)])
    assert out == [
        "[GRAD] Step    0 | Global: 5.00e+00 | Zero: 2/4 | NaN/Inf: 0/4 | Max: 4.00e+00 | Avg: 2.33e+00 | "
        "Range: [0.00e+00, 4.00e+00]",
        "[GRAD]   no gradient: layer.2.weight",
        "[GRAD]   zero: layer.1.weight",
    ]
    bad = told("e13", [rows(10, 1.0, NAN, grad_norm=NAN)])
    assert bad[1:] == ["[GRAD]   NaN/Inf: layer.1.weight"]
    assert "NaN/Inf: 1/2 | Max: 1.00e+00" in bad[0]
    assert told("e13", [rows(3, 0.0, 0.0, 1.0)]) == ["[GRAD] Step    3 | ⚠️  2 of 3 gradients are zero"]
    assert told("e13", [rows(3, 150.0)]) == ["[GRAD] Step    3 | ⚠️  the global norm of 1.50e+02 is too large"]
    assert told("e13", [rows(3, 5e-9, 1.0, grad_norm=5e-9)]) == [
        "[GRAD] Step    3 | ⚠️  the global norm of 5.00e-09 is too small"
    ]
    assert told("e13", [rows(3, FROZEN)]) == []


def test_e15_the_preset_warns_at_its_own_thresholds() -> None:
    assert told("lmol", [rows(3, 150.0), rows(4, 299.0)]) == []
    assert len(told("lmol", [rows(3, 301.0)])) == 1
    assert told("004", [rows(10, 1.0)])[0].startswith("[GRAD] Step   10")


def test_preset_names_and_joined_styles() -> None:
    high = sample(9, grad_norm=5.0, clip_coef=0.1)
    assert len(told("camoxpert", [info(clip=0.5), high])) == 2  # the warning, and the summary at the end
    assert len(told("b5 + d2", [high])) == 3
    with pytest.raises(InputError, match=r"names no lines; expected a11, b5.*did you mean 'camoxpert'"):
        LineSink("camoxper")
    with pytest.raises(InputError, match="has no lines of its own"):
        LineSink("arch-gpt")
    with pytest.raises(InputError, match="every = 0"):
        LineSink("c4", every=0)
    with pytest.raises(InputError, match="stderr or stdout"):
        LineSink("c4", stream="nowhere")


def test_two_optimizers_are_told_apart() -> None:
    one = replace(sample(0, grad_norm=1.0), layout=layout(optimizer="gen"))
    assert told("d2", [one])[0] == "gen: Gradient norm before clipping: 1.000000"


@pytest.mark.parametrize("style", CADENCE)
def test_other_records_are_no_matter(style: str) -> None:
    assert told(style, [verdict(3), sample(4, phase="error", exception=1.0), sample(5, phase="val", x=1.0)]) == []


class TestWhere:
    def test_the_logger_by_default(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "trimtab")
        sink = LineSink("a11")
        sink.write(rows(0, 120.0))
        assert [(r.name, r.levelname, r.message[:6]) for r in caplog.records] == [
            ("trimtab.lines", "INFO", "Step 0"),
            ("trimtab.lines", "WARNING", "⚠️ Exp"),
        ]

    def test_an_open_stream_and_standard_streams(self, capsys: pytest.CaptureFixture[str]) -> None:
        stream = io.StringIO()
        LineSink("d2", stream=stream).write(sample(0, grad_norm=1.0))
        assert stream.getvalue().count("\n") == 2
        for name in ("stderr", "stdout"):
            sink = adapt(f"lines:d2:{name}")
            assert isinstance(sink, LineSink)
            sink.write(sample(0, grad_norm=1.0))
        out, err = capsys.readouterr()
        assert out == err == stream.getvalue()

    def test_above_a_live_bar(self, monkeypatch: pytest.MonkeyPatch) -> None:
        written = []

        class Bars:
            _instances = (1,)

            @staticmethod
            def write(line: str, file: object) -> None:
                written.append(line)

        monkeypatch.setitem(sys.modules, "tqdm", type("module", (), {"tqdm": Bars}))
        LineSink("d2", stream=io.StringIO()).write(sample(0, grad_norm=1.0))
        assert len(written) == 2

    def test_as_text(self) -> None:
        assert isinstance(adapt("lines:c4"), LineSink)
        assert isinstance(adapt("lines:camoxpert:stdout"), LineSink)
        with pytest.raises(InputError, match="names no lines"):
            adapt("lines:c5")
        with pytest.raises(InputError, match="lines:STYLE"):
            adapt("lines:")

    def test_a_preset_brings_its_lines_unless_others_were_asked_for(self) -> None:
        seo, plain, gpt = (Config.from_dict(s) for s in ({"preset": "seo"}, {}, {"preset": "arch-gpt"}))
        assert with_preset_lines(seo, [print]) == [print, "lines:seo"]
        assert with_preset_lines(seo, ["lines:c4:stderr"]) == ["lines:c4:stderr"]
        mine = LineSink("d2")
        assert with_preset_lines(seo, (mine,)) == [mine]
        assert with_preset_lines(plain, ()) == with_preset_lines(gpt, ()) == []
