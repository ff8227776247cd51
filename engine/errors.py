"""Every error that `engine` raises on purpose.

    EngineError
    ├── ConfigError         ValueError    a model's or the user's configuration makes no sense
    ├── ContractError       ValueError    a kernel argument breaks the op's contract
    │   ├── ShapeError
    │   └── DTypeError      TypeError
    ├── RequestError        ValueError    a request that cannot be served (the others go on)
    ├── WeightsError        ValueError    a weight file is missing, damaged or does not fit
    ├── TemplateError       ValueError    a chat template fails or tries to leave its sandbox
    ├── UnknownOptionError  TypeError     a keyword nobody knows, with the nearest known one
    ├── DeviceError         RuntimeError  the device asked for is not there
    ├── CompileError        RuntimeError  NVRTC refused a kernel
    ├── LaunchPlanError     RuntimeError  a layer did what its launch plan cannot repeat
    ├── DownloadError       RuntimeError  a model could not be pulled
    ├── StepTimeoutError    TimeoutError  a step took longer than it may
    └── OutOfMemoryError    MemoryError   with the numbers: who uses what, what would fit

Each one derives from the builtin that NumPy would raise in its place, so `except ValueError`
keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CompileError",
    "ConfigError",
    "ContractError",
    "DTypeError",
    "DeviceError",
    "DownloadError",
    "EngineError",
    "LaunchPlanError",
    "OutOfMemoryError",
    "RequestError",
    "ShapeError",
    "StepTimeoutError",
    "TemplateError",
    "UnknownOptionError",
    "WeightsError",
    "unknown_keyword",
]


class EngineError(Exception):
    """Base of every error raised on purpose by `engine`."""


class ConfigError(EngineError, ValueError):
    """A model's or the user's configuration makes no sense."""


class ContractError(EngineError, ValueError):
    """A kernel argument breaks the contract of its op."""


class ShapeError(ContractError):
    """A kernel argument has the wrong shape or strides."""


class DTypeError(ContractError, TypeError):
    """A kernel argument has the wrong dtype or is no array."""


class RequestError(EngineError, ValueError):
    """A request cannot be served; other requests are not affected."""


class WeightsError(EngineError, ValueError):
    """A weight file is missing, damaged, or does not fit the model's configuration."""


class TemplateError(EngineError, ValueError):
    """A chat template failed, is missing, or tried to leave its sandbox."""


class UnknownOptionError(EngineError, TypeError):
    """A keyword that nobody knows."""


class DeviceError(EngineError, RuntimeError):
    """The device asked for cannot be used."""


class CompileError(EngineError, RuntimeError):
    """NVRTC refused a kernel; the message carries its log."""


class LaunchPlanError(EngineError, RuntimeError):
    """A layer did something, while its launch plan was made, that the plan cannot repeat."""


class DownloadError(EngineError, RuntimeError):
    """A model could not be pulled."""


class StepTimeoutError(EngineError, TimeoutError):
    """A step took longer than the engine's `step_timeout`."""


class OutOfMemoryError(EngineError, MemoryError):
    """Memory ran out; the message says who holds how much and what would fit."""


def unknown_keyword(owner: str, name: str, known: Iterable[str]) -> UnknownOptionError:
    """Build the error for keyword `name`, which `owner` does not know.

    Examples
    --------
    >>> str(unknown_keyword("SamplingParams", "temprature", ["temperature", "top_p"]))
    "SamplingParams got an unknown keyword 'temprature'; did you mean 'temperature'?"
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keywords: {', '.join(known)}"
    return UnknownOptionError(f"{owner} got an unknown keyword {name!r}; {hint}")
