import json
import math

import pytest

from trimtab.core.config import Config
from trimtab.core.errors import RecordError
from trimtab.report.replay import replay


def losses() -> list[float]:
    values = [0.1 + 2.0 * 0.95**i for i in range(120)]
    values[60] = math.nan
    values[90] = 80.0
    return values


def test_a_record_replays_to_the_same_verdicts(write_run):
    made = replay(write_run(losses()))
    assert made.identical
    assert made.differences == ()
    assert made.num_samples == 120
    assert made.exact_from == {"": 0}
    assert [v.step for v in made.verdicts] == [60, 90]
    assert [f.code for f in made.verdicts[0].findings] == ["LOSS001", "GRAD001"]
    assert made.decisions


def test_a_changed_record_is_noticed(write_run):
    folder = write_run(losses())
    lines = (folder / "run.jsonl").read_text().splitlines(keepends=True)
    changed = [ln.replace("80.0", "0.2") if '"t":"sample"' in ln and '"step":90' in ln else ln for ln in lines]
    (folder / "run.jsonl").write_text("".join(changed))
    made = replay(folder)
    assert not made.identical
    assert any("step 90" in d and "LOSS002" in d for d in made.differences)


def test_other_settings_find_other_things(write_run):
    made = replay(write_run(losses()), Config.from_dict({"ignore": ["LOSS001", "loss-spike"]}))
    assert made.other_config
    assert not made.identical
    assert {f.code for v in made.verdicts for f in v.findings} == {"GRAD001"}
    assert any("LOSS001" in d for d in made.differences)
    assert any("decided" in d for d in made.differences), "without mode act nothing is decided"


def test_a_folder_without_a_record(tmp_path):
    with pytest.raises(RecordError):
        replay(tmp_path / "nowhere")


def test_a_thinned_record_is_replayed_from_where_it_is_complete(write_run):
    values = [0.1 + 2.0 * 0.99**i for i in range(1500)]
    values[60] = values[1400] = math.nan
    folder = write_run(values, max_bytes=450_000)
    made = replay(folder)
    start = made.exact_from[""]
    assert start is not None
    assert 0 < start < 1400
    assert start % 50 == 0, "states are recorded every 50 steps"
    assert made.num_samples == 1500 - start
    assert made.identical, made.differences
    assert [v.step for v in made.verdicts] == [1400]


def test_a_record_with_a_hole_is_replayed_after_it(write_run):
    folder = write_run(losses())
    lines = (folder / "run.jsonl").read_bytes().splitlines(keepends=True)
    kept = [ln for ln in lines if not (b'"t":"sample"' in ln and b'"step":30,' in ln)]
    assert len(kept) == len(lines) - 1
    (folder / "run.jsonl").write_bytes(b"".join(kept))
    made = replay(folder)
    assert made.exact_from == {"": 50}
    assert made.identical, made.differences


def test_a_record_too_thin_to_start_from(write_run):
    folder = write_run(losses())
    lines = (folder / "run.jsonl").read_bytes().splitlines(keepends=True)
    kept = [ln for ln in lines if b'"t":"state"' not in ln and not (b'"t":"sample"' in ln and b'"step":30,' in ln)]
    (folder / "run.jsonl").write_bytes(b"".join(kept))
    with pytest.raises(RecordError, match="judged again"):
        replay(folder)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("advice", ["do nothing"], "differs in its advice"),
        ("message", "something else", "differs in its message: 'something else' → "),
        ("evidence", {"loss": 7.0}, "differs in its evidence (loss 7.0 → "),
        ("severity", 1, "differs in its severity"),
    ],
)
def test_what_differs_is_named(write_run, field, value, said):
    folder = write_run(losses())
    lines = (folder / "run.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"t":"verdict"' in line and '"LOSS001"' in line)
    verdict = json.loads(lines[at])
    finding = next(f for f in verdict["findings"] if f["code"] == "LOSS001")
    finding[field] = finding[field] | value if field == "evidence" else value
    if field == "evidence":
        verdict.pop("nf", None)
    lines[at] = json.dumps(verdict, separators=(",", ":"))
    (folder / "run.jsonl").write_text("\n".join(lines) + "\n")
    differences = replay(folder).differences
    assert any(f"LOSS001 nonfinite-loss {said}" in line for line in differences), differences
