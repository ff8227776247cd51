"""Structured output: the format a text must match, and masks of the tokens it allows next."""
