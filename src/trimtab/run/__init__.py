"""Guarding a script that knows nothing of trimtab: find its models, optimizers, losses and clipping from outside."""
