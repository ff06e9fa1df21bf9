import pytest

from trimtab.advice.guides import GUIDES


@pytest.mark.parametrize("problem", GUIDES)
def test_a_guide_fits_80_columns_and_says_how_to_check(trimtab, problem):
    said = trimtab("explain", "--problem", problem)
    assert said.code == 0
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("    → ") for line in lines) == len(GUIDES[problem].points)
    for number in range(1, len(GUIDES[problem].points) + 1):
        assert any(line.startswith(f"{number:>2}. ") for line in lines)
    assert "\x1b[" not in said.out


def test_a35_every_guide_ends_with_the_way_to_the_ten_points(trimtab):
    for problem in ("nan", "plateau", "explosion", "slow"):
        assert trimtab("explain", "--problem", problem).out.rstrip().endswith("trimtab explain --problem checklist")
    assert "10. " in trimtab("explain", "--problem", "checklist").out


def test_names_of_findings_are_never_broken(trimtab):
    out = trimtab("explain", "--problem", "nan").out
    for name in GUIDES["nan"].findings:
        assert name in out


def test_a_guide_as_json(trimtab):
    data = trimtab("explain", "--problem", "NAN", "--json").json()
    assert data["problem"] == "nan"
    assert len(data["steps"]) == len(GUIDES["nan"].points)
    assert all(step.keys() == {"do", "check"} for step in data["steps"])
    assert all(step["do"] and step["check"] for step in data["steps"])
    assert data["beware"]


def test_a_guide_on_a_terminal(trimtab, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[32m    → " in trimtab("explain", "--problem", "slow").out


@pytest.mark.parametrize("argv", [("--problem", "fire"), (), ("GRAD001", "--problem", "nan")])
def test_what_cannot_be_explained_ends_with_2_and_the_list(trimtab, argv):
    said = trimtab("explain", *argv)
    assert said.code == 2
    assert said.out == ""
    assert "nan, plateau, explosion, slow, checklist" in said.err
