"""What to do about a finding: recommendations as typed data, conditions on the facts of the run, one engine. Pure."""
