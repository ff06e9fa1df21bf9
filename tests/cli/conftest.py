from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from trimtab.cli.app import main


class Said(NamedTuple):
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout, strictly parsed."""

        def refuse(text: str) -> None:
            raise AssertionError(f"{text} is not JSON")

        data: dict[str, Any] = json.loads(self.out, parse_constant=refuse)
        assert data["schema_version"] == 1
        return data


Trimtab = Callable[..., Said]


@pytest.fixture
def trimtab(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Trimtab:
    """Runs a command in this process, as if it was typed."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def call(*argv: str) -> Said:
        with pytest.raises(SystemExit) as end:
            main([str(a) for a in argv])
        out, err = capsys.readouterr()
        code = end.value.code
        assert isinstance(code, int | None)
        return Said(code or 0, out, err)

    return call


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a short real run in which one loss was NaN."""
    import torch

    from trimtab import Guard

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x = torch.randn(16, 4)
        runs = tmp_path_factory.mktemp("cli") / "runs"
        with Guard(model, optimizer, {"dir": str(runs)}, clip=1.0, mode="act") as guard:
            for step in range(60):
                batch = x * math.nan if step == 30 else x
                loss = (model(batch) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
                guard.step(loss)
                optimizer.zero_grad()
        return Path(guard.run_dir)
