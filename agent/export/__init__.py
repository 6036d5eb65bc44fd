"""Kernels that travel: compiled ahead, in a repository that needs neither this package nor a
compiler where it is loaded."""
