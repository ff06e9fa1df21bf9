"""The command line: one file per command. Nothing here imports torch or numpy until a command needs it."""
