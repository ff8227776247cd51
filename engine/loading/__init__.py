"""Checkpoints: configurations, safetensors and GGUF files, and the weights made from them."""
