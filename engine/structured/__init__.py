"""Structured output: masks of the tokens with which a text can still match a schema or grammar.

Imported when the first request needs it; llguidance (extra ``grammar``) does the work.
"""

from engine.structured.grammar import (
    Grammar,
    GrammarCompiler,
    GrammarState,
    check_structured,
)

__all__ = ["Grammar", "GrammarCompiler", "GrammarState", "check_structured"]
