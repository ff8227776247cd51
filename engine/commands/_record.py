"""Writes benchmark results as JSON, together with the conditions of the run."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine import __version__, env
from engine.device import Device
from engine.errors import ConfigError
from engine.model_files import excerpt

__all__ = ["check_output_file", "commit_of", "conditions", "write_record"]


def check_output_file(file: Path, option: str = "--json") -> None:
    """Raise `ConfigError` if an option's file cannot be written; call it before measuring."""
    if file.is_dir():
        raise ConfigError(f"{option} must name a file; got the folder {excerpt(file)}")
    if not file.parent.is_dir():
        raise ConfigError(f"{option} must name a file in an existing folder; got {excerpt(file)}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{option} must name a writable file; got {excerpt(file)}")


def commit_of(folder: Path) -> str:
    """Return the commit of the repository that a folder is in; "" if it is in none."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        return ""


def conditions(device: Device) -> dict[str, str]:
    """Return the conditions of a run: device, date, version, commit, command line."""
    if device.is_cuda:
        card = device.xp.cuda.runtime.getDeviceProperties(device.index)["name"].decode()
    else:
        card = f"{platform.machine()}, {os.cpu_count()} cores"
    commit = env.commit()
    folder = Path(__file__).parents[2]
    if not commit and (folder / ".git").exists():
        commit = commit_of(folder)
    return {
        "card": card,
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "commit": commit or "unknown",
        "command": "engine " + shlex.join(_without_keys(sys.argv[1:])),
    }


def _without_keys(words: list[str]) -> list[str]:
    """Return the words of a command line with the value of --api-key replaced by "..."."""
    shown = list(words)
    for index, word in enumerate(words):
        name, equals, _ = word.partition("=")
        # argparse also accepts abbreviated options.
        if len(name) > 2 and "--api-key".startswith(name):
            if equals:
                shown[index] = f"{name}=..."
            elif index + 1 < len(words):
                shown[index + 1] = "..."
    return shown


def write_record(file: Path, device: Device, record: dict[str, Any]) -> None:
    """Write the conditions and `record` to a file.

    Raises
    ------
    ConfigError
        If it cannot be written.
    """
    try:
        file.write_text(json.dumps({**conditions(device), **record}, indent=1) + "\n")
    except (OSError, ValueError) as error:  # ValueError: an invalid path
        raise ConfigError(f"--json {excerpt(file)} cannot be written: {error}") from error
