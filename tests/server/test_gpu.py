"""`engine serve` with its engine on a GPU: the tokens of `LLM`, schemas, faults."""

from __future__ import annotations

import json
import os
import signal

import pytest

from engine import LLM, SamplingParams
from tests.server.test_serve import _body, _children, _end, _post, _rest, model, serving

__all__ = ["model"]  # a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cp")]
OPTIONS = ("--device", "cuda", "--load-format", "dummy", "--deterministic", "--port", "0")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["yes", "no"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def options(model):
    return (model, *OPTIONS, "--num-blocks", "1024", "--served-model-name", "tiny")


def _events(response):
    lines = [line for line in response.read().decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_streams_have_the_tokens_of_offline_generation(model, options):
    prompts = [[5 + index, 6, 7] * (1 + index) for index in range(8)]
    given = [
        {"temperature": index % 2 * 0.8, "seed": 1000 + index, "max_tokens": 80 + 9 * index}
        for index in range(8)
    ]
    with LLM(model, device="cuda", load_format="dummy", deterministic=True, num_blocks=1024) as llm:
        params = [SamplingParams(**each, ignore_eos=True) for each in given]
        want = [o.outputs[0].text for o in llm.generate(prompts, params)]
    for api_processes in ("1", "2"):
        with serving(*options, "--api-server-count", api_processes) as server:
            bodies = [
                _body(0) | each | {"prompt": prompt, "stream": True}
                for prompt, each in zip(prompts, given, strict=True)
            ]
            responses = [_post(server, body) for body in bodies]  # all at once
            for response, text in zip(responses, want, strict=True):
                events = _events(response)
                assert len(events) > 10
                assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == text


def test_a_schema_holds(options):
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with serving(*options) as server:
        bodies = [
            _body(400, ignore_eos=False, response_format=form, temperature=1.0, seed=seed)
            for seed in range(4)
        ]
        for response in [_post(server, body) for body in bodies]:
            text = json.loads(response.read())["choices"][0]["text"]
            assert json.loads(text)["a"] in ("yes", "no")


def test_an_engine_that_is_killed_ends_the_server(options):
    with serving(*options) as server:
        response = _post(server, _body(9000, stream=True))
        assert response.readline().startswith(b"data: {")
        [engine] = _children(server.process.pid, "engine_process")
        os.kill(engine, signal.SIGKILL)
        assert b"the engine's process has ended" in _rest(response)
        status, errors = _end(server)
        assert status == 1 and "the engine's process ended: killed by SIGKILL" in errors
