"""`QuantizationScheme`: a parsed quantization_config, and readers for keys that methods share."""

from __future__ import annotations

from dataclasses import dataclass

from engine.loading._fields import Fields
from engine.loading.quantized.module_rules import NO_MODULE, ModuleRules
from engine.loading.quantized.storage import Storage, group_format
from engine.model_files import excerpt
from engine.models.wrappers import Wrapper
from engine.weights import Format

__all__ = ["INERT_KEYS", "QuantizationScheme", "format_for", "group_size_of", "warn_unread"]

_MAX_GROUP = 1 << 20

# Keys that say how the checkpoint was made, or how another program runs it.
INERT_KEYS = frozenset((
    *("quant_method", "provider", "version", "quantizer", "quantization_status", "meta", "uri"),
    *("global_compression_ratio", "compressor", "run_compressed", "dequantize", "dataset"),
    *("use_optimized_inference", "modules_to_convert", "kv_cache_scheme", "tokenizer"),
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse", "backend"),
    *("act_group_aware", "model_name_or_path", "model_file_base_name", "model_seqlen", "nsamples"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "seqlen"),
    *("pad_token_id", "max_input_length", "cache_block_outputs", "use_exllama", "exllama_config"),
    *("disable_exllama", "use_cuda_fp16", "offload_to_disk", "low_gpu_mem_usage", "iters"),
    *("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "enable_minmax_tuning", "lr", "parallel"),
    # Other names of keys that are read.
    *("bits", "w_bit", "group_size", "q_group_size", "format", "checkpoint_format"),
    *("modules_to_not_convert", "ignored_layers", "method"),
    # Of one group of compressed-tensors: the tensors' own dtypes and the writer's statistics.
    *("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "block_structure", "group_size"),
    *("strategy", "symmetric", "dynamic", "actorder", "num_bits", "type", "input_activations"),
    *("output_activations", "targets", "weights"),
))  # fmt: skip
"""Keys of a quantization_config that change no number when they are not read."""


@dataclass(frozen=True)
class QuantizationScheme:
    """How a checkpoint's matrices are quantized.

    A module's tensors decide whether it is quantized. A quantized module that the configuration
    excludes is an error.

    Attributes
    ----------
    method : str
        "compressed-tensors", "gptq", "awq", "fp8", "mxfp4" (gpt-oss) or "bitnet".
    groups : tuple of (ModuleRules, Storage or None)
        Rules and the storage of the modules they select; the first match wins. None: not quantized.
    ignored : ModuleRules
        Modules left unquantized even if `groups` selects them.
    wrapper : Wrapper or None
        Declaration of the multimodal model whose modules the rules name; None: of a text model.
    """

    method: str
    groups: tuple[tuple[ModuleRules, Storage | None], ...] = ()
    ignored: ModuleRules = NO_MODULE
    wrapper: Wrapper | None = None

    def storage_of(self, module: str) -> Storage | None:
        """Return the storage that the configuration assigns to a module; None: not quantized."""
        names = (module,) if self.wrapper is None else self.wrapper.aliases(module)
        if any(map(self.ignored.match, names)):
            return None
        selected = (storage for rules, storage in self.groups if any(map(rules.match, names)))
        return next(selected, None)

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of all formats in `groups`."""
        found = [storage.format.name for _, storage in self.groups if storage is not None]
        return tuple(dict.fromkeys(found))


def warn_unread(fields: Fields) -> None:
    """Log the keys that were not read and are not known to change nothing."""
    for key in fields.unread():
        if key not in INERT_KEYS and fields.raw(key) not in (None, False, "", [], {}):
            fields.warn(excerpt(key), "is unknown and not read")


def group_size_of(fields: Fields, key: str, default: int | None = None) -> int:
    """Return the group size; 0 (-1 in files) means one group per row."""
    given: int | None
    given = fields.integer(key, -1, _MAX_GROUP, default)
    if given is None or given == 0:
        raise fields.error(key, "-1 or a multiple of 32")
    return max(given, 0)


def format_for(fields: Fields, key: str, bits: int, group_size: int, *, symmetric: bool) -> Format:
    """Return the grouped integer format with these parameters.

    Raises
    ------
    ConfigError
        If no such format exists; the message names `key`, the key of the group size.
    """
    form = group_format(bits, group_size, symmetric=symmetric)
    if form is None:
        raise fields.error(key, "-1 or a multiple of 32")
    return form
