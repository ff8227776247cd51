"""Uses of an engine beyond generation: beam search, embeddings, and perplexity evaluation."""
