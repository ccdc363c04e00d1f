"""Invariants, one a file."""
