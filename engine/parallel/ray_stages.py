"""The stages of a pipeline as actors of a Ray cluster.

A placement group reserves a bundle for each stage, with a GPU for each of its ranks. Each stage
gets a host of its own if the cluster has enough. The last stage is the process that creates the
group: its bundle, on its host, only reserves its GPUs.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any

from engine.distributed.connection import Address
from engine.distributed.ray_launch import import_ray
from engine.errors import ConfigError

__all__ = ["RayStages", "stage_bundles"]

_PLACE_SECONDS = 120.0  # timeout for placing all bundles in the cluster


def stage_bundles(num_stages: int, num_gpus: int, host: str) -> list[dict[str, float]]:
    """Return the bundles of all stages; the last one's is on `host`.

    Examples
    --------
    >>> stage_bundles(2, 4, "10.0.0.1")
    [{'CPU': 1.0, 'GPU': 4.0}, {'GPU': 4.0, 'node:10.0.0.1': 0.001}]
    >>> stage_bundles(2, 0, "10.0.0.1")
    [{'CPU': 1.0}, {'node:10.0.0.1': 0.001}]
    """
    gpus = {"GPU": float(num_gpus)} if num_gpus else {}
    others = [{"CPU": 1.0, **gpus} for _ in range(num_stages - 1)]
    return [*others, {**gpus, f"node:{host}": 0.001}]


class _StageActor:
    """Runs a stage until its engine ends."""

    def run(self, address: Address, stage: int, secret: bytes) -> None:
        # Imported in the actor, on its host: this process need not be able to run a stage.
        import_module("engine.parallel.stage").run_stage(address, stage, secret)


class RayStages:
    """The placement group of a pipeline, and the actors in it.

    Parameters
    ----------
    num_stages : int
        Number of stages, this process's included.
    num_gpus : int
        GPUs per stage; 0 on the CPU.

    Attributes
    ----------
    host : str
        This host's address in the cluster.

    Raises
    ------
    ConfigError
        If Ray is not installed, or the cluster cannot place the bundles.
    """

    def __init__(self, num_stages: int, num_gpus: int) -> None:
        self._ray = import_ray()
        if not self._ray.is_initialized():
            self._ray.init(log_to_driver=False)
        util = import_ray("ray.util")
        self.host: str = util.get_node_ip_address()
        self._num_stages = num_stages
        self._num_gpus = num_gpus
        self._actors: list[Any] = []
        num_nodes = sum(node["Alive"] for node in self._ray.nodes())
        strategy = "STRICT_SPREAD" if num_nodes >= num_stages else "PACK"
        bundles = stage_bundles(num_stages, num_gpus, self.host)
        self._group = util.placement_group(bundles, strategy=strategy)
        try:
            if not self._group.wait(_PLACE_SECONDS):
                raise ConfigError(
                    f"the cluster has had no room for {num_stages} stages within "
                    f"{_PLACE_SECONDS:g} s: {bundles}, {strategy} on {num_nodes} hosts"
                )
        except BaseException:  # Ctrl-C, too
            self.close()
            raise

    def start(self, address: Address, secret: bytes) -> None:
        """Start all stages but the last, which connect to `address`."""
        strategies = import_ray("ray.util.scheduling_strategies")
        for stage in range(self._num_stages - 1):
            place = strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=stage
            )
            actor = (
                self._ray.remote(_StageActor)
                .options(num_cpus=1, num_gpus=self._num_gpus, scheduling_strategy=place)
                .remote()
            )
            actor.run.remote(address, stage, secret)
            self._actors.append(actor)

    def close(self) -> None:
        """End the actors, and remove the placement group."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            for actor in self._actors:
                self._ray.kill(actor)
            import_ray("ray.util").remove_placement_group(self._group)
