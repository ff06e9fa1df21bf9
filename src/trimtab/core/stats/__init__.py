"""What is usual for a series, how unusual a value is, and when a change began. Standard library and numpy only."""
