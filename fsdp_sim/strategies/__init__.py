"""Hypothesis strategies, one subject a file."""
