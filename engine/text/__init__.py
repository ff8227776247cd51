"""Text and tokens: tokenizers, chat templates, stop strings, and incremental detokenization."""
