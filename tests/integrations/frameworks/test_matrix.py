"""Framework x precision x accumulation x clipping, guarded by the callback and by `trimtab run`.

The whole matrix: `pytest -m "" tests/integrations/frameworks/test_matrix.py`.
"""

from __future__ import annotations

import pytest

from tests.integrations.frameworks.harness import (
    FRAMEWORKS,
    Case,
    Drive,
    check_healthy,
    check_one_nan_sample,
    matrix,
    under_run,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def drive_of(name: str, way: str) -> Drive:
    drive = FRAMEWORKS[name].drive
    return drive if way == "callback" else under_run(drive)


@pytest.mark.parametrize(("name", "way", "case"), matrix())
def test_a_healthy_training(name: str, way: str, case: Case) -> None:
    tells = FRAMEWORKS[name].tells_total and (case.accumulate == 1 or not name.startswith("fastai"))
    check_healthy(drive_of(name, way), case, knows_total=tells and way == "callback")


@pytest.mark.parametrize(("name", "way", "case"), matrix())
def test_one_nan_sample(name: str, way: str, case: Case) -> None:
    check_one_nan_sample(drive_of(name, way), Case(**{**vars(case), "nan": True}))
