"""Size in bytes of a model's weights, and a check that they fit on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from engine.cache.memory_pool import device_memory, format_bytes
from engine.config import ModelConfig
from engine.device import CPU, Device
from engine.errors import OutOfMemoryError
from engine.loading.weight_table import XIELU_KINDS, weight_shapes
from engine.models.family import SECOND
from engine.models.rope_tables import rope_bytes
from engine.weights import FORMATS, WHOLE, Format, Shard, dense_format
from engine.weights.formats import GGUF_FORMATS, TILE_ROWS

__all__ = ["is_expert", "is_quantized", "quantized_formats", "weight_bytes", "weight_dtype"]
__all__ += ["weight_room"]

_MAX_ROPE_BYTES = 8 << 30  # 16 million positions of 128 features
# One number per expert, head or layer, kept exact.
_FLOAT32_KINDS = (
    *("router_correction", "router_scale", "sinks", *XIELU_KINDS, "delta_decay", "delta_dt"),
    *("mamba_decay", "mamba_skip", "mamba_step"),
)
_NONE: Mapping[str, Format] = MappingProxyType({})
_EXPERT_KINDS = ("experts_gate_up", "experts_down")
_QUANTIZED_KINDS = (
    *("qkv", "o", "gate_up", "up", "down", "shared_gate_up", "shared_down"),
    *("delta_in", "delta_out", "lightning_in", "lightning_out"),  # delta_*_up: narrower than blocks
    *("conv_in", "conv_out", "mamba_in", "mamba_out"),
    *("mla_in", "mla_q_up", "mla_out"),  # not mla_kv_up: its heads are multiplied one by one
    *(SECOND + kind for kind in ("mla_in", "mla_q_up", "mla_out", "gate_up", "down")),
    *("moe_latent_in", "moe_latent_out"),
    *_EXPERT_KINDS,
)


def weight_dtype(name: str, dtype: str) -> str:
    """Return the dtype of weight `name` in a model of dtype `dtype`.

    Examples
    --------
    >>> [weight_dtype(f"layers.0.{kind}", "float16") for kind in ("qkv", "router_correction")]
    ['float16', 'float32']
    """
    return "float32" if name.rpartition(".")[2] in _FLOAT32_KINDS else dtype


def is_quantized(name: str) -> bool:
    """Tell whether the `quantization` option applies to weight `name`, a matrix of a layer.

    Embeddings, norms, biases and routers are never quantized; the output layer may get another
    format (`quantized_formats`).

    Examples
    --------
    >>> [is_quantized(name) for name in ("layers.0.qkv", "layers.0.qkv_bias", "lm_head")]
    [True, False, False]
    """
    return name.rpartition(".")[2] in _QUANTIZED_KINDS


def is_expert(name: str) -> bool:
    """Tell whether weight `name` holds the matrices of all experts."""
    return name.rpartition(".")[2] in _EXPERT_KINDS


def quantized_formats(config: ModelConfig, form: Format, shard: Shard = WHOLE) -> dict[str, Format]:
    """Return the format of every weight of a shard that the `quantization` option applies to.

    Expert GEMMs need 16-bit activations, so for experts "int8" means "int8_g128". Experts whose
    rows do not fill whole tiles are not quantized. With a .gguf format, the output layer, tied or
    not, gets llama.cpp's choice: "q8_0" if `form` is "q8_0" or a row does not consist of whole
    super-blocks, else "q6_k".
    """
    shapes = weight_shapes(config, shard)
    formats = {name: form for name in shapes if is_quantized(name)}
    for name in (name for name in formats if is_expert(name)):
        formats[name] = FORMATS["int8_g128"] if form.name == "int8" else form
    formats = {
        name: chosen
        for name, chosen in formats.items()
        if not (is_expert(name) and chosen.is_packed and shapes[name][1] % TILE_ROWS)
    }
    if form.name in GGUF_FORMATS and "lm_head" in shapes:
        is_q8 = form.name == "q8_0" or config.hidden_size % FORMATS["q6_k"].super_block
        formats["lm_head"] = FORMATS["q8_0" if is_q8 else "q6_k"]
    return formats


def weight_bytes(
    config: ModelConfig, dtype: str, shard: Shard = WHOLE, formats: Mapping[str, Format] = _NONE
) -> int:
    """Return the total bytes of all weights, each in its format from `formats`, else in `dtype`.

    Tied embeddings count once.

    Examples
    --------
    >>> weight_bytes(ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128), "float16")
    23744
    """
    shapes = weight_shapes(config, shard)
    if config.tie_word_embeddings and "lm_head" not in formats:
        shapes.pop("lm_head", None)
    return sum(
        (formats.get(name) or dense_format(weight_dtype(name, dtype))).num_bytes(shape)
        for name, shape in shapes.items()
    )


@contextmanager
def weight_room(
    config: ModelConfig,
    device: Device,
    dtype: str,
    *,
    shard: Shard = WHOLE,
    max_model_len: int = 0,
    formats: Mapping[str, Format] = _NONE,
) -> Iterator[None]:
    """Raise if the weights allocated in the `with` block do not fit on the device.

    Includes the rope tables for sequences of `max_model_len` tokens. They have a separate limit,
    since two numbers in an untrusted config determine their size.

    Raises
    ------
    OutOfMemoryError
        If the weights do not fit, or the rope tables exceed 8 GiB. The message gives the bytes
        needed, free and used by others, and suggests an option that would fit.
    """
    tables = rope_bytes(config, max_model_len)
    if tables > _MAX_ROPE_BYTES:
        raise OutOfMemoryError(
            f"rope tables must have at most {format_bytes(_MAX_ROPE_BYTES)}; they would have "
            f"{format_bytes(tables)} for max_model_len={max_model_len}. What would fit: "
            f"max_model_len={max_model_len * _MAX_ROPE_BYTES // tables}"
        )
    names = dict.fromkeys(form.name for form in formats.values())
    what = f"of weights in {', '.join((*names, dtype))}"
    if tables:
        what += f" and of rope tables ({format_bytes(tables)} for max_model_len={max_model_len})"

    def text(place: Device, needed: int) -> str:
        total, free = device_memory(place)
        said = (
            f"{place} has no room for {format_bytes(needed)} {what}: of {format_bytes(total)} in "
            f"total, others use {format_bytes(total - free)} and {format_bytes(free)} are free"
        )
        half = weight_bytes(config, "bfloat16", shard, formats)
        if dtype == "float32" and half + tables <= free:
            said += '. What would fit: dtype="bfloat16"'
        elif 0 < (room := free - (needed - tables)) < tables:
            said += f". What would fit: max_model_len={max(1, max_model_len * room // tables)}"
        return said

    needed = weight_bytes(config, dtype, shard, formats) + tables
    # Check host memory in advance: the host overcommits and kills the process on first touch. A
    # GPU fails the allocation instead, and its free memory omits blocks that CuPy can reuse.
    if not device.is_cuda and needed > device_memory(CPU)[1]:
        raise OutOfMemoryError(text(CPU, needed))
    try:
        yield
    except MemoryError as error:  # base class of CuPy's OutOfMemoryError
        raise OutOfMemoryError(f"{text(device, needed)} ({error})") from error
