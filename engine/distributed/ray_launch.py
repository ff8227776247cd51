"""What is asked of Ray for a replica of an engine: resources, a placement, the directory.

Ray is imported when it is asked for.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import Any

from engine.distributed.directory import Directory
from engine.errors import ConfigError

__all__ = ["actor_options", "directory_of", "import_ray", "placement"]

_NAMESPACE = "rawengine"
_IDLE_SECONDS = 120.0  # without a replica or a client, before a directory ends


def import_ray(module: str = "ray") -> Any:
    """Return a module of Ray.

    Raises
    ------
    ConfigError
        If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"several machines need the package 'ray' ({error}): install rawengine[cluster]"
        ) from error


def placement(num_gpus: int, num_cpus: float) -> list[dict[str, float]]:
    """Return the bundles of a replica, one for each GPU; all belong on one host.

    Examples
    --------
    >>> placement(2, 8)
    [{'CPU': 4.0, 'GPU': 1}, {'CPU': 4.0, 'GPU': 1}]
    >>> placement(0, 2)
    [{'CPU': 2.0}]
    """
    if num_gpus == 0:
        return [{"CPU": float(num_cpus)}]
    return [{"CPU": num_cpus / num_gpus, "GPU": 1} for _ in range(num_gpus)]


def actor_options(num_gpus: int, num_cpus: float) -> dict[str, Any]:
    """Return the keywords with which Ray Serve places a replica.

    The replica's actor is in the first bundle; processes of its own use the others.
    """
    bundles = placement(num_gpus, num_cpus)
    first = bundles[0]
    return {
        "ray_actor_options": {"num_cpus": first["CPU"], "num_gpus": first.get("GPU", 0)},
        "placement_group_bundles": bundles,
        "placement_group_strategy": "STRICT_PACK",
    }


class _DirectoryActor:
    """A `Directory` for all machines, which ends when nobody uses it any more."""

    def __init__(self) -> None:
        self._directory = Directory()
        self._ending: asyncio.Task[None] | None = None

    async def register(self, name: str, address: str) -> int:
        self._watch()
        return self._directory.register(name, address)

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


def directory_of(name: str) -> Any:
    """Return the handle of the directory of this name, which is started if need be."""
    strategies = import_ray("ray.util.scheduling_strategies")
    # Otherwise it would end with the placement group of the replica that has started it.
    nowhere = strategies.PlacementGroupSchedulingStrategy(placement_group=None)
    return (
        import_ray()
        .remote(_DirectoryActor)
        .options(
            name=name,
            namespace=_NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy=nowhere,
            max_restarts=-1,
            max_task_retries=-1,
        )
        .remote()
    )
