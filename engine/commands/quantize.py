"""`engine quantize MODEL OUT --format FORMAT`: write a quantized model."""

from __future__ import annotations

import argparse
import sys

from engine.checks import shown_size
from engine.errors import ConfigError
from engine.quantization.quantize_model import quantize
from engine.weights.compressed_tensors import STORABLE

__all__ = ["add_arguments", "run"]

_CALIBRATION_TOKENS = 32768


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("model", help="folder of 16 or 32 bits, .gguf file, or hub id")
    parser.add_argument("out", help="output folder; must be new or empty")
    names = f"int4 (in groups of 128), {', '.join(STORABLE)}"
    parser.add_argument("--format", required=True, metavar="FORMAT", help=names)
    parser.add_argument(
        "--calibrate", metavar="FILE", help="round with GPTQ, calibrated on this UTF-8 text"
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        help=f"number of calibration tokens (default: {_CALIBRATION_TOKENS})",
    )
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="NAME",
        action="extend",
        help='linear layers to leave unquantized: names, or "re:" followed by a regular expression',
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or auto")


def run(arguments: argparse.Namespace) -> int:
    """Write the quantized model and print its folder."""
    if arguments.calibration_tokens is not None and arguments.calibrate is None:
        raise ConfigError(
            f"--calibration-tokens needs --calibrate; got {arguments.calibration_tokens} alone"
        )
    tokens = arguments.calibration_tokens
    out = quantize(
        arguments.model,
        arguments.out,
        format=arguments.format,
        calibrate=arguments.calibrate,
        calibration_tokens=_CALIBRATION_TOKENS if tokens is None else tokens,
        ignore=arguments.ignore,
        device=arguments.device,
        progress=sys.stderr.isatty(),
    )
    print(out)
    size = shown_size(sum(path.stat().st_size for path in out.iterdir()))
    print(f"{size} in {arguments.format}", file=sys.stderr)
    return 0
