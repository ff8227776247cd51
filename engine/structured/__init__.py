"""Constrained output: what the text of a request must match, and masks of the tokens it allows."""
