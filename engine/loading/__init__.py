"""Checkpoint loading: configuration, safetensors and GGUF files, and the engine's weights."""
