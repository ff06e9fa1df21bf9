import pytest

from trimtab.core.registry import all_rules


def test_rules_lists_every_rule(trimtab):
    said = trimtab("rules")
    assert said.code == 0
    data = trimtab("rules", "--json").json()
    assert [r["code"] for r in data["rules"]] == [r.code for r in all_rules()]
    for rule in all_rules():
        assert rule.code in said.out
        assert rule.name in said.out


def test_rules_previews_a_selection(trimtab):
    data = trimtab("rules", "--json", "true", "--select", "GRAD,LOSS", "--ignore=loss-spike").json()
    codes = {r["code"] for r in data["rules"]}
    assert {code[:4] for code in codes} == {"GRAD", "LOSS"}
    assert "LOSS002" not in codes
    assert {"GRAD001", "GRAD002", "LOSS001"} < codes
    nothing = trimtab("rules", "--select", "GRAD", "--ignore", "ALL")
    assert (nothing.code, "rules is selected" in nothing.out) == (0, True)
    assert trimtab("rules", "--select", "GRAB").code == 2


@pytest.mark.parametrize("rule", all_rules())
def test_explain_every_rule_by_code_and_name(trimtab, rule):
    said = trimtab("explain", rule.code)
    assert said.code == 0
    for section in ("What it sees", "Why it matters", "What to try"):
        assert section in said.out
    data = trimtab("explain", rule.name.upper().replace("-", "_"), "--json").json()
    assert (data["code"], data["severity"]) == (rule.code, rule().severity.name.lower())


def test_explain_is_rendered_on_a_terminal(trimtab, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    said = trimtab("explain", "GRAD001")
    assert "\x1b[" in said.out
    assert "## What" not in said.out
    assert "## By" not in said.out
    assert "By evidence" in said.out
    assert "Put an epsilon inside every normalisation" in said.out


def test_explain_tells_what_evidence_adds_and_when(trimtab):
    said = trimtab("explain", "GRAD002")
    head, _, tail = said.out.partition("## By evidence")
    assert "## What to try" in head
    assert (
        "- **When nothing clips yet, and the steps are not tiny already**: Clip the gradient norm now:"
        in tail.replace("\n  ", " ")
    )
    assert max(map(len, tail.splitlines())) <= 84
    assert "By evidence" not in trimtab("explain", "eval-mode").out


def test_explain_as_json_has_every_recommendation(trimtab):
    points = trimtab("explain", "exploding-gradient", "--json").json()["by_evidence"]
    assert {"clip", "lower-lr", "warm-up"} <= {p["topic"] for p in points}
    assert all(p.keys() == {"topic", "when", "text"} for p in points)  # no numbers of ours in what others read
    assert all(p["when"] and p["text"] for p in points)
    assert trimtab("explain", "eval-mode", "--json").json()["by_evidence"] == []
