"""The pull-style faces of the source documents: ask for the health of gradients, activations and losses."""
