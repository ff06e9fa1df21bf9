"""DATA006: a label or a token is out of range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from torch import nn

from trimtab.doctor.batch_tensors import holds, leaves
from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.loader_scan import Leaf
from trimtab.doctor.observed_step import is_lost
from trimtab.doctor.probe import Probe


class LabelRange:
    """A label or a token is out of range.

    ## What it means
    The loss or the embedding has no place for it: an exception on the CPU, an assertion deep in a kernel on a GPU, and
    with some losses only a silently wrong number.

    ## How it is checked
    The number of classes is read from the loss itself, that of tokens from the embedding; every batch is compared with
    it. Probabilities for a binary cross-entropy must lie between 0 and 1.

    ## What to try
    1. Labels begin at 0: subtract 1 where they begin at 1.
    2. Give the last layer as many outputs as there are classes, and the embedding as many rows as there are tokens.
    3. Mark what is to be left out by `ignore_index` (-100), not by -1.
    """

    code: ClassVar[str] = "DATA006"
    name: ClassVar[str] = "label-range"
    title: ClassVar[str] = "labels and tokens are in range"
    causes: ClassVar[tuple[str, ...]] = ("step-exception", "nonfinite-loss", "not-learning", "initial-loss")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report what has no place."""
        failure = probe.failure
        facts = probe.facts
        found = list(self._outside(probe))
        if found:
            yield from found
        elif failure is not None and is_lost(failure.text):
            yield from self.after_assertion(probe)
        elif failure is not None and probe.failed_as == self.name:
            yield failed(
                self,
                f"a label or token is out of range: {failure.text[:160]}",
                f"at {failure.where}{f', in {failure.module}' if failure.module else ''}",
                "assert 0 <= y.min() and y.max() < num_classes",
                ("targets",),
            )
        elif facts.num_classes is not None:
            yield passed(self, f"{facts.num_classes} classes, {probe.scan.num_seen}")
        else:
            yield not_applicable(self, "the loss does not say how many classes there are")

    def after_assertion(self, probe: Probe) -> Iterator[Line]:
        """Report what is known after an assertion in a GPU kernel."""
        found = out_of_range(probe.model, probe.scan.leaves)
        whole = [
            f"tensor {path} of the batch goes from {leaf.low:.0f} to {leaf.high:.0f}"
            for path, leaf in probe.scan.leaves.items()
            if leaf.label_like
        ]
        yield failed(
            self,
            "an assertion in a kernel of the GPU failed: nearly always a label or a token out of range.",
            "; ".join([evidence for _, evidence in found] or whole or ["no whole numbers in the batch"]),
            "assert 0 <= y.min() and y.max() < num_classes",
            tuple(path for path, _ in found) or ("targets",),
        )

    def _outside(self, probe: Probe) -> Iterator[Line]:
        facts, scan = probe.facts, probe.scan
        for path in probe.roles.targets if scan.batches and probe.roles.sure else ():
            leaf = scan.leaves[path]
            most = facts.num_classes
            if most is not None and leaf.label_like and leaf.counts:
                bad = {v: n for v, n in leaf.counts.items() if not 0 <= v < most and v != facts.ignore_index}
                if bad:
                    yield failed(
                        self,
                        f"{sum(bad.values())} labels lie outside 0 to {most - 1}, the {most} classes of the loss.",
                        f"found {', '.join(map(str, sorted(bad)[:5]))} in tensor {path} of {scan.num_seen}",
                        f"nn.Linear(..., {max(leaf.counts) + 1})"
                        if min(bad) > 0 and 0 in leaf.counts
                        else "y = y - y.min()",
                        (path,),
                        num=float(sum(bad.values())),
                    )
            elif facts.kind.startswith("bce") and leaf.is_float and (leaf.low < -1e-6 or leaf.high > 1 + 1e-6):
                yield failed(
                    self,
                    "targets of a binary cross-entropy lie outside 0 to 1.",
                    f"from {leaf.low:.4g} to {leaf.high:.4g} in tensor {path} of {scan.num_seen}",
                    "y = (y > 0).float()",
                    (path,),
                    low=leaf.low,
                    high=leaf.high,
                )
        for path, size, name in _token_tables(probe):
            leaf = scan.leaves[path]
            if leaf.label_like and leaf.counts and not (leaf.low >= 0 and leaf.high < size):
                yield failed(
                    self,
                    f"tokens lie outside 0 to {size - 1}, the rows of {name}.",
                    f"from {leaf.low:.0f} to {leaf.high:.0f} in tensor {path} of {scan.num_seen}",
                    f"nn.Embedding({max(int(leaf.high) + 1, size)}, ...)",
                    (path, name),
                )


def _token_tables(probe: Probe) -> list[tuple[str, int, str]]:
    """Tensors of the batch that an embedding looks up: path, number of rows, name."""
    if not probe.scan.batches:
        return []
    found = []
    for path, tensor in leaves(probe.batch(0)):
        for module, given in probe.calls[0].lookups if probe.calls else ():
            if holds(tensor, given):
                found.append((path, module.num_embeddings, probe.module_names.get(id(module), "an embedding")))
    return found


def out_of_range(model: nn.Module, leaves: Mapping[str, Leaf]) -> list[tuple[str, str]]:
    """Tensors of a batch with numbers that no table and no layer of the model has a place for, and why.

    A kernel's assertion does not say what it was about, and nothing on the device can be read after it: this uses what
    the scan of the loader noted before.
    """
    tables = [(n, m.num_embeddings) for n, m in model.named_modules() if isinstance(m, nn.Embedding)]
    widths = [(n, m.out_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    places = tables + widths[-1:]
    found = []
    for path, leaf in leaves.items():
        if not (leaf.label_like and leaf.counts):
            continue
        low, high = min(v for v in leaf.counts if v != -100) if set(leaf.counts) - {-100} else 0, max(leaf.counts)
        evidence = f"tensor {path} of the batch goes from {low} to {high}"
        if low < 0:
            found.append((path, evidence))
        elif places and all(high >= size for _, size in places):
            name, size = max(places, key=lambda one: one[1])
            found.append((path, f"{evidence}, and {name} has {size} places"))
    return found
