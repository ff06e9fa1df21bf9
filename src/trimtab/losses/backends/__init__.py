"""The ways to reduce all negatives of a problem, one per file; `problem.py` is their contract."""
