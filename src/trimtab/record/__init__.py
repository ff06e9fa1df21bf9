"""The record of a run: append-only files, their reader, and the sinks that forward records elsewhere."""
