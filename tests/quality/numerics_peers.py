"""The peers of `tests.quality.numerics`: transformers, and log-probabilities that vLLM wrote."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from engine.device import Device

__all__ = ["Transformers", "find_transformers", "read_vllm"]

Array = np.ndarray[Any, Any]


def find_transformers() -> str:
    """Return the version of transformers; "" if it or torch is not installed."""
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError:
        return ""
    return str(transformers.__version__)


class Transformers:
    """A model of transformers with its defaults, SDPA attention among them.

    Parameters
    ----------
    folder : Path
    dtype : str
        "float64", "float32" or "bfloat16".
    device : Device
    """

    def __init__(self, folder: Path, dtype: str, device: Device) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._torch = torch
        self._place = f"cuda:{device.index}" if device.is_cuda else "cpu"
        # The default, a grouped product, has no float64.
        experts = {"experts_implementation": "eager"} if dtype == "float64" else {}
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), **experts
        )
        self._model: Any = model.to(self._place).eval()

    def __enter__(self) -> Transformers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del self._model
        if self._place != "cpu":
            self._torch.cuda.empty_cache()

    def prompts(self, token_ids: Array, *, wide_logits: bool = False) -> Array:
        """Return the logits (S, L, V) of sequences (S, L), computed at once.

        With `wide_logits`, the output layer is computed in float32 and its result is not rounded.
        """
        given = self._tensor(token_ids)
        with self._torch.inference_mode():
            if not wide_logits:
                return self._array(self._model(given, use_cache=False).logits)
            hidden = self._model.get_decoder()(given, use_cache=False).last_hidden_state
            head = self._model.get_output_embeddings().weight
            return self._array(hidden.float() @ head.float().T)

    def decoded(self, token_ids: Array, first: int) -> Array:
        """Return the logits (S, L - first, V) of the tokens from `first` on, one a step."""
        with self._torch.inference_mode():
            cache = self._model(self._tensor(token_ids[:, :first]), use_cache=True).past_key_values
            steps = []
            for token in range(first, token_ids.shape[1]):
                given = self._tensor(token_ids[:, token : token + 1])
                out = self._model(given, past_key_values=cache, use_cache=True)
                steps.append(self._array(out.logits[:, -1]))
        return np.stack(steps, axis=1)

    def _tensor(self, token_ids: Array) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(token_ids)).to(self._place)

    def _array(self, logits: Any) -> Array:
        wide = logits if logits.dtype == self._torch.float64 else logits.float()
        array: Array = wide.cpu().numpy()
        return array


def read_vllm(file: Path, token_ids: Array) -> Array:
    """Return the log-probabilities (S, L, V) that `tests.quality.vllm_logprobs` wrote.

    Raises
    ------
    ValueError
        If they belong to other tokens.
    """
    with np.load(file) as arrays:
        given, logprobs = arrays["token_ids"], arrays["logprobs"]
    if not np.array_equal(given, token_ids):
        raise ValueError(
            f"{file} must have the token ids of this run, {token_ids.shape} beginning with "
            f"{token_ids[0, :4].tolist()}; got {given.shape}, {given[0, :4].tolist()}"
        )
    if logprobs.shape[:2] != token_ids.shape:
        raise ValueError(
            f"{file}: logprobs must be {token_ids.shape} x vocabulary; got {logprobs.shape}"
        )
    array: Array = logprobs
    return array
