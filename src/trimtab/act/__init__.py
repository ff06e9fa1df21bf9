"""Everything that changes something: the reflexes inside the step, and one remedy per file."""
