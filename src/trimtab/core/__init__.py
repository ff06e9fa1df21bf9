"""The pure centre: records, history, decisions and settings. Standard library and numpy only."""
