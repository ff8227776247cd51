"""The LoRA adapters that an engine holds, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.checks import shown, shown_with_type
from engine.errors import EngineError, RequestError, UnknownAdapterError
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

    def get(self, request: LoRARequest | None) -> LoraAdapter | None:
        """Return a request's adapter, reading it first if the engine does not hold it.

        Raises
        ------
        RequestError
            If the adapter cannot be read, or another path has its name; the cause is chained.
        """
        if request is None:
            return None
        self.check(request)
        if request.lora_name not in self._held:
            self.hold(request, self.read(request))
        return self._held[request.lora_name][1]

    def read(self, request: LoRARequest) -> LoraAdapter:
        """Read an adapter's files; callable from any thread.

        Raises
        ------
        UnknownAdapterError
            If the request has no path.
        RequestError
            If the files cannot be read or do not fit the model.
        """
        name = request.lora_name
        if not request.lora_path:
            held = self._shown_names()
            raise UnknownAdapterError(
                f"lora_request needs a lora_path for {shown(name)}; held: {held}"
            )
        try:
            return self._read(name, request.lora_path)
        except EngineError as error:
            raise RequestError(str(error)) from error

    def check(self, request: LoRARequest) -> None:
        """Check the type of a request, and that no other path has its adapter's name.

        Raises
        ------
        RequestError
            Otherwise.
        """
        if not isinstance(request, LoRARequest):
            raise RequestError(
                f"lora_request must be a LoRARequest; got {shown_with_type(request)}"
            )
        path = request.lora_path
        held_path = self._held[request.lora_name][0] if request.lora_name in self._held else path
        if path and path != held_path:
            raise RequestError(
                f"lora_path of {shown(request.lora_name)} must be {shown(held_path)}, as it was "
                f"loaded, until the adapter is removed; got {shown(path)}"
            )

    def hold(self, request: LoRARequest, adapter: LoraAdapter) -> None:
        """Hold an adapter that `read` returned; it replaces one of its name."""
        self._held[request.lora_name] = request.lora_path, adapter

    def remove(self, name: Any) -> LoraAdapter:
        """Remove an adapter; requests that use it keep it.

        Raises
        ------
        RequestError
            If the engine holds none of this name.
        """
        if not isinstance(name, str) or name not in self._held:
            held = self._shown_names()
            raise RequestError(f"lora_name must be one of the adapters ({held}); got {shown(name)}")
        return self._held.pop(name)[1]

    def _shown_names(self) -> str:
        return ", ".join(map(repr, self.names)) or "none"
