"""WIRE013: clipping has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class ClipOrder:
    """Clipping has no effect.

    ## What it means
    `clip_grad_norm_` before `backward()`, or after `optimizer.step()`, clips gradients that no step uses.

    ## How it is checked
    What comes after each clipping: the step must, before the gradients change or are cleared.

    ## What to try
    1. The order is backward, (unscale,) clip, step, zero_grad.
    """

    code: ClassVar[str] = "WIRE013"
    name: ClassVar[str] = "clip-order"
    title: ClassVar[str] = "what is clipped is what is stepped on"
    causes: ClassVar[tuple[str, ...]] = ()

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report clipping that no step uses."""
        order = [e for c in probe.calls for e in c.events if e.kind in ("clip", "backward", "step", "scaler-step")]
        clips = [i for i, e in enumerate(order) if e.kind == "clip"]
        if not clips or not probe.num_steps:
            yield not_applicable(self, "nothing is clipped")
            return
        used = 0
        for i in clips:
            after = next((e for e in order[i + 1 :] if e.kind != "clip"), None)
            used += bool(order[i].facts["num"]) and after is not None and after.kind != "backward"
        if used:
            yield passed(self, f"{used} of {len(clips)} times a step came next")
            return
        limit = order[clips[0]].facts["max_norm"]
        why = (
            "it finds no gradients" if not any(order[i].facts["num"] for i in clips) else "no step uses what it clipped"
        )
        yield failed(
            self,
            f"gradients are clipped at the wrong place: {why}.",
            f"{len(clips)} calls of clip_grad_norm_, {len(probe.events('step'))} steps; none directly after a clip",
            f"loss.backward(); clip_grad_norm_(model.parameters(), {limit:g}); optimizer.step()",
            ("clip_grad_norm_",),
        )
