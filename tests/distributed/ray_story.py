"""A cluster of two local nodes, in a process of its own; prints what happened as JSON.

Streams while a replica is killed; more requests than two replicas should have, and then none; and
a model whose stages are on both nodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster

from engine import LLMEngine, SamplingParams
from engine.config import ModelConfig
from engine.errors import RankError
from engine.server.replicas.ray_serve import build
from tests.server.test_serve import CONFIG, _tokenizer

LAYERS = ModelConfig("llama", 50, 64, 4, 8, 2, 16, 96, 256)
ENGINE = {"device": "cpu", "load_format": "dummy", "num_blocks": 4096, "max_num_seqs": 16}
SCALING = {"min_replicas": 2, "max_replicas": 3, "target_requests": 4, "look_back_period_s": 1.0}
DELAYS = {"upscale_delay_s": 0.0, "downscale_delay_s": 1.0}


async def _stream(client, prompt, max_tokens, started=None):
    """Return the text of a stream and how many tokens it had."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    body |= {"temperature": 1.0, "seed": prompt[0], "stream_options": {"include_usage": True}}
    text, usage = [], None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return "".join(text), usage["completion_tokens"]
            if line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += [choice["text"] for choice in event["choices"]]
                usage = event.get("usage") or usage
                if started is not None and text:
                    started.set()
    raise AssertionError("the stream broke")


async def _num_ready(client):
    return list((await client.get("/health")).json()["replicas"].values()).count("ready")


async def _wait_for(client, num_ready, seconds=40):
    """Wait for so many replicas, and return their number."""
    end = time.monotonic() + seconds
    while (found := await _num_ready(client)) != num_ready:
        assert time.monotonic() < end, (await client.get("/health")).text + f"; not {num_ready}"
        await asyncio.sleep(0.1)
    return found


async def _interrupted(client, prompts):
    """Kill a replica once all streams have begun; return the texts and what is known of it."""
    events = [asyncio.Event() for _ in prompts]
    pairs = zip(prompts, events, strict=True)
    streams = [asyncio.ensure_future(_stream(client, p, 800, event)) for p, event in pairs]
    await asyncio.gather(*(event.wait() for event in events))
    os.kill((await _replicas())[0]["pid"], signal.SIGKILL)
    moved = sum(not stream.done() for stream in streams)
    return [text for text, _ in await asyncio.gather(*streams)], moved


async def _story(port):
    found = {}
    limits = httpx.Limits(max_connections=100)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        await _wait_for(client, 2)
        found["nodes"] = len({each["node"] for each in await _replicas()})
        prompts = [[4 + i, 5, 6] for i in range(6)]
        streams = [_stream(client, prompt, 800) for prompt in prompts]
        found["whole"] = [text for text, _ in await asyncio.gather(*streams)]
        found["interrupted"], found["moved"] = await _interrupted(client, prompts)
        found["after"] = await _wait_for(client, 2)
        many = [asyncio.ensure_future(_stream(client, [20 + i], 2000)) for i in range(14)]
        found["most"] = await _wait_for(client, 3)
        found["lengths"] = [length for _, length in await asyncio.gather(*many)]
        found["least"] = await _wait_for(client, 2)
    return found


async def _replicas():
    return (
        await serve.get_deployment_handle("replica", "default").broadcast("where").results_async()
    )


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def _model(folder):
    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    Path(folder, "tokenizer.json").write_text(json.dumps(_tokenizer()))
    return folder


def _faults(cluster, folder):
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    options = {"model": _model(folder), "engine": ENGINE | {"deterministic": True}}
    options |= {"num_gpus": 0, "num_cpus": 0.5, **SCALING, **DELAYS}
    port = _free_port()
    serve.start(http_options={"port": port, "location": "HeadOnly"})
    serve.run(build(options), route_prefix="/")
    return asyncio.run(_story(port)) | {"stages": _stages()}


def _stages():
    """Return the tokens of one process and of two stages, and how a killed stage is named."""
    serve.shutdown()  # the nodes have one core each
    found = {}
    for stages in (1, 2):
        options = {"pipeline_parallel_size": stages, "num_blocks": 64, "device": "cpu"}
        options |= {"distributed_executor_backend": "ray" if stages > 1 else None}
        with LLMEngine.from_name("x", config=LAYERS, load_format="dummy", **options) as engine:
            found[f"tokens_{stages}"] = _tokens(engine)
            if stages > 1:
                groups = ray.util.placement_group_table().values()
                bundles = [g["bundles_to_node_id"] for g in groups if g["state"] == "CREATED"]
                found["nodes"] = [len(set(nodes.values())) for nodes in bundles]
                os.kill(engine.model.group.hellos[0]["pid"], signal.SIGKILL)
                start = time.monotonic()
                try:
                    _tokens(engine)
                except RankError as error:
                    found |= {"error": str(error), "seconds": time.monotonic() - start}
    return found


def _tokens(engine):
    params, found = SamplingParams(max_tokens=20, temperature=0.0), {}
    for index in range(3):
        engine.add_request(str(index), [index, 5, 6], params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = output.outputs[0].token_ids
    return found


def _command(cluster, folder):
    """Let `engine serve --nodes 2` wait for the second node; ask it, and end it."""
    port, lines = _free_port(), []
    command = [sys.executable, "-m", "engine", "serve", _model(folder), "--port", str(port)]
    command += ["--nodes", "2", "--data-parallel-size", "2", "--device", "cpu"]
    command += ["--load-format", "dummy", "--num-blocks", "256"]
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stderr:
            lines.append(line)
            if "waiting for 2 machines" in line:
                cluster.add_node(num_cpus=2)
            if "ready at" in line:
                break
        found = {"replicas": {}}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            while len(found["replicas"]) < 2:
                found["replicas"] = client.get("/health").json()["replicas"]
            body = {"prompt": [5, 6], "max_tokens": 7, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body).json()
            found["num_tokens"] = answer["usage"]["completion_tokens"]
            process.send_signal(signal.SIGTERM)
            lines += process.stderr.readlines()
            found["status"] = process.wait(30)
            found["refused"] = client.post("/v1/completions", json=body).status_code == 404
    return found | {"errors": "".join(lines)}


def main():
    story, num_cpus = {"faults": (_faults, 1), "command": (_command, 2)}[sys.argv[1]]
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": num_cpus, "include_dashboard": False}
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = story(cluster, folder)
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
