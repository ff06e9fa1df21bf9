"""Provenance: which operation, line, module and sample a bad value came from."""
