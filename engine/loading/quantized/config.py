"""`QuantizationScheme`: a quantization_config as a value, and readers of keys that methods use."""

from __future__ import annotations

from dataclasses import dataclass

from engine.loading._fields import Fields
from engine.loading.quantized.module_rules import NO_MODULE, ModuleRules
from engine.loading.quantized.storage import Storage, group_format
from engine.weights import Format

__all__ = ["QuantizationScheme", "format_for", "group_size_of"]

_MAX_GROUP = 1 << 20


@dataclass(frozen=True)
class QuantizationScheme:
    """The quantization of a checkpoint's matrices.

    The tensors of a module decide whether it is quantized. If they are, but the configuration
    excludes the module, the file is in error.

    Attributes
    ----------
    method : str
        "compressed-tensors", "gptq", "awq", "fp8", or "mxfp4" (gpt-oss).
    groups : tuple of (ModuleRules, Storage or None)
        Storage of modules: that of the first entry whose rules select the module. None: not
        quantized.
    ignored : ModuleRules
        Modules that are not quantized even if `groups` selects them.
    """

    method: str
    groups: tuple[tuple[ModuleRules, Storage | None], ...] = ()
    ignored: ModuleRules = NO_MODULE

    def storage_of(self, module: str) -> Storage | None:
        """Return the storage of a module by the configuration; None if it is not quantized."""
        if self.ignored.match(module):
            return None
        return next((storage for rules, storage in self.groups if rules.match(module)), None)

    @property
    def formats(self) -> tuple[str, ...]:
        """The names of all formats in `groups`."""
        found = [storage.format.name for _, storage in self.groups if storage is not None]
        return tuple(dict.fromkeys(found))


def group_size_of(fields: Fields, key: str, default: int | None = None) -> int:
    """Return the numbers per group; 0 (-1 in files) for one group per row."""
    given: int | None
    given = fields.integer(key, -1, _MAX_GROUP, default)
    if given is None or given == 0:
        raise fields.error(key, "-1 or a multiple of 32")
    return max(given, 0)


def format_for(fields: Fields, key: str, bits: int, group_size: int, *, symmetric: bool) -> Format:
    """Return the format of whole numbers in groups.

    Raises
    ------
    ConfigError
        If no such format exists; the message names `key`, the key of the group size.
    """
    form = group_format(bits, group_size, symmetric=symmetric)
    if form is None:
        raise fields.error(key, "-1 or a multiple of 32")
    return form
