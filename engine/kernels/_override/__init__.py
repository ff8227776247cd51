"""Overrides: a user's function in place of an op of the catalog. See `engine.kernels.override`."""
