"""All the ways in which the sound trainings are broken."""

from __future__ import annotations

from tests.doctor import (
    mutations_data,
    mutations_graph,
    mutations_loop,
    mutations_loss,
    mutations_optimizer,
    mutations_setup,
    mutations_unseen,
)
from tests.doctor.bench import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *mutations_graph.MUTATIONS,
    *mutations_loss.MUTATIONS,
    *mutations_optimizer.MUTATIONS,
    *mutations_loop.MUTATIONS,
    *mutations_data.MUTATIONS,
    *mutations_setup.MUTATIONS,
    *mutations_unseen.MUTATIONS,
)

MISSED: dict[str, str] = {
    "pairs-shuffled": "nothing is compared where a batch has no target, only pairs",
    "visible-asked-for": "which positions are asked for is drawn inside the step",
    "likelihood-not-negated": "a log-likelihood of one's own has no sign that could be known",
    "multiplied-not-added": "the layers that never leave zero are named, not the product that keeps them there",
}
"""What doctor is known not to name, and why."""
