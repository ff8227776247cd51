"""docs/headers.md: what the CUDA headers of `cuda_src/common/` offer, from their comments.

`python -m tests.headers` writes the page; `tests/kernels/test_headers.py` checks it.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from engine import kernels
from engine.kernels._tools.headers import Header

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "headers.md"
EXAMPLES = ROOT / "examples" / "headers"
_HEAD = """\
# CUDA headers

What a kernel of your own ([your_kernel.md](your_kernel.md)) may include, as
`#include "common/reduce.cuh"`. Each header compiles on its own. Names are PTX's or CUTLASS's.
`engine kernels headers [NAME]` prints the same, and `kernels.headers()` returns it.

The names, parameters and contracts on this page are stable: they change only with the engine's
major version. Other headers of `cuda_src/common/`, and names that begin with `ENGINE_`, are
internal. Shared-memory addresses are 32-bit (`smem_address`), as in PTX. Unless a comment says
otherwise, any thread may call a function alone.

Every example below is an op in [ops.py](../examples/headers/ops.py), with its NumPy formula.
`python -m tests.headers` writes this page from the headers' comments.

"""


def page() -> str:
    """Return the page: a table of the headers, then each with its declarations and an example."""
    headers = kernels.headers().values()
    rows = ["| header | for | contents |\n|---|---|---|\n"]
    for header in headers:
        title = header.title.replace("|", "\\|")
        rows.append(f"| [{header.name}](#{header.name}) | {header.requires} | {title} |\n")
    return _HEAD + "".join(rows) + "".join(map(_section, headers))


def _section(header: Header) -> str:
    example = (EXAMPLES / f"{header.name}.cu").read_text()
    return (
        f"\n## {header.name}\n\n`{header.include}`: {header.requires}.\n\n"
        f"```text\n{header.comment}\n```\n\n```cuda\n{_declarations(header)}```\n\n"
        f"Example, [{header.name}.cu](../examples/headers/{header.name}.cu):\n\n"
        f"```cuda\n{example}```\n"
    )


def _declarations(header: Header) -> str:
    lines = []
    for section, members in groupby(header.declarations, lambda member: member.section):
        lines += [f"// ---- {section} ----", ""] if section else []
        for comment, group in groupby(members, lambda member: member.comment):
            lines += [f"// {line}" for line in comment.splitlines()]
            lines += [f"{member.text};" for member in group]
            lines.append("")
    return "\n".join(lines[:-1]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
