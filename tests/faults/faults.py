"""All faults by name: what goes wrong in real training, made on purpose."""

from __future__ import annotations

from tests.faults.base import Case
from tests.faults.faults_data import DATA
from tests.faults.faults_dynamics import DYNAMICS
from tests.faults.faults_numerics import NUMERICS
from tests.faults.faults_wiring import WIRING

FAULTS: dict[str, Case] = {**NUMERICS, **DYNAMICS, **WIRING, **DATA}
assert len(FAULTS) == sum(map(len, (NUMERICS, DYNAMICS, WIRING, DATA)))
