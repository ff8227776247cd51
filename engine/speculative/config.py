"""`speculative_config`: the options of speculative decoding, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from engine.checks import shown, shown_with_type
from engine.drafts import MAX_QUERY_LEN
from engine.errors import ConfigError, RequestError, unknown_keyword
from engine.kernels._override.places import load_place
from engine.sampling_params import NumberRange

__all__ = ["HEAD_METHODS", "METHODS", "SpeculativeConfig"]

METHODS = ("ngram", "suffix", "draft_model", "eagle3", "mtp", "grammar", "custom")
"""Allowed values of `method`."""

HEAD_METHODS = ("eagle3", "mtp")
"""Methods with a draft head: it reads the target's hidden states."""

_OF_MODELS = ("draft_model", *HEAD_METHODS)
_MATCH = (3, 8)  # default tokens of a match: minimum and maximum
_NUM_TOKENS = {"ngram": 8, "suffix": 12}  # default drafts by method; 4 for the others
_RANGES = {
    "num_speculative_tokens": NumberRange(1, MAX_QUERY_LEN - 1, integer=True, optional=True),
    "prompt_lookup_min": NumberRange(1, 64, integer=True, optional=True),
    "prompt_lookup_max": NumberRange(1, 64, integer=True, optional=True),
    "disable_by_batch_size": NumberRange(1, 2**31 - 1, integer=True, optional=True),
}
_TEXTS = ("model", "quantization", "dtype", "revision")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Options of speculative decoding; frozen, and checked on construction.

    Parameters
    ----------
    method : str
        "ngram": tokens that followed an earlier occurrence of the last n; "suffix": the most
        frequent continuation of the longest suffix that occurred before; "draft_model": a smaller
        model with the same vocabulary; "eagle3", "mtp": a head on the target's hidden states;
        "custom": `proposer`; "grammar": only the tokens forced by a request's grammar
        (`SamplingParams.structured`), which every other method proposes too.
        Default: "custom" with a `proposer`, "draft_model" with a `model`.
    num_speculative_tokens : int, optional
        Maximum number of drafts per request and step, at most 63. Default: 8 for "ngram", 12 for
        "suffix", else 4; at most 7 for models with recurrent layers.
    model : str, optional
        For "draft_model", "eagle3" and "mtp": a name, folder, .gguf file or hub id. By default,
        "mtp" reads the head from the target's own folder.
    prompt_lookup_min, prompt_lookup_max : int, optional
        For "ngram": minimum and maximum match length in tokens; the longest match is used.
        Default: 3 and 8; with a maximum alone, the minimum equals it, as in vLLM; with a minimum
        alone, the maximum is at least 8. "suffix" ignores the maximum.
    proposer : callable or str, optional
        For "custom": ``proposer(token_ids, num_tokens)`` returns up to num_tokens ids that may
        follow, or `Drafts`, or None. "file.py:name" names one in a file.
    disable_by_batch_size : int, optional
        Propose nothing while at least this many requests are decoding.
    adaptive : bool
        Choose the number of drafts per step, possibly 0, from the measured acceptance rate and step
        cost. False: verify every proposed draft.
    quantization, dtype, revision : str, optional
        Loading options of `model`, as in `engine.load`; the dtype defaults to the target's.

    Attributes
    ----------
    has_default_num_tokens : bool
        Whether `num_speculative_tokens` was left out, so that a model may lower it.

    Raises
    ------
    ConfigError
        If a value is out of range or missing, or belongs to another method.

    Examples
    --------
    >>> SpeculativeConfig(method="ngram").num_speculative_tokens
    8
    >>> SpeculativeConfig(method="draft_model")
    Traceback (most recent call last):
    ...
    engine.errors.ConfigError: speculative_config.model must be given for method='draft_model'; got None
    """  # noqa: E501

    method: str = ""
    num_speculative_tokens: int | None = None
    model: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    proposer: Callable[..., Any] | str | None = None
    disable_by_batch_size: int | None = None
    adaptive: bool = True
    quantization: str | None = None
    dtype: str | None = None
    revision: str | None = None
    has_default_num_tokens: bool = field(default=False, init=False, repr=False, compare=False)

    @classmethod
    def from_option(cls, option: Any) -> SpeculativeConfig | None:
        """Build the config from the user's value: a mapping, a callable, or None.

        Raises
        ------
        ConfigError, UnknownOptionError
            If an option is invalid; the message names it.
        """
        if option is None or isinstance(option, cls):
            return option
        if isinstance(option, Mapping):
            known = [option.name for option in fields(cls) if option.init]
            for name in option:
                if name not in known:
                    raise unknown_keyword("speculative_config", str(name), known)
            return cls(**option)
        if callable(option):
            return cls(proposer=option)
        raise ConfigError(
            "speculative_config must be a mapping, a callable or None; "
            f"got {shown_with_type(option)}"
        )

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            try:
                self._set(name, allowed.check(f"speculative_config.{name}", getattr(self, name)))
            except RequestError as error:
                raise ConfigError(str(error)) from None
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise _wrong(name, "a text that is not empty, or None", value)
        if not isinstance(self.adaptive, bool):
            raise _wrong("adaptive", "True or False", self.adaptive)
        if isinstance(self.proposer, str):
            self._set("proposer", load_place("speculative_config.proposer", self.proposer))
        if self.proposer is not None and not callable(self.proposer):
            raise _wrong("proposer", "a callable, 'file.py:name' or None", self.proposer)
        self._check_method()
        least, most = self._match_lengths()
        self._set("prompt_lookup_min", least)
        self._set("prompt_lookup_max", most)
        if self.method == "ngram" and least > most:
            raise _wrong("prompt_lookup_min", f"at most prompt_lookup_max = {most}", least)
        if self.num_speculative_tokens is None:
            self._set("num_speculative_tokens", _NUM_TOKENS.get(self.method, 4))
            self._set("has_default_num_tokens", True)

    def _match_lengths(self) -> tuple[int, int]:
        """Return the minimum and maximum match length, with defaults filled in."""
        least = self.prompt_lookup_min
        most = self.prompt_lookup_max
        if least is None:
            least = _MATCH[0] if most is None or self.method != "ngram" else most
        return least, max(least, _MATCH[1]) if most is None else most

    @property
    def num_tokens(self) -> int:
        """Maximum number of drafts per request and step."""
        assert self.num_speculative_tokens is not None
        return self.num_speculative_tokens

    def _check_method(self) -> None:
        if self.method == "" and (self.proposer is not None or self.model is not None):
            self._set("method", "draft_model" if self.proposer is None else "custom")
        if self.method not in METHODS:
            raise _wrong("method", f"one of {', '.join(map(repr, METHODS))}", self.method)
        for name in ("quantization", "dtype", "revision"):
            if getattr(self, name) is not None and self.method not in _OF_MODELS:
                raise _wrong(name, f"None for method={self.method!r}", getattr(self, name))
        for name, methods in (("model", _OF_MODELS), ("proposer", ("custom",))):
            value = getattr(self, name)
            if value is None and self.method in methods and self.method != "mtp":
                raise _wrong(name, f"given for method={self.method!r}", None)
            if value is not None and self.method not in methods:
                raise _wrong(name, f"None for method={self.method!r}", value)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _wrong(name: str, wanted: str, got: object) -> ConfigError:
    return ConfigError(f"speculative_config.{name} must be {wanted}; got {shown(got)}")
