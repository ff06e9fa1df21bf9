"""Small things that PyTorch does not offer, each once."""
