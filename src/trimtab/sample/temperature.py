"""The learnable temperature of a softmax, found by its name, as the factor it multiplies logits with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from trimtab.sample.host import number

EVERY = 5
_WORDS = ("logit_scale", "temperature", "temp", "tau", "inv_temp", "log_scale")


class TemperatureProbe:
    """Reads single-number parameters with telling names, on the host only."""

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self._found = [
            (name, p, _is_log(name, number(p.detach().reshape(()))), _is_inverse(name))
            for name, p in zip(names, params, strict=True)
            if p.numel() == 1 and p.is_cpu and p.is_floating_point()
            if any(word in name.rpartition(".")[2].lower() for word in _WORDS)
        ]

    def look(self, step: int) -> tuple[dict[str, float], dict[str, tuple[str, ...]]]:
        """The factor farthest from 1, now and then."""
        if not self._found or step % EVERY:
            return {}, {}
        factors = []
        for name, p, is_log, is_inverse in self._found:
            value = number(p.detach().reshape(()))
            if not math.isfinite(value):
                continue
            factor = math.exp(max(min(value, 60.0), -60.0)) if is_log else abs(value)
            factors.append((1.0 / max(factor, 1e-30) if is_inverse else factor, name))
        if not factors:
            return {}, {}
        factor, name = max(factors, key=lambda f: abs(math.log(max(f[0], 1e-30))))
        return {"temperature": factor}, {"temperature": (name,)}


def _is_log(name: str, value: float) -> bool:
    """CLIP keeps the logarithm, 2.66 at first, under the name logit_scale; others begin at 1, or far above 5."""
    last = name.rpartition(".")[2].lower()
    return last.startswith("log_") or ("logit_scale" in last and 2.0 <= value <= 5.0)


def _is_inverse(name: str) -> bool:
    last = name.rpartition(".")[2].lower()
    return ("temp" in last or "tau" in last) and "inv" not in last
