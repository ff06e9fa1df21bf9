"""Certified checkpoints: what is captured, how it is stored so that nothing is lost, and which one to go back to."""
