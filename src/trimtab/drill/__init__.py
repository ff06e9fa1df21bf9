"""The guard put to the test on a user's own training: known faults go in, and what it says is counted."""
