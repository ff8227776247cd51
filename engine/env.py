"""Every environment variable that `engine` reads, with its default and meaning.

A variable set to an invalid value is an error, never ignored.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

__all__ = [
    "VARIABLES",
    "Variable",
    "c_compiler",
    "cache_dir",
    "commit",
    "compile_workers",
    "debug",
    "kernel_tier",
    "num_threads",
    "offline",
    "pipeline_secret",
    "pre_tokenizer",
    "vllm_layers",
]


@dataclass(frozen=True)
class Variable:
    """An environment variable: name, default and meaning."""

    name: str
    default: str
    meaning: str


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "ENGINE_CACHE_DIR",
        "$XDG_CACHE_HOME/engine or ~/.cache/engine",
        "folder of downloaded models, compiled kernels, and the chat's history",
    ),
    Variable(
        "ENGINE_KERNEL_TIER",
        "auto",
        '"portable" uses kernels for sm_80 and up only, "auto" the fastest for the device',
    ),
    Variable(
        "ENGINE_COMPILE_WORKERS",
        "number of cores, at most 16",
        "maximum number of kernels compiled in parallel when a model is loaded",
    ),
    Variable(
        "ENGINE_NUM_THREADS",
        "OPENBLAS_NUM_THREADS or the like if set, else measured",
        "number of threads that compute on the CPU",
    ),
    Variable(
        "ENGINE_CC",
        "CC if set, else cc, gcc or clang if found",
        'C compiler of the kernels for the CPU; "none": NumPy',
    ),
    Variable("ENGINE_DEBUG", "0", "1 checks every block table and poisons freed memory (slow)"),
    Variable("ENGINE_OFFLINE", "0", "1 forbids network access (also HF_HUB_OFFLINE=1)"),
    Variable(
        "ENGINE_PIPELINE_SECRET",
        "none",
        "secret shared by the engine and pipeline stages on other hosts; at least 16 characters",
    ),
    Variable(
        "ENGINE_PRE_TOKENIZER",
        "the file's tokenizer.ggml.pre",
        "name of the rule that splits words for .gguf files that name none, or an unknown one",
    ),
    Variable("ENGINE_VLLM_LAYERS", "0", "1 replaces norms, activations and experts of vLLM, too"),
    Variable(
        "ENGINE_COMMIT",
        "git's, in a checkout",
        "the commit that `engine bench` records outside a git checkout",
    ),
)


def cache_dir() -> Path:
    """Return the directory of downloaded models and compiled kernels (not created here)."""
    if own := os.environ.get("ENGINE_CACHE_DIR"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "engine"


def c_compiler() -> str | None:
    """Return the command of the C compiler given by `ENGINE_CC`; None if unset."""
    return os.environ.get("ENGINE_CC") or None


def kernel_tier() -> str:
    """Return the kernel tier, "auto" or "portable"."""
    return _choice("ENGINE_KERNEL_TIER", "auto", ("auto", "portable"))


def pre_tokenizer() -> str | None:
    """Return the name that replaces a .gguf file's tokenizer.ggml.pre; None if not set."""
    return os.environ.get("ENGINE_PRE_TOKENIZER") or None


def pipeline_secret() -> bytes:
    """Return the secret of a pipeline whose stages are started manually.

    Raises
    ------
    ConfigError
        If the secret is unset or too short.
    """
    text = os.environ.get("ENGINE_PIPELINE_SECRET", "")
    if len(text) < 16:
        raise ConfigError(
            "ENGINE_PIPELINE_SECRET must have at least 16 characters, the same on all hosts; got "
            f"{len(text)}"
        )
    return text.encode()


def compile_workers() -> int:
    """Return how many kernels to compile in parallel (at least 1)."""
    default = str(min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4))
    return _positive("ENGINE_COMPILE_WORKERS", os.environ.get("ENGINE_COMPILE_WORKERS", default))


def num_threads() -> int | None:
    """Return the number of CPU threads given by `ENGINE_NUM_THREADS`; None if unset."""
    text = os.environ.get("ENGINE_NUM_THREADS")
    return None if text is None else _positive("ENGINE_NUM_THREADS", text)


def debug() -> bool:
    """Tell whether the slow checks (`ENGINE_DEBUG`) are on."""
    return _choice("ENGINE_DEBUG", "0", ("0", "1")) == "1"


def offline() -> bool:
    """Tell whether network access is forbidden."""
    return "1" in (
        _choice("ENGINE_OFFLINE", "0", ("0", "1")),
        os.environ.get("HF_HUB_OFFLINE", "0"),
    )


def vllm_layers() -> bool:
    """Tell whether vLLM's layers are replaced, too (`engine.integrations.vllm`)."""
    return _choice("ENGINE_VLLM_LAYERS", "0", ("0", "1")) == "1"


def commit() -> str:
    """Return the commit given by `ENGINE_COMMIT`; empty if unset."""
    return os.environ.get("ENGINE_COMMIT", "")


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name} must be a whole number >= 1; got {text!r}")
    return int(text)


def _choice(name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(name, default)
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
    return value
