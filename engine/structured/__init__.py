"""Structured output: what a text must match, and masks of the tokens with which it still can."""
