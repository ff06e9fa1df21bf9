"""Tensors in, one small table out. Nothing here waits for a device except `transfer.py`, which says so."""
