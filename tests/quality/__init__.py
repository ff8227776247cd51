"""Quality of quantized models: `python -m tests.quality`, see docs/quantization.md."""
