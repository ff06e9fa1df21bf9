"""What exists because a source document names it: thin faces over the mechanisms, under the documented names."""
