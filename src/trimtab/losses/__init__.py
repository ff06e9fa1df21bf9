"""N-way contrastive losses; imports nothing else of trimtab."""
