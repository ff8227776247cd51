"""`LoRARequest`: names the LoRA adapter of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.checks import shown_with_type
from engine.errors import RequestError

__all__ = ["LoRARequest"]

_MAX_NAME_CHARS = 256


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter, for the `lora_request` of `LLM.generate` and others.

    Parameters
    ----------
    lora_name : str
        The adapter's name. An engine reads the files of a name once.
    lora_int_id : int
        Accepted for vLLM's sake; the name identifies the adapter.
    lora_path : str
        Folder with adapter_config.json and adapter_model.safetensors, as peft saves them. May be
        left out for an adapter that the engine holds already.

    Raises
    ------
    RequestError
        If an argument has the wrong type, or the name is empty or too long.

    Examples
    --------
    >>> LoRARequest("sql", 1, "adapters/sql").lora_name
    'sql'
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""

    def __post_init__(self) -> None:
        name: Any = self.lora_name
        if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME_CHARS:
            raise RequestError(
                f"lora_name must be a str of 1 to {_MAX_NAME_CHARS} characters; got "
                f"{shown_with_type(name)}"
            )
        path: Any = self.lora_path
        if hasattr(path, "__fspath__"):
            object.__setattr__(self, "lora_path", str(path))
        elif not isinstance(path, str):
            raise RequestError(f"lora_path must be a str or path; got {shown_with_type(path)}")
