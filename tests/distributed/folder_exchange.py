"""Bytes exchanged between processes through files in a folder; a rank that ends is noticed."""

from __future__ import annotations

import os
import time
from pathlib import Path

from engine.errors import RankError


class FolderExchange:
    """`exchange` of CudaCollectives: takes bytes, returns what each rank gave."""

    def __init__(self, folder: str, rank: int, size: int, *, timeout: float = 60.0) -> None:
        self._folder, self._rank, self._size = Path(folder), rank, size
        self._timeout, self._count = timeout, 0

    def __call__(self, data: bytes) -> list[bytes]:
        self._count += 1
        names = [self._folder / f"{self._count}.{rank}" for rank in range(self._size)]
        unfinished = names[self._rank].with_suffix(f".{self._rank}.part")
        unfinished.write_bytes(data)
        os.replace(unfinished, names[self._rank])
        end = time.monotonic() + self._timeout
        while missing := [rank for rank, name in enumerate(names) if not name.exists()]:
            if time.monotonic() > end:
                raise RankError(f"ranks {missing} gave nothing in exchange {self._count}")
            time.sleep(0.002)
        return [name.read_bytes() for name in names]
