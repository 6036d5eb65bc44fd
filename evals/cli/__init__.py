"""The commands that evaluations add to the command line, which mounts them by name."""
