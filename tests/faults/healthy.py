"""Training that is healthy and looks sick: every finding on one of these cases is a false alarm."""

from __future__ import annotations

from tests.faults import (
    healthy_alone,
    healthy_data,
    healthy_networks,
    healthy_players,
    healthy_schedule,
    healthy_structure,
)
from tests.faults.base import Case
from tests.faults.healthy_tools import CASES

PARTS = (healthy_schedule, healthy_data, healthy_structure, healthy_players, healthy_alone, healthy_networks)
HEALTHY: dict[str, Case] = dict(sorted(CASES.items()))
