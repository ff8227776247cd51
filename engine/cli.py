"""The command line: `engine generate | chat | pull | doctor | bench | kernels`.

Only the chosen command's module is imported, so that `engine --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from engine._version import __version__
from engine.commands._streams import discard_output, prepare_streams
from engine.errors import EngineError

__all__ = ["main"]

COMMANDS = {
    "generate": "continue a prompt given as argument, file or standard input",
    "chat": "talk to a model in the terminal",
    "pull": "download a model into the cache",
    "doctor": "check this machine and say what to install next",
    "bench": "measure latency, throughput, prefill or startup of a model",
    "kernels": "list every kernel: tier, dtypes, registers, shared memory, cache state",
}


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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 (the command failed) or 2 (bad usage)."""
    try:
        prepare_streams()
    except EngineError as error:
        sys.exit(f"engine: {error}")
    options = _parser().parse_args(argv)
    command = importlib.import_module(f"engine.commands.{options.command}")
    parser = argparse.ArgumentParser(
        prog=f"engine {options.command}", description=COMMANDS[options.command]
    )
    command.add_arguments(parser)
    arguments = parser.parse_args(options.arguments)
    try:
        status = command.run(arguments)
        sys.stdout.flush()
    except EngineError as error:
        print(f"engine {options.command}: {error}", file=sys.stderr)
        status = 2
    except UnicodeDecodeError as error:
        what = f"input must be valid {error.encoding}; {error.reason} at byte {error.start}"
        print(f"engine {options.command}: {what}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        discard_output()  # the reader closed the pipe (`engine ... | head`): exit quietly
        status = 1
    except OSError as error:
        print(f"engine {options.command}: {error}", file=sys.stderr)
        discard_output()
        status = 1
    sys.exit(status)
