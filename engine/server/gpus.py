"""Number of GPUs that an engine uses on its host, and the GPUs visible to a replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError

__all__ = ["engine_gpus", "replica_gpus"]


def engine_gpus(options: Mapping[str, Any]) -> int:
    """Return the number of GPUs that an engine with these options uses on its own host.

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
        return count  # the other stages run on other hosts
    return count * int(options.get("pipeline_parallel_size", 1))


def replica_gpus(number: int, num_ranks: int, visible: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for a multi-rank replica, with one GPU per rank.

    Parameters
    ----------
    number, num_ranks : int
        Index of the replica, and its number of ranks over all stages.
    visible : str or None
        CUDA_VISIBLE_DEVICES of the server; None: all GPUs.

    Raises
    ------
    ConfigError
        If there are not enough visible GPUs.

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
