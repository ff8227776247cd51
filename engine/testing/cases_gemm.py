"""Problem sizes for GEMM tests and benchmarks."""

from __future__ import annotations

__all__ = ["MODEL_LAYERS", "PRODUCTS", "Product"]

Product = tuple[int, int, int]  # (m, n, k): rows of x, rows of the weight, terms per sum

# One row, few rows, more than a tile; sizes not divisible by a tile, vector or instruction; m, n or
# k of 0; layers of real models.
PRODUCTS: tuple[Product, ...] = (
    (1, 1, 1),
    (1, 8, 64),
    (1, 49152, 576),
    (2, 100, 40),
    (3, 5, 7),
    (7, 576, 1536),
    (8, 33, 72),
    (9, 1024, 2048),
    (16, 960, 576),
    (17, 130, 1000),
    (31, 4096, 1024),
    (33, 65, 257),
    (64, 3072, 576),
    (65, 129, 264),
    (100, 1024, 3072),
    (129, 257, 136),
    (256, 1536, 576),
    (300, 70, 8),
    (0, 16, 8),
    (4, 0, 8),
    (5, 24, 0),
)

# (model, layer) -> (n, k) of the linear layer.
MODEL_LAYERS: dict[tuple[str, str], tuple[int, int]] = {
    ("SmolLM2-135M", "qkv"): (960, 576),
    ("SmolLM2-135M", "o"): (576, 576),
    ("SmolLM2-135M", "gate_up"): (3072, 576),
    ("SmolLM2-135M", "down"): (576, 1536),
    ("SmolLM2-135M", "lm_head"): (49152, 576),
    ("Qwen3-0.6B", "qkv"): (4096, 1024),
    ("Qwen3-0.6B", "o"): (1024, 2048),
    ("Qwen3-0.6B", "gate_up"): (6144, 1024),
    ("Qwen3-0.6B", "down"): (1024, 3072),
    ("Qwen3-0.6B", "lm_head"): (151936, 1024),
    ("Llama-3.2-1B", "qkv"): (3072, 2048),
    ("Llama-3.2-1B", "o"): (2048, 2048),
    ("Llama-3.2-1B", "gate_up"): (16384, 2048),
    ("Llama-3.2-1B", "down"): (2048, 8192),
    ("Llama-3.2-1B", "lm_head"): (128256, 2048),
    ("Llama-3.1-8B", "qkv"): (6144, 4096),
    ("Llama-3.1-8B", "o"): (4096, 4096),
    ("Llama-3.1-8B", "gate_up"): (28672, 4096),
    ("Llama-3.1-8B", "down"): (4096, 14336),
    ("Llama-3.1-8B", "lm_head"): (128256, 4096),
}
