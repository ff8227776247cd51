"""The value that a checkpoint's quantization_config is read into, and what methods share."""

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
    """How the matrices of a checkpoint are quantized.

    Which modules are quantized at all, their tensors decide; a module whose tensors are quantized,
    but not according to the configuration, is an error of the file.

    Attributes
    ----------
    method : str
        "compressed-tensors", "gptq", "awq", "fp8", or "mxfp4" (gpt-oss).
    groups : tuple of (ModuleRules, Storage or None)
        How modules are stored: as the first one says whose rules select the module. None: it is not
        quantized.
    ignored : ModuleRules
        Modules that are not quantized, whatever `groups` says.
    """

    method: str
    groups: tuple[tuple[ModuleRules, Storage | None], ...] = ()
    ignored: ModuleRules = NO_MODULE

    def storage_of(self, module: str) -> Storage | None:
        """Return how the configuration says a module is stored; None: it is not quantized."""
        if self.ignored.match(module):
            return None
        return next((storage for rules, storage in self.groups if rules.match(module)), None)

    @property
    def formats(self) -> tuple[str, ...]:
        """The names of the formats of its modules."""
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
        If there is none; `key` is that of the group size.
    """
    form = group_format(bits, group_size, symmetric=symmetric)
    if form is None:
        raise fields.error(key, "-1 or a multiple of 32")
    return form
