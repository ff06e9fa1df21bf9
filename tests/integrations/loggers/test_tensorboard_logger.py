"""A real TensorBoard event file: scalars, findings as text, the report beside it, among the user's own scalars."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.integrations.loggers.kit import NAN_AT, needs, train

pytestmark = [needs("tensorboard"), pytest.mark.filterwarnings("ignore")]  # tensorboard's own imports warn
NUM = 40


@pytest.mark.parametrize("by_name", [False, True])
def test_everything_reaches_the_event_file(tmp_path: Path, by_name: bool) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path / "tb"
    if by_name:
        train([f"tensorboard:{folder}"], NUM, run_dir=tmp_path / "record")
    else:
        writer = SummaryWriter(folder)
        train([writer], NUM, lambda i: writer.add_scalar("mine", i, 5 * i), run_dir=tmp_path / "record")
        writer.add_scalar("after", 1.0, 0)  # it is still open
        writer.close()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [e.step for e in events.Scalars("trimtab/grad/global_norm")] == list(range(NUM))
    assert math.isnan(events.Scalars("trimtab/loss")[NAN_AT].value)
    assert [e.step for e in events.Scalars("trimtab/health/GRAD001")] == [NAN_AT]
    (tag,) = [tag for tag in events.Tags()["tensors"] if tag.startswith("trimtab/findings/")]
    (text,) = events.Tensors(tag)
    assert text.step == NAN_AT
    assert b"step 7" in text.tensor_proto.string_val[0]
    assert (folder / "trimtab_report.html").read_text(encoding="utf-8").startswith("<!")
    if not by_name:
        assert [e.step for e in events.Scalars("mine")] == [5 * i for i in range(NUM)]
        assert events.Scalars("after")
