"""Accepted kernels under the names of other frameworks; docs/doors.md.

Each module is for one framework, and is imported where that one is installed.
"""
