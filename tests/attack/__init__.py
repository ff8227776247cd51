"""What strangers can do to a running server, in figures: `python -m tests.attack [KIND ...]`.

Each kind is a module with `attack(target, scale)`, which returns a list of `Figure`. `target` is a
server of a tiny model in processes of its own, on a free port of the loopback, which the tool
starts and ends (see `target.py`). `scale` multiplies how much is sent: 1 is the whole attack; tests
of the suite use less. To add a kind, add its name to `KINDS`.
"""

from __future__ import annotations

KINDS = ("framing", "bodies", "crowd", "frames", "answers")
"""Modules of this package that attack, in the order in which they are run."""
