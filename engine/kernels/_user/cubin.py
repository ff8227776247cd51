"""What a cubin states about its kernels that ptxas does not report."""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = ["max_threads"]

# An attribute of section .nv.info.<kernel>: format and code, bytes of the value.
_MAX_THREADS = b"\x04\x05\x0c\x00"


def max_threads(cubin: bytes, entry: str) -> int:
    """Return the threads of a block that `__launch_bounds__` of a kernel allows; 0 without it."""
    for name, content in _sections(cubin):
        if name == f".nv.info.{entry}" and (at := content.find(_MAX_THREADS)) >= 0:
            x, y, z = struct.unpack_from("<III", content, at + len(_MAX_THREADS))
            return int(x * y * z)
    return 0


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<II4Q", elf, table + index * size) for index in range(count)]
    for head in heads:
        start = heads[names][4] + head[0]
        name = elf[start : elf.index(b"\0", start)].decode()
        yield name, elf[head[4] : head[4] + head[5]]
