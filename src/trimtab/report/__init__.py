"""What a record says, for people and machines. Pure: no torch."""
