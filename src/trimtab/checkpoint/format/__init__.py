"""A checkpoint as files: its manifest, tensors and trees, read and written so that a crash harms nothing."""
