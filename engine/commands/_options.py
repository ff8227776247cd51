"""Options shared by several commands: the model and the sampling parameters."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from engine import threads
from engine.commands._overrides import add_override_arguments, override_options
from engine.commands._parallel import add_parallel_argument, parallel_option
from engine.commands._parser import MODEL_HELP
from engine.commands._quantization import add_quantization_argument, quantization_option
from engine.commands._speculation import add_speculation_argument, speculation_option
from engine.errors import TemplateError
from engine.llm import LLM
from engine.model_files import excerpt
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "SAMPLING_TYPES",
    "add_model_arguments",
    "add_sampling_arguments",
    "check_has_template",
    "given_sampling",
    "make_llm",
    "sampling_params",
    "summary",
]

DEFAULT_MAX_TOKENS = 256

_SAMPLING = {
    "max_tokens": (int, f"maximum number of tokens to generate (default {DEFAULT_MAX_TOKENS})"),
    "min_tokens": (int, "generate at least this many tokens"),
    "temperature": (float, "0: always the most probable token"),
    "top_p": (float, "keep the most probable tokens that sum to this probability"),
    "top_k": (int, "keep this many of the most probable tokens; 0: all"),
    "min_p": (float, "drop tokens below this fraction of the highest probability"),
    "typical_p": (float, "keep tokens of typical information that sum to this probability"),
    "top_n_sigma": (float, "keep logits within this many standard deviations of the largest"),
    "xtc_probability": (float, "how often to drop the most probable of several likely tokens"),
    "xtc_threshold": (float, "smallest probability of a likely token (default 0.1)"),
    "dry_multiplier": (float, "penalty on tokens that continue a repetition; 0: off"),
    "repetition_penalty": (float, "above 1 makes tokens seen before less likely"),
    "presence_penalty": (float, "subtracted once from the logit of each generated token"),
    "frequency_penalty": (float, "subtracted from the logit once per occurrence"),
    "seed": (int, "the same seed gives the same text"),
}


SAMPLING_TYPES: dict[str, type] = {name: kind for name, (kind, _) in _SAMPLING.items()}
SAMPLING_TYPES |= {"stop": str, "ignore_eos": bool}
"""Sampling parameters that can be given, and their types; `stop` is a list of texts."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `engine.load`."""
    parser.add_argument("--model", help=f"{MODEL_HELP} (default: smollm2)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or auto")
    parser.add_argument("--dtype", default="auto", help="float32, float16, bfloat16 or auto")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    add_quantization_argument(parser)
    parser.add_argument("--max-model-len", type=int, help="maximum tokens, prompt plus output")
    parser.add_argument("--kv-cache-dtype", default="auto", help="fp8 or int8: halves the KV cache")
    add_speculation_argument(parser)
    add_override_arguments(parser)
    add_parallel_argument(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sampling options; they default to the model's recommended values."""
    for name, (kind, text) in _SAMPLING.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    parser.add_argument("--stop", action="append", help="stop string; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="generate past the end token")


def make_llm(arguments: argparse.Namespace) -> LLM:
    """Validate the sampling options, then load the chosen model."""
    SamplingParams(**given_sampling(arguments))  # reject invalid values before loading
    options: dict[str, Any] = {"max_num_seqs": 1, "kv_cache_dtype": arguments.kv_cache_dtype}
    options |= quantization_option(arguments) | speculation_option(arguments)
    options |= parallel_option(arguments) | override_options(arguments)
    if arguments.max_model_len is not None:
        options["max_model_len"] = arguments.max_model_len
    return LLM(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        progress=sys.stderr.isatty(),
        **options,
    )


def check_has_template(llm: LLM, instead: str) -> None:
    """Check that the model can chat.

    Raises
    ------
    TemplateError
        If it has no chat template; the message says what to do `instead`.
    """
    if llm.tokenizer.chat_template is None:
        raise TemplateError(f"the model has no chat template, so it cannot chat: {instead}")


def sampling_params(llm: LLM, arguments: argparse.Namespace) -> SamplingParams:
    """Return the model's default sampling parameters, overridden by the given options."""
    return llm.get_default_sampling_params(
        **({"max_tokens": DEFAULT_MAX_TOKENS} | given_sampling(arguments))
    )


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given sampling options as keyword arguments."""
    given = {name: getattr(arguments, name) for name in SAMPLING_TYPES}
    return {k: value for k, value in given.items() if value is not None and value is not False}


def summary(llm: LLM, output: RequestOutput, num_tokens: int) -> str:
    """Return the line printed after an answer: tokens, tokens/s, device, dtype, any error."""
    model = llm.llm_engine.model
    metrics = output.metrics
    seconds = (metrics.decode_time or 0.0) if metrics is not None else 0.0
    rate = f"{(num_tokens - 1) / seconds:.1f} tokens/s" if seconds and num_tokens > 1 else "-"
    prompt = len(output.prompt_token_ids)
    place = str(model.device) if model.device.is_cuda else f"{model.device}, {threads.current()}"
    line = f"{num_tokens} tokens after {prompt}, {rate}, {place}, {model.dtype}"
    completion = output.outputs[0]
    if completion.finish_reason == "error":
        return f"{line}; ended by an error: {excerpt(completion.stop_reason)}"
    is_cut = completion.finish_reason == "length"
    return f"{line}; cut off by max_tokens or the end of the context" if is_cut else line
