"""`engine generate [MODEL] [PROMPT]`: continue a text or, with `--chat`, answer a question."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from engine.commands._options import (
    add_model_arguments,
    add_sampling_arguments,
    check_has_template,
    make_llm,
    sampling_params,
    summary,
)
from engine.commands._parser import MODEL_HELP, add_positional_model, chosen_model
from engine.commands._streams import read_input
from engine.errors import RequestError
from engine.llm import LLM
from engine.loading.download import is_hub_id, names_model
from engine.model_files import excerpt
from engine.outputs import RequestOutput

__all__ = ["add_arguments", "run"]

_PROMPT_HELP = (
    "the prompt; - or omitted: read standard input. Without MODEL, a text that names a model "
    "(smollm2, or a path of one) is the MODEL"
)
_MAX_PROMPT_BYTES = 64 << 20  # far above any context; stops at endless files such as /dev/zero


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_positional_model(parser, f"{MODEL_HELP} (default: smollm2)")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=_PROMPT_HELP)
    parser.add_argument("--file", type=Path, help="read the prompt from this file")
    parser.add_argument("--chat", action="store_true", help="apply the chat template to the prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Stream the answer to stdout, then print one line of statistics to stderr."""
    _settle_words(arguments)
    prompt: Any = _read_prompt(arguments)
    if arguments.chat:
        prompt = [{"role": "user", "content": prompt}]
    with make_llm(arguments) as llm:
        if arguments.chat:
            check_has_template(llm, "leave out --chat to continue the prompt as text, or take an "
                               "instruct model")  # fmt: skip
        pieces: list[str] = []
        ids: list[int] = []
        output = None
        for output in llm.stream(prompt, sampling_params(llm, arguments)):
            completion = output.outputs[0]
            pieces.append(completion.text)
            ids += completion.token_ids
            if not arguments.json:
                print(completion.text, end="", flush=True)
        if output is None:
            return 1
        if arguments.json:
            print(json.dumps(_record(llm, output, "".join(pieces), ids), ensure_ascii=False))
        else:
            print()
            print(summary(llm, output, len(ids)), file=sys.stderr)
        return 1 if output.outputs[0].finish_reason == "error" else 0


def _settle_words(arguments: argparse.Namespace) -> None:
    """Tell MODEL from PROMPT if only one of them is given.

    It is the prompt, unless this comes from `--file` or the text is the name of a model.

    Raises
    ------
    RequestError
        If it may be either.
    """
    text = arguments.named_model
    if text is not None and arguments.prompt is None and arguments.file is None:
        if arguments.model is None and is_hub_id(text):
            raise RequestError(
                f"{text!r:.120} may be a model or a prompt: engine generate MODEL PROMPT takes "
                "both, and - as the prompt reads standard input"
            )
        if arguments.model is not None or not names_model(text):
            arguments.prompt = text
            arguments.named_model = None
    arguments.model = chosen_model(arguments.named_model, arguments.model)


def _read_prompt(arguments: argparse.Namespace) -> str:
    if arguments.file is not None:
        if arguments.prompt is not None:
            raise RequestError(f"give a prompt or --file, not both; got {arguments.prompt!r}")
        try:
            with arguments.file.open("rb") as file:
                data = file.read(_MAX_PROMPT_BYTES + 1)
            if len(data) > _MAX_PROMPT_BYTES:
                raise RequestError(
                    f"--file {excerpt(arguments.file)} must have at most {_MAX_PROMPT_BYTES} bytes"
                )
            return str(data.decode("utf-8-sig"))  # Some editors write a BOM.
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RequestError(
                f"--file {excerpt(arguments.file)} cannot be read: {excerpt(reason)}"
            ) from error
    if arguments.prompt in (None, "-"):
        if sys.stdin.isatty():
            print("engine: the prompt, up to Ctrl-D:", file=sys.stderr)
        return read_input()
    return str(arguments.prompt)


def _record(llm: LLM, output: RequestOutput, text: str, ids: list[int]) -> dict[str, Any]:
    completion = output.outputs[0]
    metrics = output.metrics
    return {
        "text": text,
        "token_ids": ids,
        "prompt_token_ids": list(output.prompt_token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "ttft_seconds": metrics.ttft if metrics else None,
        "decode_seconds": metrics.decode_time if metrics else None,
        "device": str(llm.llm_engine.model.device),
        "dtype": llm.llm_engine.model.dtype,
    }
