"""Every error that `engine` raises on purpose.

    EngineError
    ├── ConfigError         ValueError    a model's or the user's configuration is invalid
    ├── ContractError       ValueError    an argument violates the op's contract
    │   ├── ShapeError
    │   └── DTypeError      TypeError
    ├── RequestError        ValueError    a request cannot be served (others can)
    │   ├── ContextLengthError            its prompt is longer than the model's context
    │   └── UnknownAdapterError           it names a LoRA adapter that the engine does not hold
    ├── WeightsError        ValueError    a weight file is missing, damaged or does not fit
    ├── TemplateError       ValueError    a chat template fails or tries to leave its sandbox
    ├── UnknownOptionError  TypeError     an unknown keyword; names the nearest known one
    ├── DeviceError         RuntimeError  the requested device is not available
    ├── CompileError        RuntimeError  NVRTC failed to compile a kernel
    ├── LaunchPlanError     RuntimeError  a layer did something its launch plan cannot repeat
    ├── DownloadError       RuntimeError  a model could not be downloaded
    ├── RankError           RuntimeError  a process of a distributed model failed
    ├── StepTimeoutError    TimeoutError  a step exceeded `step_timeout`
    └── OutOfMemoryError    MemoryError   lists each use of memory, and what would fit

Each derives from the built-in exception that NumPy would raise, so `except ValueError` keeps
working.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

__all__ = [
    "CompileError",
    "ConfigError",
    "ContextLengthError",
    "ContractError",
    "DTypeError",
    "DeviceError",
    "DownloadError",
    "EngineError",
    "LaunchPlanError",
    "OutOfMemoryError",
    "RankError",
    "RequestError",
    "ShapeError",
    "StepTimeoutError",
    "TemplateError",
    "UnknownAdapterError",
    "UnknownOptionError",
    "WeightsError",
    "about_item",
    "did_you_mean",
    "in_item",
    "map_items",
    "unknown_keyword",
]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class EngineError(Exception):
    """Base of every error raised on purpose by `engine`."""


class ConfigError(EngineError, ValueError):
    """A model's or the user's configuration is invalid."""


class ContractError(EngineError, ValueError):
    """An argument violates its op's contract."""


class ShapeError(ContractError):
    """A kernel argument has the wrong shape or strides."""


class DTypeError(ContractError, TypeError):
    """A kernel argument has the wrong dtype or is not an array."""


class RequestError(EngineError, ValueError):
    """A request cannot be served; other requests are not affected."""


class ContextLengthError(RequestError):
    """A prompt is longer than the model's context.

    Parameters
    ----------
    message : str
        See `of`: programs look for the words of OpenAI's message.
    name : str, optional
        Name of the prompt: "prompt", "messages" or "input".
    num_tokens, most : int, optional
        Number of tokens of the prompt, and how many it may have.
    """

    def __init__(
        self,
        message: str,
        name: str | None = None,
        num_tokens: int | None = None,
        most: int | None = None,
    ) -> None:
        super().__init__(message)
        self.name = name
        self.num_tokens = num_tokens
        self.most = most

    @classmethod
    def of(
        cls,
        name: str,
        num_tokens: int,
        max_model_len: int,
        *,
        num_reserved: int = 1,
        is_estimate: bool = False,
    ) -> ContextLengthError:
        """Build the error.

        Parameters
        ----------
        name : str
        num_tokens, max_model_len : int
        num_reserved : int
            Tokens of the context that the prompt must leave free: one, if any is generated.
        is_estimate : bool
            Whether `num_tokens` is only a lower bound, as the prompt was not tokenized.

        Examples
        --------
        >>> print(ContextLengthError.of("messages", 600, 512))
        This model's maximum context length is 512 tokens. However, your messages resulted in 600 \
tokens. Please reduce the length of the messages to at most 511 tokens.
        """
        most = max_model_len - num_reserved
        least = "at least " if is_estimate else ""
        message = (
            f"This model's maximum context length is {max_model_len} tokens. However, your {name} "
            f"resulted in {least}{num_tokens} tokens. Please reduce the length of the {name} to at "
            f"most {most} tokens."
        )
        return cls(message, name, num_tokens, most)


class UnknownAdapterError(RequestError):
    """A request names a LoRA adapter that the engine does not hold, and has no path of one."""


class WeightsError(EngineError, ValueError):
    """A weight file is missing, damaged, or does not fit the model's configuration."""


class TemplateError(EngineError, ValueError):
    """A chat template failed, is missing, or tried to leave its sandbox."""


class UnknownOptionError(EngineError, TypeError):
    """An unknown keyword."""


class DeviceError(EngineError, RuntimeError):
    """The requested device cannot be used."""


class CompileError(EngineError, RuntimeError):
    """NVRTC failed to compile a kernel; the message includes its log."""


class LaunchPlanError(EngineError, RuntimeError):
    """While its launch plan was recorded, a layer did something the plan cannot repeat."""


class DownloadError(EngineError, RuntimeError):
    """A model could not be downloaded."""


class RankError(EngineError, RuntimeError):
    """A process of a distributed model died, failed, or does not respond; all of them end."""


class StepTimeoutError(EngineError, TimeoutError):
    """A step took longer than the engine's `step_timeout`."""


class OutOfMemoryError(EngineError, MemoryError):
    """Memory ran out; the message lists each use of memory, and what would fit."""


@contextlib.contextmanager
def in_item(name: str, index: int, count: int) -> Iterator[None]:
    """Within the context, errors about one of `count` requests begin with it. See `about_item`.

    An only request is not named: it may have been given without a list.

    Examples
    --------
    >>> with in_item("prompts", 3, count=5):
    ...     raise RequestError("stop[0] must be a str; got 5")
    Traceback (most recent call last):
    ...
    engine.errors.RequestError: prompts[3]: stop[0] must be a str; got 5
    """
    try:
        yield
    except (RequestError, TemplateError) as error:
        if count > 1:
            error.args = (about_item(f"{name}[{index}]", str(error)),)
        raise


def map_items(
    name: str, items: Sequence[_Item], function: Callable[[_Item], _Result]
) -> list[_Result]:
    """Return `function` of each of the requests; errors say of which. See `in_item`."""
    found = []
    for index, item in enumerate(items):
        with in_item(name, index, len(items)):
            found.append(function(item))
    return found


def about_item(item: str, message: str) -> str:
    """Return a message that begins with the request it is about, such as "prompts[3]".

    Examples
    --------
    >>> about_item("prompts[3]", "stop[0] must be a str; got 5")
    'prompts[3]: stop[0] must be a str; got 5'
    >>> about_item("prompt[3]", "prompt[0] must be a token id; got 'a'")
    "prompt[3][0] must be a token id; got 'a'"
    """
    name, _, _ = item.partition("[")
    is_own = re.match(rf"{re.escape(name)}(?=[\[ ])", message)
    return item + message[len(name) :] if is_own else f"{item}: {message}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a message about an unknown name: the nearest known one, or `otherwise`.

    Examples
    --------
    >>> did_you_mean("genrate", ["generate", "chat"]), did_you_mean("x", ["chat"], "see --help")
    ("; did you mean 'generate'?", '; see --help')
    >>> did_you_mean("temp", ["temperature", "top_p"]), did_you_mean("stop", ["top_p", "n"])
    ("; did you mean 'temperature'?", '')
    """
    plain = {one.lstrip("-/"): one for one in known}  # every option begins with "--"
    word = name[:80].lstrip("-/")
    same_start = [one for one in plain if one.startswith(word) or word.startswith(one)]
    near = difflib.get_close_matches(word, plain, n=1, cutoff=0.7)
    near = near or difflib.get_close_matches(word, same_start, n=1, cutoff=0.5)
    hint = f"did you mean {plain[near[0]]!r}?" if near else otherwise
    return f"; {hint}" if hint else ""


def unknown_keyword(
    owner: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> UnknownOptionError:
    """Build the error for keyword `name`, which `owner` does not accept.

    `elsewhere`: names of other libraries -> ours.

    Examples
    --------
    >>> str(unknown_keyword("SamplingParams", "temprature", ["temperature", "top_p"]))
    "SamplingParams got an unknown keyword 'temprature'; did you mean 'temperature'?"
    """
    known = sorted(known)
    nearest = (elsewhere or {}).get(name, name)
    hint = did_you_mean(nearest, known, f"known keywords: {', '.join(known) or 'none'}")
    return UnknownOptionError(f"{owner} got an unknown keyword {name[:80]!r}{hint}")
