"""Replicas in a cluster of Ray: two local nodes, a killed replica, more and fewer of them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.distributed import ray_launch
from engine.distributed.directory import Directory
from engine.distributed.ray_launch import RemoteDirectory, actor_options, import_ray
from engine.errors import ConfigError, RankError, UnknownOptionError
from engine.parallel import ray_stages
from engine.parallel.ray_stages import stage_bundles
from engine.server.replicas.autoscaling import METRIC, num_replicas, replicas_by_requests
from engine.server.server_config import ServerConfig
from tests.distributed.engines import make_engine

ROOT = Path(__file__).parents[2]

# ---- without Ray


def test_a_directory_numbers_replicas_and_forgets_them():
    now = [0.0]
    directory = Directory(lambda: now[0])
    assert [directory.register(name, f"tcp://{name}") for name in "aba"] == [0, 1, 0]
    assert directory.replicas() == {0: "tcp://a", 1: "tcp://b"}
    now[0] = 10.0
    directory.register("b", "tcp://b")
    now[0] = 20.0
    assert directory.replicas() == {1: "tcp://b"}
    assert directory.register("a", "tcp://a") == 2  # a new one, for all that is known
    directory.leave("b")
    directory.leave("b")
    assert directory.replicas() == {2: "tcp://a"}
    assert directory.last_use == 20.0


def test_a_directory_that_is_started_again_gives_the_same_numbers():
    directory = Directory()
    assert directory.register("b", "tcp://b", 1) == 1
    assert directory.register("c", "tcp://c") == 2
    assert directory.register("a", "tcp://a", 0) == 0
    assert directory.register("d", "tcp://d", 2) == 3  # taken meanwhile
    assert directory.replicas() == {
        0: "tcp://a",
        1: "tcp://b",
        2: "tcp://c",
        3: "tcp://d",
    }


def test_a_directory_that_has_ended_is_looked_for_again(monkeypatch):
    class Method:
        def __init__(self, error):
            self.error = error

        async def remote(self, *arguments):
            if self.error is not None:
                raise self.error
            return arguments

    errors = [None, RuntimeError("the actor died"), None]
    actors = iter([SimpleNamespace(register=Method(error)) for error in errors])
    monkeypatch.setattr(ray_launch, "_directory_actor", lambda name: next(actors))

    async def main():
        directory = RemoteDirectory("d")
        assert await directory.call("register", "a", 1) == ("a", 1)
        assert await directory.call("register", "b") == ("b",)
        directory._actor = None  # ended
        with pytest.raises(RuntimeError, match="the actor died"):
            await directory.call("register", "a")
        assert await directory.call("register", "c") == ("c",)

    asyncio.run(main())
    assert next(actors, None) is None


def test_a_replica_has_all_its_gpus_itself():
    """Ray hides those of other placements from an actor, and so from its ranks."""
    assert actor_options(4, 8) == {"ray_actor_options": {"num_cpus": 8, "num_gpus": 4}}


def test_each_stage_has_a_place():
    assert stage_bundles(3, 2, "h")[:2] == [{"CPU": 1.0, "GPU": 2.0}] * 2
    assert stage_bundles(3, 2, "h")[2] == {"GPU": 2.0, "node:h": 0.001}


class _Ray:
    """A cluster of one node in which nothing is ever placed."""

    def __init__(self, monkeypatch, host, wait):
        self.removed = []
        ray = SimpleNamespace(is_initialized=lambda: True, nodes=lambda: [{"Alive": True}])
        util = SimpleNamespace(
            get_node_ip_address=lambda: host,
            placement_group=lambda bundles, strategy: SimpleNamespace(wait=wait),
            remove_placement_group=self.removed.append,
        )
        modules = {"ray": ray, "ray.util": util}
        monkeypatch.setattr(ray_stages, "import_ray", lambda name="ray": modules[name])


def test_a_placement_group_that_is_not_waited_for_is_removed(monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    ray = _Ray(monkeypatch, "127.0.0.1", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ray_stages.RayStages(2, 0)
    assert len(ray.removed) == 1


def test_a_placement_group_is_removed_if_the_engine_cannot_listen(monkeypatch):
    ray = _Ray(monkeypatch, "192.0.2.1", lambda seconds: True)  # no address of this host
    options = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    with pytest.raises(RankError, match=r"cannot listen at 192\.0\.2\.1"):
        make_engine(**options)
    assert len(ray.removed) == 1


def test_replicas_are_as_many_as_the_requests_need():
    assert num_replicas([0.0, 0.0], 10) == 0  # Ray Serve keeps to its lower bound
    assert num_replicas([10.0], 10) == 1 and num_replicas([10.1], 10) == 2
    config = SimpleNamespace(target_ongoing_requests=4)
    context = SimpleNamespace(config=config, aggregated_metrics={METRIC: {"a": 4.0, "b": 5.0}})
    assert replicas_by_requests(context) == (3, {})
    context.aggregated_metrics = {}
    assert replicas_by_requests(context) == (0, {})


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"'ray'.*rawengine\[cluster\]"):
        import_ray()


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"replicas": 2}, UnknownOptionError, "replicas"),
        ({"min_replicas": 0}, ConfigError, "min_replicas must be"),
        ({"min_replicas": 3, "max_replicas": 2}, ConfigError, r"at least min_replicas \(3\)"),
        ({"num_gpus": 1.5}, ConfigError, "num_gpus"),
        ({"model": ""}, ConfigError, "model must be a name"),
        ({"engine": []}, ConfigError, "engine must be a table"),
        ({"server": {"prot": 1}}, UnknownOptionError, "'port'"),
        ({"server": {"max_connections": 7}}, ConfigError, "max_connections must be left out"),
        ({"engine": {"tensor_parallel_size": 2}}, ConfigError, "num_gpus must be at least 2"),
        ({"engine": {"pipeline_parallel_size": 3}}, ConfigError, "num_gpus must be at least 3"),
    ],
)
def test_a_wrong_argument_is_named(options, error, word):
    serve = pytest.importorskip("engine.server.replicas.ray_serve")
    with pytest.raises(error, match=word):
        serve.RayServeConfig.from_options(options)


# ---- with Ray


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"port": 0}, "port must be a fixed one with nodes"),
        ({"hang_timeout": 5.0}, "hang_timeout must be left out: Ray Serve has its own; got 5.0"),
        ({"shutdown_timeout": 5.0}, "shutdown_timeout must be left out"),
        ({"ssl_certfile": "a", "ssl_keyfile": "b"}, "ssl_certfile must be left out"),
    ],
)
def test_options_that_ray_serve_decides_are_refused(options, word):
    ray_supervisor = pytest.importorskip("engine.server.replicas.ray_supervisor")
    with pytest.raises(ConfigError, match=word):
        ray_supervisor.supervise_on_ray("m", ServerConfig(nodes=1, **options), {})


def _tell(name):
    """Return what happened in a cluster of two local nodes; see `tests.distributed.ray_story`."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'rawengine[cluster]'")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.ray_story", name],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def story():
    return _tell("faults")


@pytest.mark.kills
@pytest.mark.slow
def test_both_nodes_have_a_replica(story):
    assert story["nodes"] == 2


@pytest.mark.kills
@pytest.mark.slow
def test_a_killed_replica_breaks_no_stream_and_changes_no_token(story):
    assert story["interrupted"] == story["whole"] and len(set(story["whole"])) == 6
    assert story["moved"] > 0


@pytest.mark.kills
@pytest.mark.slow
def test_a_killed_replica_is_replaced(story):
    assert story["after"] == 2


@pytest.mark.kills
@pytest.mark.slow
def test_there_are_more_replicas_for_more_requests_and_fewer_afterwards(story):
    assert story["most"] == 3 and story["least"] == 2
    assert story["lengths"] == [2000] * 14


@pytest.mark.kills
@pytest.mark.slow
def test_the_stages_of_a_pipeline_are_on_different_nodes(story):
    found = story["stages"]
    assert found["nodes"] == [2]
    assert found["tokens_2"] == found["tokens_1"]
    assert "the connection to stage 0 (" in found["error"] and found["seconds"] < 10


@pytest.mark.kills
@pytest.mark.slow
def test_engine_serve_uses_the_cluster():
    found = _tell("command")
    assert found["replicas"] == {"0": "ready", "1": "ready"}
    assert found["num_tokens"] == 7 and found["status"] == 0, found["errors"]
    assert "waiting for 2 machines; the cluster has 1" in found["errors"]
    assert found["refused"]  # nobody listens for it any more
