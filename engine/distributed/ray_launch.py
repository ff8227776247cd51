"""Ray support for replicas: actor resources, and the directory actor.

Ray is imported on first use.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import Any

from engine.distributed.directory import Directory
from engine.errors import ConfigError

__all__ = ["RemoteDirectory", "actor_options", "import_ray"]

_NAMESPACE = "rawengine"
_IDLE_SECONDS = 120.0  # time without a replica or client after which a directory ends


def import_ray(module: str = "ray") -> Any:
    """Return a module of Ray.

    Raises
    ------
    ConfigError
        If Ray is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"several machines need the package 'ray' ({error}): install rawengine[cluster]"
        ) from error


def actor_options(num_gpus: int, num_cpus: float) -> dict[str, Any]:
    """Return the Ray Serve options that place a replica.

    Ray places all resources of an actor on one host. It does not know the ranks, which are child
    processes: the GPUs must be the actor's own, since only these are visible to its processes.

    Examples
    --------
    >>> actor_options(2, 8.0)
    {'ray_actor_options': {'num_cpus': 8.0, 'num_gpus': 2}}
    """
    return {"ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus}}


class _DirectoryActor:
    """A `Directory` for all machines; it ends after two minutes without a call."""

    def __init__(self) -> None:
        self._directory = Directory()
        self._ending: asyncio.Task[None] | None = None

    async def register(self, name: str, address: str, number: int | None = None) -> int:
        self._watch()
        return self._directory.register(name, address, number)

    async def leave(self, name: str) -> None:
        self._directory.leave(name)

    async def replicas(self) -> dict[int, str]:
        self._watch()
        return self._directory.replicas()

    def _watch(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end_when_idle())

    async def _end_when_idle(self) -> None:
        while time.monotonic() - self._directory.last_use < _IDLE_SECONDS:
            await asyncio.sleep(_IDLE_SECONDS / 10)
        import_ray("ray.actor").exit_actor()


class RemoteDirectory:
    """The directory actor called `name`, on any machine; it is started if none exists.

    Parameters
    ----------
    name : str
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._actor: Any = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `Directory`; Ray's errors are raised if it cannot be reached."""
        if self._actor is None:
            self._actor = _directory_actor(self._name)
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except Exception:
            self._actor = None  # it may have ended: the next call looks it up again
            raise


def _directory_actor(name: str) -> Any:
    return (
        import_ray()
        .remote(_DirectoryActor)
        .options(
            name=name,
            namespace=_NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
        )
        .remote()
    )
