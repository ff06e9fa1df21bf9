"""`trimtab presets`: readable on 80 columns, complete for machines."""

from __future__ import annotations

import pytest

from trimtab.core.presets import PRESETS


def test_the_list_has_every_preset_on_eighty_columns(trimtab) -> None:
    said = trimtab("presets")
    assert said.code == 0
    assert max(map(len, said.out.splitlines())) <= 80
    rows = {line.split()[0]: line for line in said.out.splitlines() if line.strip()}
    assert {p.name for p in PRESETS} < set(rows)
    for name, facts in {
        "6dim-clip": ("1.0 above 10", "a11 every 100", "1e-4, 500", "6DIMCOCO"),
        "camoxpert": ("0.5", "b5 b8 b9", "2.5e-4", "camoXpert"),
        "mlp-cuda": ("1.5", "c4 every 10", "5e-5, 200", "MLP-cuda"),
        "mlp-cuda-v1": ("1.0", "1e-4, 100"),
        "lmol": ("1.0", "e13 every 10", "2e-4, 5 %"),
        "arch-resnet": ("none",),
        "arch-nfnet": ("agc 0.01",),
    }.items():
        for fact in facts:
            assert fact in rows[name]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.name)
def test_one_preset_is_told_with_everything(trimtab, preset) -> None:
    said = trimtab("presets", preset.name)
    assert said.code == 0
    flat = " ".join(said.out.split()).replace("- ", "-")  # words may be broken at a hyphen
    assert max(map(len, said.out.splitlines())) <= 80
    assert " ".join(preset.source.split()) in flat
    for note in preset.notes:
        assert note.replace("- ", "-") in flat
    for hint in preset.hints:
        assert hint in flat
    data = trimtab("presets", preset.name, "--json").json()["preset"]
    assert data["name"] == preset.name
    assert data["notes"] == list(preset.notes)
    assert [band["meaning"] for band in data["bands"]] == [band.meaning for band in preset.bands]


def test_c14_contradictions_are_shown(trimtab) -> None:
    said = trimtab("presets", "002")
    assert "Contradictions, and what is done about them" in said.out
    assert "mlp-cuda-v1" in said.out
    assert "[Step 10] Loss: 3.2000" in said.out


def test_json_of_all_and_an_unknown_name(trimtab) -> None:
    data = trimtab("presets", "--json", "true").json()
    assert [p["name"] for p in data["presets"]] == [p.name for p in PRESETS]
    said = trimtab("presets", "camoexpert")
    assert said.code == 2
    assert "did you mean 'camoxpert'" in said.err
