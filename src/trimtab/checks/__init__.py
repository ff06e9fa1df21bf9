"""Preflight: what `trimtab doctor` looks at before the first epoch, one trouble per file."""
