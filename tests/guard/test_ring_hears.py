"""What the ring is told: every verdict, not only that an update was rejected."""

from __future__ import annotations

from tests.guard.test_rewind import data, make
from trimtab import Guard
from trimtab.core.types import Severity


def test_no_copy_is_taken_while_errors_last() -> None:
    model, optimizer = make()
    guard = Guard.attach(model, optimizer, {"policy": {"budget": 0}}, mode="act", run_dir=False)
    lane = guard._lanes[""]
    grave: set[int] = set()
    for step in range(140):
        x, y = data(step)
        if 62 <= step < 90:
            y = y * 20  # the loss is another one, every gradient is finite: nothing is rejected
        loss = (model(x) - y).square().mean()
        loss.backward()
        guard.observe(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if guard.verdict is not None and any(f.severity >= Severity.ERROR for f in guard.verdict.findings):
            grave.add(step)
    assert lane.rollback is not None
    kept = [state.steps[""] for state in lane.rollback.memory._kept]
    guard.close()
    assert guard.rejected == 0
    assert grave
    assert [s for s in kept if s < min(grave)]  # there were copies before it
    assert not [s for s in kept if any(0 <= s - bad < 10 for bad in grave)]
