"""WIRE001: parts of the training are on different devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from trimtab.core.window import listed
from trimtab.doctor.checklist import Line, failed, passed
from trimtab.doctor.probe import Probe


class DevicePlacement:
    """Parts of the training are on different devices.

    ## What it means
    Parameters left behind on another device, or on `meta` where there are no values at all, an optimizer whose moments
    are elsewhere, or a batch that was not moved.

    ## How it is checked
    The device of every parameter, buffer and optimizer state; PyTorch's own error about devices is translated.

    ## What to try
    1. Move the model first, build the optimizer then: `model.to(device)` before `torch.optim...`.
    2. Parameters on `meta` need values: `model.to_empty(device=...)` and then load or initialise them.
    3. Move every batch: `batch = batch.to(device, non_blocking=True)`.
    """

    code: ClassVar[str] = "WIRE001"
    name: ClassVar[str] = "device-placement"
    title: ClassVar[str] = "model, optimizer and batch are on one device"
    causes: ClassVar[tuple[str, ...]] = ("*",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report what is elsewhere."""
        named = [*probe.model.named_parameters(), *probe.model.named_buffers()]
        meta = tuple(n for n, t in named if t.is_meta)
        kinds = sorted({t.device.type for _, t in named})
        states = tuple(
            f"{key} of {probe.names.get(id(p), 'a parameter')}"
            for o in probe.optimizers
            for p, own in o.state.items()
            if isinstance(own, dict)
            for key, value in own.items()
            if isinstance(value, Tensor) and value.dim() and isinstance(p, Tensor) and value.device != p.device
        )
        if meta:
            yield failed(
                self,
                f"{len(meta)} parameters or buffers are on the meta device: they have no values.",
                listed(meta),
                "model.to_empty(device=device)  # then load or initialise the weights",
                meta[:8],
            )
        elif len(kinds) > 1:
            odd = tuple(n for n, t in named if t.device.type != probe.device.type)
            yield failed(
                self,
                f"the model is spread over {' and '.join(kinds)}.",
                f"not on {probe.device.type}: {listed(odd)}",
                "model.to(device)  # and register tensors by register_buffer, so that they move along",
                odd[:8],
            )
        elif states:
            yield failed(
                self,
                "the optimizer's state is on another device than its parameters.",
                listed(states),
                "optimizer = torch.optim.AdamW(model.to(device).parameters())  # after moving the model",
                states[:8],
            )
        elif probe.failed_as == self.name and probe.failure is not None:
            yield failed(
                self,
                f"a step met tensors on different devices: {probe.failure.text[:160]}",
                f"at {probe.failure.where}",
                "batch = batch.to(next(model.parameters()).device)",
                (probe.failure.module,),
            )
        else:
            where = sorted({str(leaf.device) for leaf in probe.scan.leaves.values()})
            yield passed(self, f"model and optimizer on {probe.device}, batches on {', '.join(where) or 'none'}")
