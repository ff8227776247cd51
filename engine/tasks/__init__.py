"""Uses of an engine beyond generation: beam search, embeddings, and evaluation of a text."""
