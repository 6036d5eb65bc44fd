"""The commands that evaluations add to the command line."""
