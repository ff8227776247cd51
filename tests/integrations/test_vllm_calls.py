"""Calls of the paged ops on vLLM's tensors, without vLLM: tensors against the NumPy mirrors."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from engine import reference  # noqa: E402
from engine.dtypes import BFLOAT16  # noqa: E402
from engine.integrations import vllm as plugin  # noqa: E402
from engine.integrations.torch._tensors import array_of, tensor_of  # noqa: E402
from engine.integrations.vllm import _calls  # noqa: E402
from engine.testing.tolerances import assert_close  # noqa: E402

_H, _K, _D, _BLOCK = 8, 2, 128, 16
_RULE = (_D**-0.5, 0, 0.0)


def _bfloat16(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32).astype(BFLOAT16)


def _batch(where):
    """Two requests that decode and three chunks, in pages that hold all their tokens."""
    rng = np.random.default_rng(3)
    lens = np.array([40, 17, 33, 300, 9], np.int32)
    tables = rng.permutation(5 * 20).astype(np.int32).reshape(5, 20)
    cache = _bfloat16(rng, 100, 2 * _K, _BLOCK, _D)
    starts = np.array([0, 20, 150, 159], np.int32)
    qkv = _bfloat16(rng, 2 + 159, _H + 2 * _K, _D)
    return [tensor_of(array).to(where) for array in (qkv, cache, tables, lens, starts)]


@pytest.mark.parametrize("num_decodes", [1, 2])
def test_slices_of_a_mixed_batch(where, num_decodes):
    """Lengths and tables of the chunks begin at any request: at any multiple of 4 bytes."""
    qkv, cache, tables, lens, starts = _batch(where)
    q = qkv[:, :_H]
    k, v = cache.split(_K, dim=1)
    out = torch.full((161, _H, _D), torch.nan, dtype=torch.bfloat16, device=where)
    one = num_decodes
    heads = q[:one], out[:one], k, v, None, None, None
    _calls.DECODE(*heads, tables[:one], lens[:one], 1, 1024, *_RULE)
    rest = tables[one : one + 3], lens[one : one + 3], starts
    heads = q[one : one + 159], out[one : one + 159], *heads[2:]
    _calls.PREFILL(*heads, *rest, 130, *_RULE)

    arrays = [array_of(x.cpu()) for x in (q.contiguous(), k.contiguous(), v.contiguous())]
    places = {"block_tables": array_of(tables.cpu()), "context_lens": array_of(lens.cpu())}
    first = {name: array[:one] for name, array in places.items()}
    want = reference.attention_decode(arrays[0][:one, None], *arrays[1:], **first)[:, 0]
    assert_close(array_of(out[:one].cpu()), want, reduction=_D + 300)
    chunks = {name: array[one : one + 3] for name, array in places.items()}
    want = reference.attention_prefill(
        arrays[0][one : one + 159], *arrays[1:], cu_seqlens_q=array_of(starts.cpu()), **chunks
    )
    assert_close(array_of(out[one : one + 159].cpu()), want, reduction=_D + 300)
    assert out[one + 159 :].isnan().all()


def test_layers_share_a_prepared_call(where):
    """Each layer's pages are read, not those of the layer whose call was prepared."""
    qkv, cache, tables, lens, starts = _batch(where)
    q, other = qkv[:159, :_H], cache.flip(0).contiguous()
    results = []
    for each in (cache, other):
        k, v = each.split(_K, dim=1)
        out = torch.empty(159, _H, _D, dtype=torch.bfloat16, device=where)
        heads = q, out, k, v, None, None, None
        _calls.PREFILL(*heads, tables[2:], lens[2:], starts, 130, *_RULE)
        results.append(out)
    k, v = (array_of(x.contiguous().cpu()) for x in other.split(_K, dim=1))
    want = reference.attention_prefill(
        array_of(q.contiguous().cpu()),
        *(k, v),
        cu_seqlens_q=array_of(starts.cpu()),
        block_tables=array_of(tables[2:].contiguous().cpu()),
        context_lens=array_of(lens[2:].contiguous().cpu()),
    )
    assert_close(array_of(results[1].cpu()), want, reduction=_D + 300)
    assert not torch.equal(*results)


def test_store(where):
    """Rows of the fused projection, more of them than slots."""
    qkv, cache, *_ = _batch(where)
    k, v = cache.split(_K, dim=1)
    slots = torch.tensor([5, 1599, -1, 33], device=where)
    new_k, new_v = qkv[:4, _H : _H + _K], qkv[:4, _H + _K :]
    before = cache.clone()
    _calls.STORE(new_k, new_v, k, v, None, None, slots)
    for row, slot in ((0, 5), (1, 1599), (3, 33)):
        block, offset = divmod(slot, _BLOCK)
        assert torch.equal(k[block, :, offset], new_k[row])
        assert torch.equal(v[block, :, offset], new_v[row])
        before[block, :, offset] = cache[block, :, offset]
    assert torch.equal(before, cache)


class _Custom(SimpleNamespace):
    """Member CUSTOM of vLLM's registry of attention backends."""

    def is_overridden(self):
        return False


def _stub_registry(monkeypatch, custom):
    """Put a vLLM into `sys.modules` that holds its registry, and no layers."""
    for module in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, module)
    registered = []
    name = "vllm.v1.attention.backends.registry"
    registry = ModuleType(name)
    registry.AttentionBackendEnum = SimpleNamespace(CUSTOM=custom)
    registry.register_backend = lambda *backend: registered.append(backend)
    parents = [name.rsplit(".", n)[0] for n in range(1, 5)]
    for module in (registry, *(ModuleType(parent) for parent in parents)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return registered


def test_a_vllm_without_our_layers_keeps_its_own(monkeypatch, caplog):
    registered = _stub_registry(monkeypatch, _Custom())
    monkeypatch.delitem(sys.modules, "engine.integrations.vllm.layers", raising=False)
    monkeypatch.setenv("ENGINE_VLLM_LAYERS", "1")
    plugin.register()
    assert len(registered) == 1
    assert "engine's kernels need vLLM 0.24 or 0.33; not registered: " in caplog.text


def test_a_vllm_with_another_registry_keeps_its_attention(monkeypatch, caplog):
    registered = _stub_registry(monkeypatch, object())
    monkeypatch.setenv("ENGINE_VLLM_LAYERS", "1")
    plugin.register()
    assert registered == [] and len(caplog.records) == 1
    assert "not registered: 'object' object has no attribute 'is_overridden'" in caplog.text
