"""Tensors in, one small table out. Nothing here waits for a device except `host.py`, which says so."""
