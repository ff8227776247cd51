"""The command line: `engine COMMAND`, where `COMMANDS` lists the commands.

Only the chosen command's module is imported, which keeps `engine --help` fast.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence

from engine._version import __version__
from engine.commands._parser import CommandParser
from engine.commands._streams import discard_errors, discard_output, prepare_streams
from engine.errors import EngineError, did_you_mean

__all__ = ["main"]

COMMANDS = {
    "chat": ("talk to a model in the terminal", "engine chat smollm2"),
    "generate": (
        "continue a prompt from an argument, a file or standard input",
        'engine generate "Once upon a time"',
    ),
    "serve": (
        "serve a model over HTTP: OpenAI's and Anthropic's protocols, and a web page",
        "engine serve smollm2 --port 8000",
    ),
    "run-batch": (
        "answer the requests in an OpenAI batch file",
        "engine run-batch in.jsonl -o out.jsonl",
    ),
    "pull": ("download a model into the cache", "engine pull smollm2"),
    "ls": ("list the downloaded models", "engine ls"),
    "show": (
        "what a model is: architecture, context, template, sampling defaults, license",
        "engine show smollm2",
    ),
    "rm": ("remove a downloaded model", "engine rm smollm2"),
    "ps": ("list the servers that run on this machine", "engine ps"),
    "quantize": (
        "write a model with 8- or 4-bit weights, for this engine and others",
        "engine quantize FOLDER OUT --format int8",
    ),
    "stage": (
        "run one pipeline stage for an engine on another host",
        "engine stage --connect HOST:PORT --stage 1",
    ),
    "doctor": ("check this machine and say what to install next", "engine doctor"),
    "plan": (
        "predict a model's memory use and speed on GPUs you do not need to have",
        "engine plan llama-3.1-8b",
    ),
    "bench": (
        "measure latency, throughput, prefill or startup of a model",
        "engine bench latency smollm2",
    ),
    "eval": (
        "measure a model's quality: perplexity on a text, KL divergence from another model",
        "engine eval smollm2 --file text.txt",
    ),
    "kernels": (
        "list every kernel: tier, dtypes, registers, shared memory, cache state",
        "engine kernels rmsnorm",
    ),
}
"""Command -> description and an example."""

_OTHER_WORDS = {"run": "chat", "list": "ls", "delete": "rm", "remove": "rm", "download": "pull"}
"""Words of other tools -> our command."""

_SUBCOMMANDS = {
    ("bench", "serve"): (
        "bench_serve.command",
        "benchmark an OpenAI-compatible server under load",
    ),
    ("kernels", "bench"): ("kernels_bench", "time a kernel of your own, or an op of the catalog"),
    ("kernels", "check"): ("kernels_check", "check kernels of your own against their references"),
    ("kernels", "profile"): (
        "kernels_profile",
        "occupancy of your kernels, and what they wait for",
    ),
}
"""Command and kind -> module and description, for kinds that have their own options."""


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS)) + 2
    lines = [
        f"  {name:{width}}{text}\n  {'':{width}}$ {example}\n"
        for name, (text, example) in COMMANDS.items()
    ]
    parser = argparse.ArgumentParser(
        prog="engine",
        usage="%(prog)s COMMAND ...",
        description="LLM inference without PyTorch.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"commands (engine COMMAND --help):\n{''.join(lines)}",
    )
    parser.add_argument("--version", action="version", version=f"engine {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command and its arguments; without a command, print the help."""
    parser = _parser()
    options = parser.parse_args(argv)
    name = options.command
    if name is None:
        parser.print_help()
        parser.exit(0)
    if name not in COMMANDS:
        other = _OTHER_WORDS.get(name)
        known = ", ".join(COMMANDS)
        hint = did_you_mean(other or name, COMMANDS, f"commands: {known}")
        parser.exit(2, f"engine: there is no command {name!r:.100}{hint}\n")
    return options


def _kinds(command: Sequence[str]) -> str:
    """Return the lines of help that name a command's kinds; "" for a kind."""
    if tuple(command) in _SUBCOMMANDS:
        return ""
    lines = [
        f"  engine {' '.join(words):18}{text}\n"
        for words, (_, text) in _SUBCOMMANDS.items()
        if words[0] == command[0]
    ]
    return "with options of their own (--help):\n" + "".join(lines) if lines else ""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit with 0, 1 (the command failed) or 2 (invalid usage)."""
    try:
        prepare_streams()
    except EngineError as error:
        status = 1
        reason = f"engine: {error}"
    else:
        status, reason = _run(argv)
    if reason:
        with contextlib.suppress(OSError):
            print(reason, file=sys.stderr)
    discard_errors()
    sys.exit(status)


def _run(argv: Sequence[str] | None) -> tuple[int, str]:
    """Return the exit status, and a one-line reason if it is not 0."""
    name = "engine"
    try:
        try:
            options = _parse(argv)
            name = f"engine {options.command}"
            words = options.arguments
            module = options.command.replace("-", "_")
            description = COMMANDS[options.command][0]
            if (kind := (options.command, *words[:1])) in _SUBCOMMANDS:
                module, description = _SUBCOMMANDS[kind]
                name = f"{name} {words[0]}"
                words = words[1:]
            command = importlib.import_module(f"engine.commands.{module}")
            parser = CommandParser(
                prog=name,
                description=description,
                epilog=_kinds(kind),
                shown_defaults=getattr(command, "shown_defaults", dict),
            )
            command.add_arguments(parser)
            status = command.run(parser.read(words))
        except SystemExit as done:  # argparse has already printed help, the version or an error
            status = done.code if isinstance(done.code, int) else 2
        sys.stdout.flush()
    except EngineError as error:
        return 2, f"{name}: {error}"
    except UnicodeDecodeError as error:
        what = f"input must be valid {error.encoding}; {error.reason} at byte {error.start}"
        return 2, f"{name}: {what}"
    except KeyboardInterrupt:
        return 130, ""
    except BrokenPipeError:
        discard_output()  # the reader closed the pipe (`engine ... | head`): exit quietly
        return 1, ""
    except OSError as error:
        discard_output()
        return 1, f"{name}: {error}"
    return status, ""
