"""What a product may send to other ranks is what the group's next operation sums."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

import engine
from engine import kernels
from engine.layers.batch import ForwardBatch
from tests.distributed.golden import CASES, GOLDEN, write_checkpoint
from tests.distributed.test_models import NOT_BY_2, is_refused

IDS = [5, 17, 3, 99, 41, 8, 2, 60, 77, 12, 1]
# Norms sum their branches, but BitNet's products have norms of their own, and two branches of
# LongCat's layers meet.
SEND_NOTHING = ("bitnet", "longcat_flash")


class WatchedRank:
    """Rank 0 of two with equal parts; checks that `sent`, a product with peers, is summed next."""

    rank, size = 0, 2
    peers = SimpleNamespace(sent=None)

    def __init__(self):
        self.sent = None
        self.num_sent = 0

    def product(self, *args, peers=None, **options):
        y = self._gemm(*args, **options)
        if peers is not None:
            assert self.sent is None
            assert peers is self.peers
            self.sent = y
            self.num_sent += 1
        return y

    _gemm = staticmethod(kernels.gemm)

    def _take(self, x):
        sent, self.sent = self.sent, None
        if sent is not None:
            assert x is not None
            assert x.shape == sent.shape
            assert x.size == 0 or np.shares_memory(x, sent)

    def all_reduce(self, x, *, out=None):
        self._take(x)
        return kernels.all_reduce(x, [x, 0 * x], out=out)

    def all_reduce_rmsnorm(self, x, residual, weight, eps, *, out=None):
        self._take(x)
        return kernels.rmsnorm(
            x, weight, eps=eps, residual=residual, out=out, residual_out=residual
        )

    def all_gather(self, x, *, axis=-1, out=None):
        self._take(None)
        whole = np.concatenate([x, x], axis=axis)
        return whole if out is None else np.copyto(out, whole) or out

    def broadcast(self, x, *, root=0):
        self._take(None)
        return x

    def barrier(self, name): ...
    def check(self, doing=""): ...
    def abort(self): ...
    def close(self): ...


@pytest.fixture
def rank(monkeypatch):
    """Return a rank that watches the products of `kernels.gemm`."""
    watched = WatchedRank()
    monkeypatch.setattr(kernels, "gemm", watched.product)
    return watched


@pytest.mark.parametrize(
    ("case", "deterministic"),
    [
        (case, deterministic)
        for case in CASES
        for deterministic in (False, True)
        if case not in NOT_BY_2 and not is_refused(case, 2, deterministic)
    ],
)
def test_sums_of_every_family(rank, case, deterministic, tmp_path):
    options = {"device": "cpu", "progress": False, "deterministic": deterministic}
    with engine.load(write_checkpoint(case, tmp_path), collectives=rank, **options) as model:
        cache = model.new_cache(2, 32)
        for ids, logits in (
            ([IDS, IDS], "all"),
            ([IDS[:5], IDS[2:7]], "last"),
            ([[1], [2]], "last"),
        ):
            model.step(np.array(ids), cache, logits=logits)
            assert rank.sent is None  # not even after the last layer
        sums_in_norms = not model.decoder.parts.can_fuse
    assert (rank.num_sent > 0) == (sums_in_norms and not case.startswith(SEND_NOTHING))
    if case == "llama" and not deterministic:
        layers = json.loads((GOLDEN / "models" / "llama.json").read_text())["config"]
        assert rank.num_sent == 3 * (2 * layers["num_hidden_layers"] - 1)


def test_features_sum_what_has_been_sent(rank, tmp_path):
    """The norm after them sums the same output once more, of which no rows have been sent."""
    options = {"device": "cpu", "progress": False}
    with engine.load(write_checkpoint("llama", tmp_path), collectives=rank, **options) as model:
        decoder = model.decoder
        cfg = decoder.config
        shape = (cfg.num_layers, 2, 2, cfg.num_kv_heads, 16, cfg.head_dim)
        batch = ForwardBatch.build([IDS], [0], [[1, 0]], 16, logits="all")
        hidden = []
        for layers in ((), range(cfg.num_layers + 1)):
            features = {n: np.empty((len(IDS), cfg.hidden_size), np.float32) for n in layers}
            pages = np.zeros(shape, np.float32)
            own = dataclasses.replace(batch, features=features)
            hidden.append(decoder.hidden_states(own, pages))
            assert rank.sent is None
    assert rank.num_sent == 2 * (2 * cfg.num_layers - 1)
    np.testing.assert_array_equal(*hidden)
