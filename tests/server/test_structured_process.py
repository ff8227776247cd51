"""Structured output over an engine in another process: compiled aside, the same text."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

pytest.importorskip("llguidance", reason="needs the extra grammar")

from engine import LLM
from engine.errors import EngineError, RequestError
from engine.sampling_params import SamplingParams
from engine.structured.spec import StructuredOutput
from tests.server.loops import collected, connected, eventually, run, served

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
KINDS = [
    {"choice": ["yes", "no"]},
    {"regex": "[0-9]{3}"},
    {"json": {**SCHEMA, "additionalProperties": False}},
    {"grammar": 'start: "a" "b"+ "c"'},
]


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2", device="cpu", max_num_seqs=4, num_blocks=256) as llm:
        yield llm


def _params(kind, **options):
    structured = StructuredOutput(**kind)
    return SamplingParams(**{"seed": 1, "max_tokens": 16, "structured": structured} | options)


@pytest.mark.slow
def test_the_text_is_that_of_the_engine_in_process(llm):
    params = [_params(kind, n=1 + i % 2) for i, kind in enumerate(KINDS)]
    want = [[c.text for c in o.outputs] for o in llm.generate(["Answer:"] * 4, params)]

    async def main(address):
        async with connected(address, llm.tokenizer) as client:
            return await asyncio.gather(*(collected(client, "Answer:", p) for p in params))

    with served(llm.llm_engine) as (_, address):
        found = [[c.text for c in o[-1].outputs] for o in run(main(address))]
    assert found == want
    assert found[0][0] in ("yes", "no") and found[1][0].isdecimal() and json.loads(found[2][0])


def test_a_grammar_that_cannot_be_compiled_is_refused(llm):
    async def main(address):
        async with connected(address, llm.tokenizer) as client:
            with pytest.raises(RequestError, match="regex"):
                await collected(client, "A", _params({"regex": "(["}))
            assert not client.num_unfinished_requests

    with served(llm.llm_engine) as (_, address):
        run(main(address))


def test_what_is_ended_while_it_compiles_is_never_queued(llm, monkeypatch):
    engine = llm.llm_engine
    prepare, added = engine.prepare, []
    monkeypatch.setattr(engine, "prepare", lambda params: (time.sleep(0.2), prepare(params)))
    monkeypatch.setattr(engine, "add_request", lambda *given, **_: added.append(given))

    async def main(loop, address):
        async with connected(address, llm.tokenizer) as client:
            task = asyncio.create_task(collected(client, "A", _params(KINDS[0])))
            await eventually(lambda: loop._num_preparing)
            task.cancel()
            aborted = asyncio.create_task(
                collected(client, "A", _params(KINDS[1]), request_id="mine")
            )
            await eventually(lambda: loop._num_preparing == 2)
            await client.abort("mine")
            with pytest.raises(EngineError, match="aborted"):
                await aborted
            await eventually(lambda: not loop._num_preparing)

    with served(engine) as (loop, address):
        run(main(loop, address))
    assert not added
