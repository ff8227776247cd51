"""Ray Serve application: engine replicas on a cluster, with HTTP ingresses.

`build` creates it from the arguments in Ray Serve's configuration file; see deploy/ray_serve.yaml.
The HTTP application, the router, and the recovery from dead replicas are the same as in `engine
serve`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from starlette.applications import Starlette

from engine.checks import shown
from engine.distributed.ray_launch import RemoteDirectory, actor_options, import_ray
from engine.errors import ConfigError, EngineError, unknown_keyword
from engine.sampling_params import NumberRange
from engine.server.api_process import load_model_tokenizer
from engine.server.app import build_app
from engine.server.gpus import engine_gpus
from engine.server.logs import configure_logging
from engine.server.replicas.autoscaling import replicas_by_requests
from engine.server.replicas.client import ReplicaClient
from engine.server.replicas.ray_replica import RayReplica
from engine.server.server_config import ServerConfig

__all__ = ["RayIngress", "RayServeConfig", "build"]

_FOLLOW_SECONDS = 1.0  # seconds between two queries of the directory
_GRACE_SECONDS = 600.0  # seconds that requests wait for a replica if none is left
_SPARE_REQUESTS = 64
_log = logging.getLogger("engine.server")

# Connection options, which Ray Serve handles itself.
_REFUSED = (
    *("root_path", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "hang_timeout"),
    *("shutdown_timeout", "timeout_keep_alive", "send_timeout"),
    *("max_connections", "max_header_bytes"),
)
_RANGES = {
    "num_ingresses": NumberRange(1, 512, integer=True),  # half an engine's limit
    "min_replicas": NumberRange(1, 10_000, integer=True),
    "max_replicas": NumberRange(1, 10_000, integer=True),
    "target_requests": NumberRange(1, 1e6),
    "num_gpus": NumberRange(0, 64, integer=True),
    "num_cpus": NumberRange(0, 4096),
    "look_back_period_s": NumberRange(0, 1e6, low_open=True),
    "upscale_delay_s": NumberRange(0, 1e6),
    "downscale_delay_s": NumberRange(0, 1e6),
}


@dataclass(frozen=True, kw_only=True)
class RayServeConfig:
    """Arguments of `build`.

    Attributes
    ----------
    model : str
        Model name, or a path that is valid on every machine.
    engine : dict
        Keyword arguments of `LLMEngine.from_name`.
    server : dict
        Options of `ServerConfig`, except connection options, which Ray Serve handles.
    num_ingresses : int
        Number of actors for HTTP, tokenization and detokenization.
    min_replicas, max_replicas : int
        Minimum and maximum number of engines.
    target_requests : float
        Start another engine above this mean number of unfinished requests per engine.
    num_gpus : int
        GPUs per engine, all on one host; 0: CPU.
    num_cpus : float
        CPUs per engine, in Ray's accounting.
    look_back_period_s : float
        Seconds over which to average the number of requests.
    upscale_delay_s, downscale_delay_s : float
        Seconds that the load must stay too high or too low before scaling.

    Raises
    ------
    ConfigError
        If a value is out of range or of the wrong type.
    """

    model: str = "smollm2"
    engine: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    num_ingresses: int = 1
    min_replicas: int = 1
    max_replicas: int = 1
    target_requests: float = 128.0
    num_gpus: int = 1
    num_cpus: float = 1.0
    look_back_period_s: float = 30.0
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> RayServeConfig:
        """Build from plain values.

        Raises
        ------
        UnknownOptionError
            If an option is not a field.
        """
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise unknown_keyword("RayServeConfig", name, known)
        return cls(**options)

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            try:
                object.__setattr__(self, name, allowed.check(name, getattr(self, name)))
            except ValueError as error:
                raise ConfigError(str(error)) from None
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a name or a path; got {shown(self.model)}")
        for name in ("engine", "server"):
            if not isinstance(getattr(self, name), dict):
                given = shown(getattr(self, name))
                raise ConfigError(f"{name} must be a table of options; got {given}")
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas must be at least min_replicas ({self.min_replicas}); "
                f"got {self.max_replicas}"
            )
        needed = engine_gpus(self.engine)
        if 0 < self.num_gpus < needed:
            raise ConfigError(
                f"num_gpus must be at least {needed}, a GPU for each rank of each stage, or 0 for "
                f"the CPU; got {self.num_gpus}"
            )
        server = ServerConfig.from_options(self.server)
        if server.max_stored_responses and self.num_ingresses > 1:
            raise ConfigError(
                "max_stored_responses must be 0 with several ingresses, since a response is stored "
                f"in one; got {server.max_stored_responses} and num_ingresses {self.num_ingresses}"
            )
        for name in _REFUSED:
            given = getattr(server, name)
            default = getattr(ServerConfig, name)
            if given != default:
                raise ConfigError(f"{name} must be left out: Ray Serve has its own; got {given!r}")


class RayIngress:
    """Serves HTTP for all replicas in a directory.

    Parameters
    ----------
    model : str
    server : dict
        Options of `ServerConfig`.
    directory, token : str
        See `RayReplica`.
    replicas : DeploymentHandle
        Unused; it only makes Ray Serve deploy the replicas along with the ingress.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, model: str, server: dict[str, Any], directory: str, token: str, replicas: Any = None
    ) -> None:
        # Ray Serve listens, on addresses that are not known here.
        defaults = {"served_model_name": (model,), "host": "0.0.0.0"}
        options = ServerConfig.from_options(defaults | server)
        configure_logging(
            options.log_level, json_logs=options.json_logs, access_log=options.access_log
        )
        tokenizer = await asyncio.to_thread(load_model_tokenizer, model, options.chat_template)
        self._directory = RemoteDirectory(directory)
        seed = (secrets.randbits(63),)
        self._client = ReplicaClient(
            token, tokenizer, seed=seed, has_peers=True, grace_seconds=_GRACE_SECONDS
        )
        self._following = asyncio.ensure_future(self._follow())
        await self._client.wait_until_ready()
        self._app = build_app(self._client, options, secret=token.encode())

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._app

    async def check_health(self) -> None:
        """Raise if no request can be served; Ray Serve then starts another ingress.

        Raises
        ------
        EngineError
        """
        if self._client.error is not None:
            raise EngineError(str(self._client.error))

    async def __del__(self) -> None:
        self._following.cancel()
        await self._client.close()

    async def _follow(self) -> None:
        """Keep the client's replicas in sync with the directory."""
        while True:
            try:
                found = await self._directory.call("replicas")
                # A restarted directory may not know all replicas yet.
                await self._client.set_replicas(found, keep_connected=True)
            except Exception as error:  # if the directory has died, the next call restarts it
                _log.warning("the directory of replicas cannot be reached: %s", error)
            await asyncio.sleep(_FOLLOW_SECONDS)


def build(arguments: dict[str, Any]) -> Any:
    """Build the Ray Serve application.

    Parameters
    ----------
    arguments : dict
        Fields of `RayServeConfig`.

    Returns
    -------
    ray.serve.Application
    """
    serve = import_ray("ray.serve")
    config = RayServeConfig.from_options(arguments)
    directory = f"replicas-{secrets.token_hex(8)}"
    token = secrets.token_hex(16)
    scaling = {
        "min_replicas": config.min_replicas,
        "max_replicas": config.max_replicas,
        "target_ongoing_requests": config.target_requests,
        "look_back_period_s": config.look_back_period_s,
        "upscale_delay_s": config.upscale_delay_s,
        "downscale_delay_s": config.downscale_delay_s,
        "policy": {"policy_function": replicas_by_requests},
    }
    replicas = serve.deployment(RayReplica).options(
        name="replica",
        autoscaling_config=scaling,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=20,
        **actor_options(config.num_gpus, config.num_cpus),
    )
    server = ServerConfig.from_options(config.server)
    ingress = serve.deployment(serve.ingress()(RayIngress)).options(
        name="ingress",
        num_replicas=config.num_ingresses,
        # More than `RequestSlots` admits: it replies 429, while Ray Serve would queue the requests.
        max_ongoing_requests=server.max_concurrent_requests + _SPARE_REQUESTS,
        ray_actor_options={"num_cpus": 0.5},
    )
    names = directory, token
    stored = server.num_stored_responses if config.num_ingresses == 1 else 0
    return ingress.bind(
        config.model,
        config.server | {"max_stored_responses": stored},
        *names,
        replicas.bind(config.model, config.engine, *names, config.server),
    )
