"""Which way to the L2 norms of all gradients is fastest on the CPU: foreach, a compiled loop, numpy, or numba.

    python benchmarks/cpu_norms.py      (numba is tried if installed)

Decides what `sample/measure/reference.py` uses in every step. One thread; the ways take turns; medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

CASES = {
    "6 tensors, 9 k values": [(64, 64), (64,), (64, 64), (64,), (10, 64), (10,)],
    "53 tensors, 0.5 M values": [(96, 96)] * 51 + [(128, 96)] * 2,
    "144 tensors, 9.4 M values": [(256, 256)] * 144,
}


def foreach(grads: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(grads))


def each(grads: list[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(g) for g in grads])


def with_numpy(grads: list[Tensor]) -> np.ndarray:
    flat = [g.numpy().reshape(-1) for g in grads]
    return np.sqrt(np.array([np.dot(f, f) for f in flat]))


def ways() -> dict[str, Callable[[list[Tensor]], object]]:
    found: dict[str, Callable[[list[Tensor]], object]] = {
        "torch._foreach_norm": foreach,
        "vector_norm one by one": each,
        "numpy dot": with_numpy,
        "torch.compile (C++)": torch.compile(each, dynamic=False),
    }
    if find_spec("numba") is not None:
        import numba

        @numba.njit(fastmath=True)
        def squares(x):  # type: ignore[no-untyped-def]
            total = 0.0
            for i in range(x.size):
                total += x[i] * x[i]
            return total

        found["numba"] = lambda grads: [squares(g.numpy().reshape(-1)) ** 0.5 for g in grads]
    return found


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread; microseconds per call\n")
    names = list(ways())
    print("| gradients | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for case, shapes in CASES.items():
        grads = [torch.randn(s) for s in shapes]
        times: dict[str, list[float]] = {name: [] for name in names}
        functions = ways()
        for function in functions.values():
            function(grads)  # compile
        for _ in range(40):
            for name, function in functions.items():
                start = time.perf_counter()
                for _ in range(5):
                    function(grads)
                times[name].append((time.perf_counter() - start) / 5 * 1e6)
        print(f"| {case} | " + " | ".join(f"{statistics.median(times[n]):.0f}" for n in names) + " |")


if __name__ == "__main__":
    main()
