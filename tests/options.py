"""engine/options.py: the keywords of `LLM` for type checkers, from `load` and `EngineConfig`.

`python -m tests.options` writes the module; `tests/test_signatures.py` checks it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path

from engine.engine_config import CONFIG_OPTIONS
from engine.model import LOAD_OPTIONS

MODULE = Path(__file__).parents[1] / "engine" / "options.py"
_HEAD = '''\
"""Types of the engine's keywords, for type checkers and editors; written by `tests/options.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from engine.config import ModelConfig
from engine.device import Device

__all__ = ["EngineOptions", "LLMOptions"]


class EngineOptions(TypedDict, total=False):
    """Keywords of `LLMEngine`: the fields of `EngineConfig`, which describes them."""

'''
_ALIAS = "    gpu_memory_utilization: float | None  # vLLM's name of memory_utilization\n"
_BETWEEN = '''

class LLMOptions(EngineOptions, total=False):
    """Keywords of `LLM` and `from_name`: those of `load` too, which describes them."""

'''


def _fields(parameters: Iterable[inspect.Parameter]) -> str:
    return "".join(f"    {each.name}: {each.annotation}\n" for each in parameters).replace("'", '"')


def module() -> str:
    """Return the text of the module."""
    of_load = [each for name, each in LOAD_OPTIONS.items() if name not in CONFIG_OPTIONS]
    engine = _fields(CONFIG_OPTIONS.values()) + _ALIAS
    return _HEAD + engine + _BETWEEN + _fields(of_load)


if __name__ == "__main__":
    MODULE.write_text(module())
