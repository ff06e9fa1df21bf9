import pytest

from trimtab.cli._shell import Options, normalise

OPTIONS = Options(flags={"--json", "--dry-run", "-q"}, valued={"--select", "--max-steps"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["report", "--json"], ["report", "--json"]),
        (["report", "--json", "true"], ["report", "--json"]),
        (["report", "--json", "YES", "x"], ["report", "--json", "x"]),
        (["report", "--json=1"], ["report", "--json"]),
        (["report", "--json", "false"], ["report"]),
        (["report", "--json=no", "x"], ["report", "x"]),
        (["report", "-q", "0"], ["report"]),
        (["report", "--json", "runs/x"], ["report", "--json", "runs/x"]),
        (["x", "--dry_run", "--max_steps", "5"], ["x", "--dry-run", "--max-steps", "5"]),
        (["x", "--max_steps=a_b"], ["x", "--max-steps=a_b"]),
        (["x", "--select", "--json"], ["x", "--select", "--json"]),
        (["x", "--select", "true"], ["x", "--select", "true"]),
        (["x", "--json=maybe"], ["x", "--json=maybe"]),
        (["x", "--un_known", "a_b"], ["x", "--un-known", "a_b"]),
        (["x", "--json", "true", "--", "--json", "false", "--a_b"], ["x", "--json", "--", "--json", "false", "--a_b"]),
        (["-"], ["-"]),
        ([], []),
    ],
)
def test_normalise(given, expected):
    assert normalise(given, OPTIONS) == expected
