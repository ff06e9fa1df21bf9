"""All the ways in which the sound trainings are broken."""

from __future__ import annotations

from tests.doctor import mutations_data, mutations_graph, mutations_loop, mutations_loss, mutations_optimizer
from tests.doctor.bench import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *mutations_graph.MUTATIONS,
    *mutations_loss.MUTATIONS,
    *mutations_optimizer.MUTATIONS,
    *mutations_loop.MUTATIONS,
    *mutations_data.MUTATIONS,
)

MISSED: dict[str, str] = {}
"""What doctor is known not to name, and why."""
