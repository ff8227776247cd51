"""`python -m tests.quality.text > FILE`: the text that quality is measured on; see make_text.py."""

from __future__ import annotations

import gzip
import hashlib
import sys
from pathlib import Path

__all__ = ["FILE", "SHA256", "digest", "text"]

FILE = Path(__file__).parent / "news_from_nowhere.txt.gz"
SHA256 = "a3ff0ce8ba71bd0ec00e4bcacbf88dfeca09f9abaeffa95656d994e319edf7aa"


def digest(data: bytes) -> str:
    """Return the sha256 of some bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def text() -> str:
    """Return the text, after checking that it is the one whose figures are published."""
    data = gzip.decompress(FILE.read_bytes())
    if digest(data) != SHA256:
        raise SystemExit(f"{FILE.name} must have the sha256 {SHA256}; got {digest(data)}")
    return data.decode()


if __name__ == "__main__":
    sys.stdout.write(text())
