"""OPT006: several losses are added up for one step without being divided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe
from trimtab.doctor.recording import Event


class AccumulationNotDivided:
    """Several losses are added up for one step without being divided.

    ## What it means
    The gradient is n times that of the mean: the true learning rate grows with the number of micro-batches, and
    clipping cuts n times as hard.

    ## How it is checked
    The factor that each mean loss enters its backward pass with is read from autograd itself. Several losses of one
    forward pass, and those of two adversarial models, are meant to be added.

    ## What to try
    1. `(loss / num_micro_batches).backward()`.
    """

    code: ClassVar[str] = "OPT006"
    name: ClassVar[str] = "accumulation-not-divided"
    title: ClassVar[str] = "accumulated losses are divided"
    causes: ClassVar[tuple[str, ...]] = ("learning-rate", "not-learning")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report sums that should be means."""
        if twice := _same_loss_twice(probe):
            yield failed(
                self,
                "backward() runs twice on the same loss: its gradient is counted twice.",
                f"in {twice} of {len(probe.events('step'))} steps",
                "loss.backward()  # once",
                ("loss",),
            )
            return
        rounds = self._rounds(probe)
        if not rounds:
            yield not_applicable(self, probe.no_steps or "each step has one backward pass")
            return
        whole = [r for r in rounds if all(0.9 < abs(f) < 1.1 for f in r)]
        num = max(map(len, rounds))
        if whole and len(whole) == len(rounds):
            yield failed(
                self,
                f"{num} losses are added up for one step, each undivided.",
                f"factors {', '.join(f'{f:.3g}' for f in whole[0][:4])} in {len(rounds)} steps: it is {num} times"
                " that of their mean",
                f"(loss / {num}).backward()",
                ("loss",),
                num=float(num),
            )
        else:
            yield passed(self, f"{num} passes a step, factors {', '.join(f'{f:.3g}' for f in rounds[0][:4])}")

    @staticmethod
    def _rounds(probe: Probe) -> list[list[float]]:
        """For every step on several passes, each with a forward pass of its own: their factors, where all are known."""
        if len(probe.optimizers) != 1 or probe.doctor_steps:
            return []
        passes = probe.watch.pending.backwards
        order = [e for c in probe.calls for e in c.events]
        rounds: list[list[float]] = []
        for step in (e for e in order if e.kind == "step" and not e.facts["closure"]):
            made_of = [passes[n] for n in step.facts["made_of"]]
            known = [e.facts["factors"][0] / e.facts["scale"] for e in made_of if e.facts.get("factors")]
            kinds = {(e.facts.get("kind"), e.facts.get("reduction")) for e in made_of}
            means = len(kinds) == 1 and all(k and r == "mean" for k, r in kinds)
            if len(made_of) > 1 and means and len(known) == len(made_of) and _each_forward(order, made_of):
                rounds.append(known)
        return rounds


def _each_forward(order: list[Event], passes: list[Event]) -> bool:
    """Whether a forward pass came before each of these backward passes."""
    fresh = 0
    for event in order:
        if event.kind == "forward" and event.facts["grad"]:
            fresh += 1
        elif any(event is one for one in passes):
            if not fresh:
                return False
            fresh = 0
    return True


def _same_loss_twice(probe: Probe) -> int:
    passes = probe.watch.pending.backwards
    num = 0
    for step in probe.events("step"):
        roots = [passes[n].facts.get("root") for n in step.facts["made_of"]]
        known = [r for r in roots if r is not None]
        num += len(known) > len({id(r) for r in known})
    return num
