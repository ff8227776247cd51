"""A model without arithmetic, to test the engine and to measure its host time."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.config import ModelConfig, RopeConfig
from engine.device import CPU, Device
from engine.errors import ConfigError
from engine.kernels._override.scope import ModelKernels
from engine.layers.batch import ForwardBatch
from engine.sampling_params import SamplingDefaults

__all__ = ["MockModel"]


class MockModel:
    """A stand-in for `engine.Model` under `LLMEngine`, on the CPU.

    The token after token t at position p is always ``(5 t + 3 p + 1) % vocab_size``.

    Parameters
    ----------
    vocab_size, max_model_len : int
    eos_token_ids : tuple of int
        Ids that end a sequence.

    Examples
    --------
    >>> MockModel(vocab_size=64).continuation([7], 3)
    [36, 56, 31]
    """

    dtype = "float32"
    weight_bytes = 0
    long_rope_offset = 0
    short_rope_len = 0
    has_tokenizer = False
    tokenizer: Any = None
    has_patterns = False
    classifier = None
    pooling = "last"
    num_ranks = 1
    num_stages = 1

    def __init__(
        self,
        vocab_size: int = 64,
        max_model_len: int = 4096,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.device: Device = CPU
        self.kernels = ModelKernels()
        self.max_model_len = max_model_len
        self.deterministic = True
        self.eos_token_ids = eos_token_ids
        self.sampling_defaults = SamplingDefaults()
        self.config = ModelConfig(
            model_type="llama",
            vocab_size=vocab_size,
            hidden_size=2,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            intermediate_size=2,
            max_position_embeddings=max_model_len,
            rope=RopeConfig(rotary_dim=2),
            eos_token_ids=eos_token_ids,
        )

    def stage_sizes(self, options: Any, feature_layers: Any) -> list[Any]:
        """Return an empty list: there is only one stage."""
        return []

    def share_pages(self, kv_cache: Any, swap: Any) -> None:
        """Do nothing: there is only one rank."""

    @property
    def whole_config(self) -> ModelConfig:
        """The model's own: there are no shards and stages."""
        return self.config

    @property
    def local_model(self) -> MockModel:
        """The model itself: there is only one rank."""
        return self

    def share_graphs(self, graphs: Any, max_model_len: int, max_draft_tokens: int) -> None:
        """Do nothing: there is only one rank."""

    def check_ranks(self) -> None:
        """Do nothing: there is only one rank."""

    def describe_ranks(self) -> str:
        """Return "": there is only one rank."""
        return ""

    @property
    def num_adapter_slots(self) -> int:
        """No LoRA adapters."""
        return 0

    @property
    def adapter_kinds(self) -> tuple[str, ...]:
        """No LoRA adapters."""
        return ()

    @property
    def captured_adapter_kinds(self) -> tuple[str, ...]:
        """No LoRA adapters."""
        return ()

    def read_adapter(self, name: str, path: str) -> Any:
        """No LoRA adapters."""
        raise ConfigError(f"adapter {name!r} needs a model loaded with enable_lora=True")

    @property
    def num_adapter_writes(self) -> int:
        """No LoRA adapters."""
        return 0

    def write_adapter(self, adapter: Any, slot: int) -> None:
        """No LoRA adapters."""

    def prepare_pages(self, dtype: str) -> str:
        """Return "": there are neither kernels nor scales."""
        return ""

    def forward(self, batch: ForwardBatch, kv_pages: Any) -> Any:
        """Return logits (R, V) that allow exactly one token."""
        return self.logits(self.hidden_states(batch, kv_pages))

    def hidden_states(self, batch: ForwardBatch, kv_pages: Any) -> Any:
        """Return the id and position (R, 2) of each token whose logits are requested."""
        rows = slice(None) if batch.logits_indices is None else batch.logits_indices
        return np.stack([batch.token_ids[rows], batch.positions[rows]], axis=1)

    def logits(self, hidden: Any) -> Any:
        """Return the logits for a result of `hidden_states`."""
        vocab_size = self.config.vocab_size
        logits = np.full((len(hidden), vocab_size), -1e9, np.float32)
        following = (5 * hidden[:, 0] + 3 * hidden[:, 1] + 1) % vocab_size
        logits[np.arange(len(hidden)), following] = 0.0
        return logits

    expert_runs: tuple[tuple[int, int], ...] = ()

    def expert_load(self) -> dict[int, Any]:
        """Return an empty dict: the model has no experts."""
        return {}

    def continuation(self, prompt: list[int], count: int) -> list[int]:
        """Return the `count` tokens after `prompt`, ignoring end-of-sequence ids."""
        ids = list(prompt)
        for position in range(len(ids) - 1, len(ids) - 1 + count):
            ids.append((5 * ids[position] + 3 * position + 1) % self.config.vocab_size)
        return ids[len(prompt) :]

    def close(self) -> None:
        """Do nothing."""
