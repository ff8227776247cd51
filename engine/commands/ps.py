"""`engine ps`: list the servers that run on this machine."""

from __future__ import annotations

import argparse
import sys
import time

from engine.checks import shown_size
from engine.commands._table import print_table
from engine.model_files import excerpt
from engine.server.child import duration
from engine.server.running import running_servers, tree_memory

__all__ = ["add_arguments", "run"]

_HEADS = ("MODEL", "ADDRESS", "PID", "MEMORY", "UPTIME", "STATE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no options."""
    parser.epilog = "MEMORY is that of the host, over all processes of a server."


def run(arguments: argparse.Namespace) -> int:
    """Print a table of this user's `engine serve` processes."""
    servers = running_servers()
    if not servers:
        print("no server is running: engine serve MODEL starts one", file=sys.stderr)
        return 0
    rows = [
        (
            excerpt(server.model),
            server.url,
            str(server.pid),
            shown_size(tree_memory(server.pid)),
            duration(time.time() - server.since),
            "ready" if server.is_ready else "loading",
        )
        for server in servers
    ]
    print_table(_HEADS, rows)
    return 0
