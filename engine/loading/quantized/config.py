"""`QuantizationScheme`: a parsed quantization_config, and readers for keys that methods share."""

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
    """How a checkpoint's matrices are quantized.

    A module's tensors decide whether it is quantized. A quantized module that the configuration
    excludes is an error.

    Attributes
    ----------
    method : str
        "compressed-tensors", "gptq", "awq", "fp8", or "mxfp4" (gpt-oss).
    groups : tuple of (ModuleRules, Storage or None)
        Rules and the storage of the modules they select; the first match wins. None: not quantized.
    ignored : ModuleRules
        Modules left unquantized even if `groups` selects them.
    """

    method: str
    groups: tuple[tuple[ModuleRules, Storage | None], ...] = ()
    ignored: ModuleRules = NO_MODULE

    def storage_of(self, module: str) -> Storage | None:
        """Return the storage that the configuration assigns to a module; None: not quantized."""
        if self.ignored.match(module):
            return None
        return next((storage for rules, storage in self.groups if rules.match(module)), None)

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of all formats in `groups`."""
        found = [storage.format.name for _, storage in self.groups if storage is not None]
        return tuple(dict.fromkeys(found))


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
