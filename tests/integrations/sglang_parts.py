"""Pools, layers and batches of SGLang for tests: its own where it imports, else stand-ins.

Of SGLang's many dependencies most need a GPU. The stand-ins have the fields of sglang 0.5.23 that
the backend reads; `test_sglang.py` compares their names with SGLang's sources.
"""

from __future__ import annotations

import enum
import sys
import warnings
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

try:
    with warnings.catch_warnings():  # SGLang's own, of deprecations
        warnings.simplefilter("ignore")
        import sglang.srt.layers.attention.attention_registry
        import sglang.srt.mem_cache.memory_pool  # noqa: F401
    IS_REAL = True
except ImportError:
    IS_REAL = False


class _AttentionBackend:
    pass


class _AttentionType(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


@dataclass
class _KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None

    @classmethod
    def for_batch(cls, forward_batch: Any, *, swa_loc: torch.Tensor | None = None) -> Any:
        return cls(forward_batch.out_cache_loc, swa_loc)


class _SWAKVPool:
    pass


class _ForwardMode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2
    IDLE = 4
    TARGET_VERIFY = 5

    def is_decode_or_idle(self) -> bool:
        return self in (_ForwardMode.DECODE, _ForwardMode.IDLE)


_BACKENDS: dict[str, Any] = {}
_CHOICES: list[str] = ["triton"]


def _register(name: str) -> Any:
    return lambda make: _BACKENDS.setdefault(name, make)


_STAND_INS = {
    "arg_groups.choices": {
        "ATTENTION_BACKEND_CHOICES": _CHOICES,
        "add_attention_backend_choices": _CHOICES.extend,
    },
    "layers.attention.attention_registry": {
        "ATTENTION_BACKENDS": _BACKENDS,
        "register_attention_backend": _register,
    },
    "layers.attention.base_attn_backend": {"AttentionBackend": _AttentionBackend},
    "layers.radix_attention": {"AttentionType": _AttentionType},
    "mem_cache.memory_pool": {"KVWriteLoc": _KVWriteLoc},
    "mem_cache.swa_memory_pool": {"SWAKVPool": _SWAKVPool},
    "model_executor.forward_batch_info": {"ForwardMode": _ForwardMode},
    "runtime_context": {"get_parallel": lambda: None},
}


def _import() -> dict[str, Any]:
    """Import the backend, on stand-ins if need be, which then leave `sys.modules` again.

    `stand_ins` holds them by name, for code that imports SGLang later.
    """
    added = []
    if not IS_REAL:
        for path, names in _STAND_INS.items():
            parts = ["sglang", "srt", *path.split(".")]
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in sys.modules:
                    sys.modules[name] = ModuleType(name)
                    added.append(name)
            vars(sys.modules[name]).update(names)
    import engine.integrations.sglang.attention as backend

    found: dict[str, Any] = {"backend": backend}
    for path, names in _STAND_INS.items():
        module = sys.modules.get(f"sglang.srt.{path}")
        assert module is not None
        found |= {name: getattr(module, name) for name in names}
    found["stand_ins"] = {name: sys.modules.pop(name) for name in added}
    return found


parts = SimpleNamespace(**_import())


class Pool:
    """Slots of keys and values, (slots, K, D) a layer; or pages, as SGLang's HND layout."""

    def __init__(self, slots: int, heads: int, dim: int, page: int, is_hnd: bool = False) -> None:
        shape = (slots // page, heads, page, dim) if is_hnd else (slots, heads, dim)
        self.k, self.v = (torch.randn(shape) for _ in range(2))
        self._page = page

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v

    def slots(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return `buffer` as (slots, K, D), a view or a copy."""
        return buffer if buffer.dim() == 3 else buffer.transpose(1, 2).flatten(0, 1)

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        for buffer, new, scale in ((self.k, k, k_scale), (self.v, v, v_scale)):
            if scale is not None:
                new = new / scale
            if buffer.dim() == 3:
                buffer[loc_info.loc] = new.to(buffer.dtype)
            else:
                buffer[loc_info.loc // self._page, :, loc_info.loc % self._page] = new


class WindowPool(parts.SWAKVPool):
    """Two pools, of which odd layers use the second, by translated slots."""

    def __init__(self, slots: int, heads: int, dim: int, page: int) -> None:
        self.pools = [Pool(slots, heads, dim, page) for _ in range(2)]
        pages = torch.arange(slots // page).flip(0)  # page p of the first is n - 1 - p here
        self.full_to_swa_index_mapping = (pages[:, None] * page + torch.arange(page)).flatten()
        self.swa_layer_nums = 1
        self.layers_mapping = {0: (0, False), 1: (0, True)}

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.pools[layer_id].k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.pools[layer_id].v

    def set_kv_buffer(self, layer: Any, loc_info: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        loc = loc_info.swa_loc if layer.layer_id else loc_info.loc
        self.pools[layer.layer_id].set_kv_buffer(layer, parts.KVWriteLoc(loc), k, v)


def runner(pool: Any, tokens: torch.Tensor, page: int, **changes: Any) -> Any:
    """Return a ModelRunner whose request i has the slots tokens[i]."""
    fields = {
        "page_size": page,
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "device": tokens.device,
        "use_mla_backend": False,
        "attention_chunk_size": None,
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "kv_index_translator": SimpleNamespace(is_translating=False),
        "token_to_kv_pool": pool,
        "req_to_token_pool": SimpleNamespace(req_to_token=tokens),
    }
    return SimpleNamespace(**(fields | changes))


def layer(heads: int, kv_heads: int, dim: int, layer_id: int = 0, **changes: Any) -> Any:
    """Return the attributes of a RadixAttention layer."""
    fields = {
        "tp_q_head_num": heads,
        "tp_k_head_num": kv_heads,
        "head_dim": dim,
        "qk_head_dim": dim,
        "v_head_dim": dim,
        "scaling": dim**-0.5,
        "layer_id": layer_id,
        "logit_cap": 0.0,
        "logit_capping_method": "tanh",
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "attn_type": parts.AttentionType.DECODER,
        "xai_temperature_len": -1,
        "k_scale": None,
        "v_scale": None,
        "k_scale_float": None,
        "v_scale_float": None,
    }
    return SimpleNamespace(**(fields | changes))


def batch(requests: list[int], lengths: list[int], new: list[int] | None, tokens: Any) -> Any:
    """Return a ForwardBatch; `new` tokens a request of an extend batch, None to decode one."""
    counts = [1] * len(lengths) if new is None else new
    where = [
        tokens[request, length - count : length]
        for request, length, count in zip(requests, lengths, counts, strict=True)
    ]
    mode = parts.ForwardMode.DECODE if new is None else parts.ForwardMode.EXTEND
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(requests),
        req_pool_indices=torch.tensor(requests),
        seq_lens=torch.tensor(lengths),
        out_cache_loc=torch.cat(where).long(),
        out_cache_loc_is_physical=False,
        extend_seq_lens=None if new is None else torch.tensor(new),
        extend_seq_lens_cpu=new,
    )
