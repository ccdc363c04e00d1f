"""A fully-sharded data-parallel runtime for PyTorch."""
