"""Reads a user's own files for the recipes: rows, pictures and texts; what is wrong is told with file and row."""
