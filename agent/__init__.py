"""The agent room: command line, authors, judge, event log, acceptance."""
