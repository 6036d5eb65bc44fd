"""Accepted kernels under the names by which other frameworks look for them; docs/doors.md. Each
module is for one framework, and is imported where that one is installed."""
