"""The LoRA adapters that an engine holds, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.checks import shown, shown_with_type
from engine.errors import EngineError, RequestError
from engine.loading.lora import LoraAdapter
from engine.lora_request import LoRARequest

__all__ = ["AdapterRegistry"]


class AdapterRegistry:
    """Reads each adapter once, and keeps it in host memory until it is removed.

    Parameters
    ----------
    read : callable
        ``read(name, path)`` returns a `LoraAdapter`, or raises an `EngineError`.

    Examples
    --------
    >>> registry = AdapterRegistry(lambda name, path: f"{name} of {path}")
    >>> registry.get(LoRARequest("sql", 1, "adapters/sql"))
    'sql of adapters/sql'
    >>> registry.get(LoRARequest("sql")), registry.names
    ('sql of adapters/sql', ('sql',))
    """

    def __init__(self, read: Callable[[str, str], LoraAdapter]) -> None:
        self._read = read
        self._held: dict[str, tuple[str, LoraAdapter]] = {}  # name -> its path and content

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters, in the order in which they were added."""
        return tuple(self._held)

    def paths(self) -> dict[str, str]:
        """Return the path of every adapter by name."""
        return {name: path for name, (path, _) in self._held.items()}

    def get(self, request: LoRARequest | None) -> LoraAdapter | None:
        """Return a request's adapter, reading it first if the engine does not hold it.

        Raises
        ------
        RequestError
            If the adapter cannot be read, or another path has its name; the cause is chained.
        """
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise RequestError(
                f"lora_request must be a LoRARequest; got {shown_with_type(request)}"
            )
        name = request.lora_name
        path = request.lora_path
        if name not in self._held:
            if not path:
                known = ", ".join(map(repr, self.names)) or "none"
                raise RequestError(
                    f"lora_request needs a lora_path for {shown(name)}: held: {known}"
                )
            self._held[name] = path, self._checked(name, path)
        held_path, adapter = self._held[name]
        if path and path != held_path:
            raise RequestError(
                f"lora_path of {shown(name)} must be {shown(held_path)}, as it was loaded, until "
                f"the adapter is removed; got {shown(path)}"
            )
        return adapter

    def replace(self, request: LoRARequest) -> LoraAdapter | None:
        """Read an adapter anew, also if its name is held; return the one it replaces.

        Raises
        ------
        RequestError
            If it cannot be read; then the old one stays.
        """
        old = self._held.get(request.lora_name)
        adapter = self._checked(request.lora_name, request.lora_path)
        self._held[request.lora_name] = request.lora_path, adapter
        return None if old is None else old[1]

    def remove(self, name: Any) -> LoraAdapter:
        """Remove an adapter; requests that use it keep it.

        Raises
        ------
        RequestError
            If the engine holds none of this name.
        """
        if not isinstance(name, str) or name not in self._held:
            known = ", ".join(map(repr, self.names)) or "none"
            raise RequestError(
                f"lora_name must be one of the adapters ({known}); got {shown(name)}"
            )
        return self._held.pop(name)[1]

    def _checked(self, name: str, path: str) -> LoraAdapter:
        try:
            return self._read(name, path)
        except EngineError as error:
            raise RequestError(str(error)) from error
