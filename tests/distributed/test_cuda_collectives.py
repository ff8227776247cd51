"""CudaCollectives: two processes, on two GPUs or, in turns, on one."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
SIZE = 2


def _run(folder, scenario):
    """Return (exit status, output) of each rank."""
    command = [sys.executable, "-m", "tests.distributed.cuda_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(folder), str(r), str(SIZE), scenario],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(SIZE)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize("scenario", ["sums", "gathers", "graphs"])
def test_matches_the_mirrors(cp, tmp_path, scenario):
    for status, output in _run(tmp_path, scenario):
        assert status == 0, output
        assert output.splitlines()[-1] == "ok"


def test_a_dead_rank_is_named_within_the_time_out(cp, tmp_path):
    (status, output), (dead, _) = _run(tmp_path, "dead")
    assert status == 0, output
    assert dead == 9
