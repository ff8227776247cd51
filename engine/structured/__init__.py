"""Structured output: masks of the tokens with which a text can still match a schema or grammar.

llguidance (extra ``grammar``) does the work; it is imported when the first request needs it.
"""

from engine.structured.grammar import (
    Grammar,
    GrammarCompiler,
    GrammarState,
    check_structured,
)

__all__ = ["Grammar", "GrammarCompiler", "GrammarState", "check_structured"]
