"""`python -m tests.quality.make_text 3261.txt`: make the text that quality is measured on.

The text is the beginning of "News from Nowhere" (1890) by William Morris, who died in 1896: it is
in the public domain everywhere. The source is Project Gutenberg's transcription, eBook 3261 (its
file 3261.txt is also in GITenberg's repository of that number, at commit 79bd67b), without Project
Gutenberg's name, header and licence, as its terms ask. Lines of a paragraph are joined. SmolLM2's
tokenizer makes 52,754 tokens of it.
"""

from __future__ import annotations

import argparse
import gzip
import re
from pathlib import Path

from tests.quality.text import FILE, digest

_FIRST, _END = "CHAPTER I: DISCUSSION AND BED", "***END OF THE PROJECT GUTENBERG EBOOK"
_MIN_CHARS = 223_000


def make_text(source: str) -> str:
    """Return the paragraphs of the book, each as one line, up to the limit."""
    body = source.replace("\r\n", "\n")
    body = body[body.index(_FIRST) : body.index(_END)]
    text = ""
    for paragraph in re.split(r"\n\s*\n", body):
        if len(text) >= _MIN_CHARS:
            return text
        # The transcription breaks lines after the hyphens of compound words.
        line = re.sub(r"-\n\s*", "-", paragraph.strip())
        line = re.sub(r"\s+", " ", line)
        text += f"{line}\n\n" if line else ""
    raise SystemExit(f"the book has only {len(text)} characters")


def main() -> None:
    """Write the file beside this one."""
    parser = argparse.ArgumentParser(prog="python -m tests.quality.make_text", description=__doc__)
    parser.add_argument("source", type=Path, help="Project Gutenberg's 3261.txt")
    text = make_text(parser.parse_args().source.read_text(encoding="ascii"))
    data = text.encode()
    FILE.write_bytes(gzip.compress(data, 9, mtime=0))
    sizes = f"{len(data)} bytes, {FILE.stat().st_size} compressed"
    print(f"{FILE.name}: {sizes}, sha256 {digest(data)}")


if __name__ == "__main__":
    main()
