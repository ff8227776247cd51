"""What an API process does before it is ready: whole answers, unknown to engine and log."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest

from engine.server import warm_up as warm_up_module
from engine.server.warm_up import warm_up
from engine.text.tokenizer import load_tokenizer
from tests.e2e.tiny import CONFIG, VOCAB, make_engine, tiny_model
from tests.server.loops import collected, connected, run, served
from tests.server.scripted_client import GOLDEN
from tests.server.serving import CHATML
from tests.server.test_engine_client import _greedy


@pytest.mark.parametrize("template", [CHATML, "{{ raise_exception('no') }}", None])
def test_the_engine_hears_nothing_of_it(caplog, template):
    metadata = GOLDEN["byte_level"]["metadata"] | {"tokenizer.ggml.pre": "gpt-2"}
    tokenizer = load_tokenizer(metadata, chat_template=template) if template else None
    size = VOCAB if tokenizer is None else tokenizer.vocab_size
    engine = make_engine(tiny_model(config=dataclasses.replace(CONFIG, vocab_size=size)))

    async def main(address):
        async with connected(address, tokenizer) as client:
            ids, text, chat = await warm_up(client)
            assert not client.num_unfinished_requests
            stats = await client.stats()
            assert stats.prompt_tokens == 0 and stats.request_success == {}
            [*_, last] = await collected(client, [4, 5], _greedy(3))
            assert last.finished  # the engine's
            assert (await client.stats()).request_success == {"length": 1}
            return ids, text, chat

    with caplog.at_level(logging.DEBUG, "engine.server"), served(engine) as (_, address):
        answers = run(main(address))
    assert caplog.records == []
    works = [True, template is not None, template == CHATML]
    for answer, is_served in zip(answers, works, strict=True):
        assert answer.endswith(b"data: [DONE]\n\n") is is_served, answer
        reasons = [json.loads(line[6:])["choices"][0]["finish_reason"]
                   for line in answer.split(b"\n\n") if line.startswith(b"data: {")]  # fmt: skip
        assert (reasons[-1:] == ["length"]) is is_served


def test_what_was_refused_is_not_tried_again(monkeypatch):
    posted, post = [], warm_up_module._post

    async def counted(app, path, body):
        posted.append(path)
        return await post(app, path, body)

    monkeypatch.setattr(warm_up_module, "_post", counted)

    async def main(address):
        async with connected(address) as client:  # without a tokenizer
            return await warm_up(client)

    with served(make_engine(tiny_model())) as (_, address):
        ids, text, chat = run(main(address))
    assert ids and not text and not chat
    assert posted.count("/v1/chat/completions") == 1 and posted.count("/v1/completions") == 11
