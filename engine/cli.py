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
from engine.commands._streams import discard_errors, discard_output, prepare_streams
from engine.errors import EngineError

__all__ = ["main"]

COMMANDS = {
    "generate": "continue a prompt from an argument, a file or standard input",
    "chat": "talk to a model in the terminal",
    "serve": "serve a model over HTTP: OpenAI's and Anthropic's protocols, and a web page",
    "run-batch": "answer the requests in an OpenAI batch file",
    "pull": "download a model into the cache",
    "quantize": "write a model with 8- or 4-bit weights, for this engine and others",
    "stage": "run one pipeline stage for an engine on another host",
    "doctor": "check this machine and say what to install next",
    "plan": "predict a model's memory use and speed on GPUs you do not need to have",
    "bench": "measure latency, throughput, prefill or startup of a model",
    "eval": "measure a model's quality: perplexity on a text, KL divergence from another model",
    "kernels": "list every kernel: tier, dtypes, registers, shared memory, cache state",
}
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
    parser = argparse.ArgumentParser(
        prog="engine",
        description="LLM inference without PyTorch.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "".join(f"  {name:10}{text}\n" for name, text in COMMANDS.items()),
    )
    parser.add_argument("--version", action="version", version=f"engine {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


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
            options = _parser().parse_args(argv)
            name = f"engine {options.command}"
            words = options.arguments
            module = options.command.replace("-", "_")
            description = COMMANDS[options.command]
            if (kind := (options.command, *words[:1])) in _SUBCOMMANDS:
                module, description = _SUBCOMMANDS[kind]
                name = f"{name} {words[0]}"
                words = words[1:]
            command = importlib.import_module(f"engine.commands.{module}")
            parser = argparse.ArgumentParser(
                prog=name,
                description=description,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                epilog=_kinds(kind),
            )
            command.add_arguments(parser)
            status = command.run(parser.parse_args(words))
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
