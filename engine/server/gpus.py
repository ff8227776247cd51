"""The GPUs that an engine takes on its host, and which of them a replica sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError

__all__ = ["engine_gpus", "replica_gpus"]


def engine_gpus(options: Mapping[str, Any]) -> int:
    """Return how many GPUs an engine of these options takes on its host.

    Examples
    --------
    >>> engine_gpus({"tensor_parallel_size": 2, "pipeline_parallel_size": 3})
    6
    >>> engine_gpus({"pipeline_parallel_size": 3, "distributed_executor_backend": "ray"})
    1
    """
    count: int = options.get("tensor_parallel_size", 1)
    is_ray = options.get("distributed_executor_backend") == "ray"
    if is_ray or options.get("pipeline_address") is not None:
        return count  # the other stages are elsewhere
    return count * int(options.get("pipeline_parallel_size", 1))


def replica_gpus(number: int, num_ranks: int, visible: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for a replica of several ranks, each of which has a GPU.

    Parameters
    ----------
    number, num_ranks : int
        Of the replica, and of its ranks in all stages.
    visible : str or None
        CUDA_VISIBLE_DEVICES of the server; None: all.

    Raises
    ------
    ConfigError
        If these are too few.

    Examples
    --------
    >>> replica_gpus(1, 2, None), replica_gpus(1, 2, "4,5,6,7")
    ('2,3', '6,7')
    """
    first = number * num_ranks
    last = (number + 1) * num_ranks
    if visible is None:
        return ",".join(map(str, range(first, last)))
    found = visible.split(",")
    if len(found) < last:
        raise ConfigError(
            f"replica {number} of {num_ranks} ranks needs GPUs {first} to {last - 1} of "
            f"CUDA_VISIBLE_DEVICES; got {visible!r}"
        )
    return ",".join(found[first:last])
