"""/v1/engine/lens: over HTTP, through another process's messages, and its limits."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest

from engine.errors import RequestError
from engine.server.server_config import ServerConfig, key_hash
from engine.tasks.logit_lens import logit_lens
from tests.e2e.tiny import VOCAB, make_engine, tiny_model
from tests.server.loops import connected, run, served
from tests.server.serving import CannedClient, serve

PATH = "/v1/engine/lens"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def http(real_server):
    with httpx.Client(base_url=real_server.url, timeout=60) as found:
        yield found


def test_an_answer_layer_by_layer(http, smollm2):
    tokenizer = smollm2.tokenizer
    answer = tokenizer.encode("The capital of France is Paris")
    body = {"messages": QUESTION, "token_ids": answer, "num_tokens": 3, "top": 4}
    found = http.post(PATH, json=body).json()
    ids = [*tokenizer.encode_chat(QUESTION), *answer]
    assert found["model"] == "smollm2" and found["num_tokens"] == len(ids)
    assert [one["token"] for one in found["tokens"]] == [" France", " is", " Paris"]
    want = logit_lens(smollm2, ids, 3, 4)
    for at, token in enumerate(found["tokens"]):
        assert token["token_id"] == ids[at - 3] and len(token["layers"]) == 30
        for index, layer in enumerate(token["layers"]):
            assert layer["rank"] == want.ranks[index, at]
            assert layer["probability"] == pytest.approx(want.probabilities[index, at], rel=1e-3)
            top = [one["token_id"] for one in layer["top"]]
            assert top == want.top_ids[index, at].tolist()
            assert [one["token"] for one in layer["top"]] == [
                tokenizer.token_bytes(i).decode("utf-8", "replace") for i in top
            ]
    last = found["tokens"][-1]["layers"]
    assert last[-1]["rank"] == 1 and last[0]["rank"] > 100


def test_prompts_of_text_and_of_ids(http, smollm2):
    text = "The capital of France is Paris"
    ids = smollm2.tokenizer.encode(text)
    by_text = http.post(PATH, json={"prompt": text}).json()
    by_ids = http.post(PATH, json={"prompt": ids[:-1], "token_ids": ids[-1:]}).json()
    assert by_text == by_ids and len(by_text["tokens"]) == 1


def test_the_limits_are_told(http):
    limits = {"num_layers": 30, "max_tokens": 512, "max_lens_tokens": 16, "max_top": 20}
    assert http.get(PATH).json() == limits


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "exactly one of prompt and messages must be given"),
        ({"prompt": "a", "messages": QUESTION}, "exactly one of prompt and messages"),
        ({"prompt": [1]}, "prompt must have 2 to 4096 tokens for the logit lens; got 1 tokens"),
        ({"prompt": [1, -1]}, "prompt[1] must be a token id in [0, 49152); got -1"),
        ({"prompt": [1], "token_ids": [-1]}, "token_ids[0] must be a token id in [0, 49152); got"),
        ({"prompt": [1] * 513}, "your prompt resulted in 513 tokens"),
        ({"prompt": [1], "token_ids": [1] * 512}, "your token_ids resulted in 513 tokens"),
        ({"messages": [{"role": "user", "content": "a " * 600}]}, "your messages resulted in"),
        ({"prompt": [1, 2], "num_tokens": 2}, "num_tokens must be an integer in [1, 1]; got 2"),
        ({"prompt": [1, 2], "top": 21}, "top must be an integer in [1, 20]; got 21"),
        ({"prompt": [1, 2], "layers": 3}, "layers"),
    ],
)
def test_wrong_requests_are_named(http, body, words):
    found = http.post(PATH, json=body)
    assert found.status_code == 400 and words in found.json()["error"]["message"]


def test_a_model_without_a_lens_says_so():
    with serve(lambda: CannedClient("a")) as server:  # its ModelInfo has no layers to read
        assert httpx.get(server.url + PATH).json()["num_layers"] == 0
        found = httpx.post(server.url + PATH, json={"prompt": "ab"})
    assert found.status_code == 501 and "pipeline stages" in found.json()["error"]["message"]


def test_a_key_is_needed_and_the_page_can_be_off():
    config = ServerConfig(api_key_hashes=(key_hash("secret"),))
    with serve(lambda: CannedClient("a"), config) as server:
        assert httpx.get(server.url + PATH).status_code == 401
        assert httpx.post(server.url + PATH, json={"prompt": "ab"}).status_code == 401
    with serve(lambda: CannedClient("a"), ServerConfig(enable_page=False)) as server:
        assert httpx.get(server.url + PATH).status_code == 404


class OneAtATime(CannedClient):
    """Counts the lenses that are computed at once."""

    def __init__(self):
        super().__init__("a")
        self.model_info = type(self.model_info)("x", 4096, 1 << 16, num_lens_layers=1)
        self.now = self.most = self.count = 0

    async def logit_lens(self, token_ids, num_tokens=1, top=5):
        self.now += 1
        self.count += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        raise RequestError("enough")


def test_one_lens_at_a_time():
    with serve(OneAtATime) as server:

        async def ask():
            async with httpx.AsyncClient(base_url=server.url) as http:
                posts = [http.post(PATH, json={"prompt": "ab"}) for _ in range(5)]
                return [found.status_code for found in await asyncio.gather(*posts)]

        assert asyncio.run(ask()) == [400] * 5
        assert (server.client.count, server.client.most) == (5, 1)


def test_through_the_engine_loop():
    ids = list(range(1, 30))

    async def main(address):
        async with connected(address) as client:
            with pytest.raises(RequestError, match="top must be"):
                await client.logit_lens(ids, top=0)
            with pytest.raises(RequestError, match="vocabulary"):
                await client.logit_lens([1, VOCAB])
            return client.model_info.num_lens_layers, await client.logit_lens(ids, 3, 4)

    model = tiny_model()
    with served(make_engine(model)) as (_, address):
        num_layers, found = run(main(address))
    want = logit_lens(tiny_model(), ids, 3, 4)
    assert num_layers == model.config.num_layers
    for name, wanted in vars(want).items():
        got = getattr(found, name)
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=1e-4)
