"""Kernels compiled ahead, in a repository that needs no compiler."""
