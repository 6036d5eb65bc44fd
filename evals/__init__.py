"""Evaluations: what the evidence says, in tables."""
