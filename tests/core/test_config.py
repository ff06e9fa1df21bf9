from __future__ import annotations

import contextlib
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.config import Clip, Config, discover, resolve
from trimtab.core.errors import ConfigError
from trimtab.core.registry import all_rules, select_rules
from trimtab.core.severity import Severity


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"clipp": 1.0}, "did you mean 'clip'"),
        ({"mod": "act"}, "did you mean 'mode'"),
        ({"qqqqqq": 1}, "known are"),
        ({"mode": "acting"}, "did you mean 'act'"),
        ({"clip": {"nrom": 1.0}}, "clip.nrom"),
        ({"clip": -1.0}, "above 0"),
        ({"clip": float("nan")}, "above 0"),
        ({"clip": True}, "above 0"),
        ({"lag": -1}, "at least 0"),
        ({"lag": 1.5}, "whole number"),
        ({"record": "yes"}, "true or false"),
        ({"select": 3}, "list of rule codes"),
        ({"severity": {"GRAD001": "dire"}}, "none of warn, error, fatal"),
        ({"severity": 3}, "a table such as"),
        ({"rules": {"GRAD001": 3}}, "table of tables"),
        ({"policy": {"cooldwn": 3}}, "did you mean 'cooldown'"),
        ({"policy": 3}, "expected a table"),
        ({"dir": 3}, "a text"),
    ],
)
def test_bad_settings_say_what_was_expected(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        Config.from_dict(settings)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "mode": st.sampled_from(["observe", "advise", "act", "raise"]),
            "clip": st.one_of(st.none(), st.floats(1e-3, 1e3), st.just({"value": 0.5, "per_group": True})),
            "lag": st.one_of(st.none(), st.integers(0, 5)),
            "select": st.lists(st.sampled_from(["GRAD", "LOSS001"])),
            "severity": st.dictionaries(st.sampled_from(["GRAD001", "LOSS"]), st.sampled_from(["warn", "FATAL"])),
            "full_every": st.integers(0, 100),
            "reject_above": st.floats(1, 10),
        },
    )
)
def test_round_trip(settings: dict[str, object]) -> None:
    config = Config.from_dict(settings)
    assert Config.from_dict(config.to_dict()) == config


def test_words_may_come_as_text_and_keys_with_dashes() -> None:
    config = Config.from_dict({"ignore": "GRAD002, LOSS", "full-every": 7})
    assert config.ignore == ("GRAD002", "LOSS")
    assert config.full_every == 7


def test_toml_tool_table_and_plain(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.trimtab]\nmode = "act"\n[tool.trimtab.clip]\nnorm = 2.0\n')
    (tmp_path / "a.toml").write_text("clip = 0.5\n")
    assert Config.from_toml(tmp_path / "pyproject.toml").clip == Clip(norm=2.0)
    assert Config.from_toml(tmp_path / "a.toml").clip == Clip(norm=0.5)


def test_toml_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        Config.from_toml(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        Config.from_toml(tmp_path / "bad.toml")
    (tmp_path / "odd.toml").write_text("[tool]\ntrimtab = 3\n")
    with pytest.raises(ConfigError, match="expected a table"):
        Config.from_toml(tmp_path / "odd.toml")


def test_discovery_goes_up_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo, below = tmp_path / "repo", tmp_path / "repo" / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "trimtab.toml").write_text('mode = "raise"\n')
    (repo / ".git").mkdir()
    assert discover(below) == {}
    (repo / "pyproject.toml").write_text('[tool.trimtab]\nmode = "act"\n')
    (repo / "a" / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert discover(below) == {"mode": "act"}
    monkeypatch.chdir(below)
    assert resolve(None).mode == "act"
    monkeypatch.setenv("TRIMTAB_MODE", "observe")
    assert resolve(None).mode == "observe"
    assert resolve(None, mode="raise").mode == "raise"
    assert resolve({"mode": "act"}).mode == "act"


def test_resolve_refuses_what_is_no_config() -> None:
    with pytest.raises(ConfigError, match=r"expected a trimtab\.Config"):
        resolve(3)  # type: ignore[arg-type]
    config = Config(mode="act")
    assert resolve(config) == config
    assert resolve(config, clip=None, lag=2).lag == 2


# -- options of rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"exploding-gradient": {"ratio": "20"}}, r"rules\.exploding-gradient\.ratio = '20'; expected a finite number"),
        ({"exploding-gradient": {"ratio": math.nan}}, r"ratio = nan; expected a finite number of at least 0"),
        ({"exploding-gradient": {"ratio": math.inf}}, r"ratio = inf; expected a finite number"),
        ({"exploding-gradient": {"ratio": -3}}, r"ratio = -3; expected a finite number of at least 0"),
        ({"exploding-gradient": {"ratio": True}}, r"ratio = True; expected a finite number"),
        ({"exploding-gradient": {"ratio": None}}, r"ratio = None; expected a finite number"),
        ({"exploding-gradient": {"ratio": [20]}}, r"ratio = \[20\]; expected a finite number"),
        ({"exploding-gradient": {"ratio": 10**400}}, r"ratio = 1000.*; expected a finite number"),
        (
            {"GRAD002": {"min_history": 3.5}},
            r"rules\.GRAD002\.min_history = 3\.5; expected a whole number of at least 0",
        ),
        ({"GRAD002": {"min_history": "3"}}, r"min_history = '3'; expected a whole number"),
        ({"GRAD002": {"min_history": -1}}, r"min_history = -1; expected a whole number of at least 0"),
        ({"GRAD002": {"min_history": False}}, r"min_history = False; expected a whole number"),
        ({"GRAD002": {"severity": "dire"}}, r"rules\.GRAD002\.severity: severity 'dire' is none of warn, error, fatal"),
        ({"GRAD002": {"severity": "eror"}}, r"did you mean 'error'"),
        ({"GRAD002": {"severity": True}}, r"severity True is none of"),
        ({"GRAD002": {"rato": 3}}, r"GRAD002 \(exploding-gradient\) has no setting 'rato'; did you mean 'ratio'"),
        ({"GRAD002": {"code": "X"}}, r"has no setting 'code'"),
        ({"GRAD002": {3: 3}}, r"has no setting '3'"),
        (
            {"exploding-gradien": {"ratio": 3}},
            r"there is no rule 'exploding-gradien'; did you mean 'exploding-gradient'",
        ),
        ({"loss-spike": {"z": "high"}, "GRAD": {}}, r"rules\.loss-spike\.z = 'high'"),
    ],
)
def test_options_of_rules_are_checked_when_they_are_read(rules: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        Config.from_dict({"rules": rules})
    with pytest.raises(ConfigError, match=says):
        Config().with_changes({"rules": rules})
    with pytest.raises(ConfigError, match=says):
        resolve({"rules": rules}, mode="act")
    with pytest.raises(ConfigError):
        select_rules(Config(rules=rules))  # nor does one get past that builds the object itself


def test_options_of_rules_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text('[tool.trimtab.rules.exploding-gradient]\nratio = 20\nmin-history = 5\nseverity = "warn"\n')
    config = Config.from_toml(path)
    rule: Any = next(r for r in select_rules(config) if r.code == "GRAD002")
    assert (rule.ratio, rule.min_history, rule.severity) == (20.0, 5, Severity.WARN)
    assert isinstance(rule.ratio, float)
    for text, says in (
        ("ratio = nan", "ratio = nan; expected a finite number"),
        ("ratio = 1979-05-27", "expected a finite number"),
        ('ratio = "many"', "ratio = 'many'"),
        ("ratoi = 3", "did you mean 'ratio'"),
    ):
        path.write_text(f"[tool.trimtab.rules.exploding-gradient]\n{text}\n")
        with pytest.raises(ConfigError, match=says):
            Config.from_toml(path)


def test_what_is_usual_below_zero_may_be_so() -> None:
    config = Config.from_dict({"rules": {"oscillating-loss": {"turn": -0.9}}})
    rule: Any = next(r for r in select_rules(config) if r.name == "oscillating-loss")
    assert rule.turn == -0.9


def test_every_option_of_every_rule_takes_what_is_usual_and_refuses_what_is_none() -> None:
    for rule in all_rules():
        for option in fields(rule):  # type: ignore[arg-type]
            usual = option.default
            assert Config.from_dict({"rules": {rule.code: {option.name: usual}}}).rules
            for wrong in ("many", math.nan, None, [], {}):
                with pytest.raises(ConfigError, match=rule.code):
                    Config.from_dict({"rules": {rule.code: {option.name: wrong}}})


ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.binary(max_size=4),
        st.just(10**400),
        st.just(-0.0),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=6), st.integers()), inner, max_size=3),
        st.dictionaries(st.sampled_from(["GRAD002", "norm", "ratio", "strategy", "cooldown"]), inner, max_size=2),
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*(f.name for f in fields(Config)), "colour"]), ANYTHING, max_size=3))
@settings(max_examples=400, deadline=None)
def test_whatever_settings_are_given_the_error_is_ours(given_settings: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        select_rules(Config.from_dict(given_settings))


@pytest.mark.parametrize("name", [f.name for f in fields(Config)])
def test_a_number_that_nobody_can_print_is_refused(name: str) -> None:
    huge = 10**5000
    for value in (huge, [huge], {"GRAD002": huge}, {"GRAD002": {"ratio": huge}}):
        with contextlib.suppress(ConfigError):
            Config.from_dict({name: value})


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000, "a = " + "9" * 5000, "a = 9999-99-99", '"\\ud800" = 1', "a = 1\x00"]
)
def test_toml_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError):
        Config.from_toml(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        Config.from_toml(tmp_path / "b.toml")
    with pytest.raises(ConfigError):
        Config.from_toml("a\0b")
