"""What activation functions do to a gradient, and what they cost: the table of docs/reference/stable_losses.md.

    python benchmarks/activations.py

One thread; the functions take turns and the fastest of each counts, so that the times are of one run.
"""

from __future__ import annotations

import torch

from trimtab.compat.nn import activation_table, compare_activations

DEPTH, WIDTH, NUM_INPUTS, REPEATS = 20, 128, 256, 200


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, CPU, one thread, seed 0\n")
    rows = compare_activations(depth=DEPTH, width=WIDTH, num_inputs=NUM_INPUTS, repeats=REPEATS)
    print(activation_table(rows))
    print(
        f"\nDead units: share of the {WIDTH} units of layer {DEPTH} whose slope is below 1e-3 for all {NUM_INPUTS} "
        f"inputs. Gradient kept: its norm after layer 1 over that after layer {DEPTH}. The layers are plain (no bias, "
        f"normalisation or residual) with Kaiming's initialisation for ReLU, whatever the function. Time: CPU time of "
        f"forward and backward of 512 x 1024 values, the fastest of {REPEATS}."
    )


if __name__ == "__main__":
    main()
