"""Activations, gradient checkpointing and stabilisers; imports nothing else of trimtab."""
