from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.config import Clip, Config, discover, resolve
from trimtab.core.errors import ConfigError


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
