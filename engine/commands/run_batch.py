"""`engine run-batch FILE.jsonl -o OUT.jsonl`: answer the requests of a batch file, then exit.

The format is OpenAI's: each line contains ``custom_id``, ``method``, ``url`` and ``body``, and the
output contains one line per request, in the same order. During the run it is named
``OUT.jsonl.partial``.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from engine.async_engine import AsyncEngine
from engine.commands._options import add_model_arguments
from engine.commands._overrides import override_options
from engine.commands._parallel import parallel_option
from engine.commands._quantization import quantization_option
from engine.commands._speculation import speculation_option
from engine.errors import ConfigError, RequestError
from engine.model_files import excerpt, open_file
from engine.server.server_config import ServerConfig

__all__ = ["add_arguments", "run"]

_EPILOG = (
    "A line that cannot be answered has an error in its place, and the others go on; the status is "
    "1 if no line was answered. OUT.partial becomes OUT, which it replaces, when the run is over; "
    "after a run that was ended early it has the lines that were done."
)
_LIBRARIES = ("msgspec", "starlette")
_MAX_WINDOW = 4096
_LIMITS = {"max_num_seqs": 1 << 16, "max_num_batched_tokens": 1 << 24}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    parser.add_argument("file", type=Path, help="the requests, one JSON object per line")
    parser.add_argument(
        "-o", "--output-file", type=Path, required=True, metavar="OUT", help="output file"
    )
    add_model_arguments(parser)
    parser.set_defaults(model="smollm2")
    parser.add_argument(
        "--served-model-name",
        action="append",
        help="model name accepted in requests (default: that of --model); repeatable",
    )
    parser.add_argument("--max-num-seqs", type=int, help="maximum number of running requests")
    parser.add_argument("--max-num-batched-tokens", type=int, help="token budget per step")
    parser.add_argument("--tool-call-parser", default="auto", help="format of tool calls")
    parser.add_argument("--reasoning-parser", default="auto", help="format of reasoning")
    parser.add_argument(
        "--ignore-unknown-fields",
        action="store_true",
        help="drop the fields of a request that the engine does not know, with a warning",
    )


def run(arguments: argparse.Namespace) -> int:
    """Answer all requests; return 1 if none succeeded."""
    _check(arguments)
    with open_file(arguments.file, error=RequestError) as file:
        count = sum(1 for line in _lines(file) if line.strip())
        if not count:
            raise RequestError(f"{excerpt(arguments.file)} must have a line; it is empty")
        file.seek(0)
        with _partial(arguments.output_file) as out:
            good = asyncio.run(_answer(arguments, file, count, out))
    print(f"{good} of {count} requests answered: {arguments.output_file}", file=sys.stderr)
    return 0 if good else 1


def _check(arguments: argparse.Namespace) -> None:
    """Reject invalid options before loading the model."""
    for name, most in _LIMITS.items():
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= most:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} must be from 1 to {most}; got {excerpt(value)}")
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"run-batch needs {' and '.join(missing)}: pip install 'rawengine[serve]'"
        )
    parsers = ("tool_call_parser", "reasoning_parser")
    # Refuse unknown names before the model is loaded.
    ServerConfig(**{name: getattr(arguments, name) for name in parsers})
    output = arguments.output_file
    file = arguments.file
    is_file = output.is_file() or not output.exists()
    if not is_file or not output.parent.is_dir():
        raise ConfigError(
            f"--output-file must be a regular file in an existing folder; got {excerpt(output)}"
        )
    for written in (output, _partial_of(output)):
        if written.exists() and file.exists() and written.samefile(file):
            raise ConfigError(
                f"--output-file must be another file than {excerpt(file)}, also with .partial "
                f"behind it; got {excerpt(output)}"
            )


def _partial_of(output: Path) -> Path:
    """Return the path of the output file while the run is in progress: beside what OUT links to."""
    return Path(os.path.realpath(output) + ".partial")


@contextlib.contextmanager
def _partial(output: Path) -> Iterator[BinaryIO]:
    """Open the partial output file, and rename it to `output` at the end unless the run fails.

    Its former contents are left: a run that cannot load its model does not erase them.
    """
    partial = _partial_of(output)
    try:
        out = open(partial, "ab")  # noqa: SIM115
    except (OSError, ValueError) as error:  # ValueError: an invalid path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{excerpt(partial)} cannot be written: {excerpt(reason)}") from error
    with out:
        yield out
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, os.path.realpath(output))


def _lines(file: io.FileIO) -> Iterator[bytes]:
    """Yield the lines; an overlong line is truncated just above the limit and later refused."""
    # Imported lazily: it needs the `serve` extra.
    from engine.commands._batch import MAX_LINE

    reader = io.BufferedReader(file, 1 << 20)
    try:
        if reader.peek(3).startswith(codecs.BOM_UTF8):  # Some editors write one.
            reader.read(3)
        while line := reader.readline(MAX_LINE + 1):
            yield line
            while len(line) > MAX_LINE and not line.endswith(b"\n"):
                line = reader.readline(MAX_LINE + 1)
    finally:
        if not file.closed:  # as after Ctrl-C
            reader.detach()


async def _answer(arguments: argparse.Namespace, file: io.FileIO, count: int, out: BinaryIO) -> int:
    """Write one output line per request; return the number that succeeded."""
    import msgspec

    # Imported lazily: they need the `serve` extra.
    from engine.commands._batch import Batch
    from engine.server.chat_stream import ChatService
    from engine.server.protocol.unknown_fields import ignore_unknown_fields

    if arguments.ignore_unknown_fields:
        ignore_unknown_fields()
    engine = AsyncEngine.from_name(arguments.model, **_options(arguments))
    good = 0
    out.truncate(0)
    try:
        chat = ChatService(
            engine,
            tool_parser=arguments.tool_call_parser,
            reasoning_parser=arguments.reasoning_parser,
        )
        names = arguments.served_model_name or [arguments.model]
        batch = Batch(engine, chat, names, _MAX_WINDOW)
        shows = sys.stderr.isatty()
        with tqdm(total=count, unit="request", disable=not shows, leave=False) as bar:
            async with contextlib.aclosing(batch.results(_lines(file))) as results:
                async for result in results:
                    out.write(msgspec.json.encode(result) + b"\n")
                    good += result.is_success
                    bar.update()
    finally:
        await engine.close()
    return good


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for loading the model."""
    options = {
        "device": arguments.device,
        "dtype": arguments.dtype,
        "load_format": arguments.load_format,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        **quantization_option(arguments),
        **speculation_option(arguments),
        **override_options(arguments),
        **parallel_option(arguments),
    }
    for name in ("max_model_len", *_LIMITS):
        if (value := getattr(arguments, name)) is not None:
            options[name] = value
    return options
