"""The size of an answer is bounded before it is computed: no -1 passes a limit."""

from __future__ import annotations

import base64

import httpx
import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.server import remote_request
from engine.server.engine_client import ZmqEngineClient
from engine.server.field_limits import check_text_of
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig
from tests.e2e.tiny import VOCAB, make_engine, tiny_model
from tests.server.loops import TOKEN, collected, connected, run, served
from tests.server.serving import CannedClient, WordTokenizer, serve

LIMIT = 3000


@pytest.fixture(scope="module")
def server():
    config = ServerConfig(max_answer_logprobs=LIMIT, max_prompts=4)
    with serve(lambda: AsyncEngine(make_engine(tiny_model())), config) as found:
        yield found


def ask(server, path="/v1/completions", **body):
    """Return the status, and the answer or its error."""
    response = httpx.post(server.url + path, json=body, timeout=30)
    found = response.json()
    return response.status_code, found.get("error", found)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prompt_logprobs", -1, "at most 20; got -1; -1, the whole vocabulary, needs"),
        ("prompt_logprobs", -2, "[-1, 20]"),
        ("prompt_logprobs", 21, "at most 20"),
        ("logprobs", -1, "must be a whole number in [0, 20]; got -1"),
        ("logprobs", 21, "at most 20; got 21"),
        ("n", -1, "[1, 16]"),
        ("n", 0, "[1, 16]"),
        ("best_of", -1, "[1, 16]"),
        ("max_tokens", -1, "[1, "),
        ("max_tokens", 0, "[1, "),
        ("min_tokens", -1, "[0, "),
        ("timeout", -1, "timeout"),
        ("timeout", 0, "timeout"),
        ("priority", -(2**31), "priority"),
    ],
)
def test_a_number_below_its_range_is_no_way_past_the_limit(server, field, value, words):
    status, error = ask(server, prompt=[1, 2], **{field: value})
    assert status == 400 and words in error["message"] and field in error["message"]


def test_the_option_for_the_whole_vocabulary_is_named_where_it_applies(server):
    """A completion's or a conversation's own `logprobs` are 0 to 20, whatever the option says."""
    path = "/inference/v1/generate"
    for field in ("logprobs", "prompt_logprobs"):
        status, error = ask(server, path, token_ids=[1, 2], sampling_params={field: -1})
        assert status == 400 and f"{field} must be at most 20" in error["message"]
        assert error["message"].endswith(
            "got -1; -1, the whole vocabulary, needs --max-logprobs -1"
        )


def test_those_that_mean_none_are_allowed(server):
    status, found = ask(server, prompt=[1, 2], top_k=-1, seed=-1, max_tokens=2, min_p=0)
    assert status == 200 and found["usage"]["completion_tokens"] <= 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("value", [-1, 21])
def test_chat_has_the_same_limits(path, value):
    with serve(lambda: CannedClient("ok")) as server:
        if path == "/v1/responses":
            body = {"input": "Hi", "top_logprobs": value}
        else:
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            body |= {"logprobs": True, "top_logprobs": value}
        status, error = ask(server, path, **body)
        assert status == 400 and "top_logprobs" in error["message"]
        assert not server.client.requests


def test_the_whole_vocabulary_is_an_option():
    config = ServerConfig(max_logprobs=-1, max_answer_logprobs=3 * VOCAB + 2)
    with serve(lambda: AsyncEngine(make_engine(tiny_model())), config) as server:
        options = {"max_tokens": 1, "logprobs": 1}
        status, found = ask(server, prompt=[1, 2, 3], prompt_logprobs=-1, **options)
        first, *rest = found["choices"][0]["prompt_logprobs"]
        assert status == 200 and first is None
        assert [len(entry) for entry in rest] == [VOCAB, VOCAB]
        status, error = ask(server, prompt=[1, 2, 3, 4], prompt_logprobs=-1, **options)
        assert status == 400 and f"got {VOCAB} for each of 4 prompt tokens" in error["message"]


@pytest.mark.parametrize(
    ("body", "most", "entries"),
    [
        # per prompt token, per generated token; `most` prompt tokens fit
        ({"prompt_logprobs": 19, "max_tokens": 1}, 150, "20 for each of 151"),
        ({"prompt_logprobs": 4, "n": 4, "max_tokens": 1}, 150, "20 for each of 151"),
        ({"echo": True, "logprobs": 19, "max_tokens": 0}, 149, "20 for each of 150"),
        ({"prompt_logprobs": 9, "echo": True, "logprobs": 9, "max_tokens": 1}, 149, "20 for each"),
    ],
)
def test_positions_times_entries_are_counted_first(server, body, most, entries):
    status, found = ask(server, prompt=[5] * most, **body)
    assert status == 200 and len(found["choices"]) == body.get("n", 1)
    status, error = ask(server, prompt=[5] * (most + 1), **body)
    assert status == 400 and error["param"] == "prompt_logprobs"
    assert f"at most {LIMIT} log-probabilities (max_answer_logprobs)" in error["message"]
    assert entries in error["message"]


def test_prompts_times_answers_times_tokens_are_counted_first(server):
    body = {"prompt": [[1], [2], [3]], "n": 5, "logprobs": 9}
    status, found = ask(server, max_tokens=20, **body)
    assert status == 200 and len(found["choices"]) == 15
    status, error = ask(server, max_tokens=21, **body)
    assert status == 400 and "150 for each of 21 generated tokens" in error["message"]
    status, _ = ask(server, prompt=[1], max_tokens=100_000, logprobs=1)  # the context is shorter
    assert status == 200


def test_an_open_end_gets_as_many_tokens_as_the_limit_allows():
    config = ServerConfig(max_answer_logprobs=1000)
    with serve(lambda: CannedClient("ok"), config) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "n": 2}
        assert ask(server, "/v1/chat/completions", **body)[0] == 200
        assert ask(server, "/v1/chat/completions", **body, logprobs=True, top_logprobs=4)[0] == 200
        params = [request[1] for request in server.client.requests]
        assert [each.max_tokens for each in params] == [None, 100]


def test_repeated_text_is_bounded():
    tokenizer = WordTokenizer()
    config = ServerConfig(max_body_bytes=1000)
    check_text_of(["a" * 500], "prompt", tokenizer, config, num_copies=2)
    check_text_of([[0x20AC] * 333], "tokens", tokenizer, config)
    with pytest.raises(APIError, match="prompt must have a text of at most 1000 bytes, 2 times"):
        check_text_of(["a" * 501], "prompt", tokenizer, config, num_copies=2)
    with pytest.raises(APIError, match="tokens must have a text of at most 1000 bytes"):
        check_text_of([[0x20AC] * 334], "tokens", tokenizer, config)
    with serve(lambda: CannedClient("ok"), config) as server:
        assert ask(server, "/detokenize", tokens=[1000] * 150)[0] == 200
        status, error = ask(server, prompt="a" * 300, echo=True, n=4)
        assert status == 400 and "max_body_bytes" in error["message"]
        assert ask(server, prompt="a" * 300, echo=True, n=3)[0] == 200


def test_wrong_dimensions_cost_no_embedding(server, monkeypatch):
    status, found = ask(server, "/v1/embeddings", input=[1, 2], dimensions=48)
    assert status == 200 and len(found["data"][0]["embedding"]) == 48
    monkeypatch.setattr(server.client, "embed_ids", None)
    for value in (-1, 0, 47):
        status, error = ask(server, "/v1/embeddings", input=[1, 2], dimensions=value)
        assert status == 400 and f"dimensions must be 48, the model's; got {value}" in str(error)


def test_the_values_of_embeddings_are_bounded_before_they_are_computed(monkeypatch):
    config = ServerConfig(max_embedding_values=3 * 48 + 47)
    with serve(lambda: AsyncEngine(make_engine(tiny_model())), config) as server:
        both = [
            ask(server, "/v1/embeddings", input=[[1, 2], [3], [4]], encoding_format=encoding)[1]
            for encoding in ("float", "base64")
        ]
        floats, texts = ([each["embedding"] for each in found["data"]] for found in both)
        assert [len(each) for each in floats] == [48] * 3
        numbers = [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in texts]
        assert floats == numbers
        monkeypatch.setattr(server.client, "embed_ids", None)
        status, error = ask(server, "/v1/embeddings", input=[[1]] * 4)
        assert status == 400 and error["param"] == "input"
        assert "input must have at most 3 entries" in error["message"]
        assert "(max_embedding_values); got 4" in error["message"]


def test_the_texts_of_tokens_are_those_of_a_prompt_that_fits():
    with serve(lambda: CannedClient("ok")) as server:
        longest = server.client.model_info.max_model_len
        server.client.tokenizer.max_token_chars = 8  # a text may be longer than its first check
        text = "ab" * (longest // 2)
        status, found = ask(server, "/tokenize", prompt=text, return_token_strs=True)
        assert status == 200 and found["token_strs"] == list(text)
        status, error = ask(server, "/tokenize", prompt=text + "c", return_token_strs=True)
        assert status == 400 and error["param"] == "prompt"
        assert f"resulted in {longest + 1} tokens" in error["message"]
        assert ask(server, "/tokenize", prompt=text + "c")[1]["count"] == longest + 1


def test_many_log_probabilities_are_read_in_another_thread(monkeypatch):
    """With the values of few, which are read at once."""

    async def main(address):
        async with connected(address) as client:
            found = []
            for kind in ("FINAL_ONLY", "DELTA"):
                for most in (10_000, 8):
                    monkeypatch.setattr(remote_request, "_MANY_ENTRIES", most)
                    params = _params(kind)
                    found.append(await collected(client, [1, 2, 3] * 20, params))
            assert not client._requests
            return found

    engine = make_engine(tiny_model())
    with served(engine) as (_, address):
        whole, late, stream, late_stream = run(main(address))
    assert len(whole[-1].prompt_logprobs) == 60 and len(whole[-1].outputs[0].logprobs) == 30
    assert late[-1].prompt_logprobs == whole[-1].prompt_logprobs
    assert late[-1].outputs == whole[-1].outputs
    assert late_stream[0].prompt_logprobs == stream[0].prompt_logprobs == whole[-1].prompt_logprobs
    for outputs in (stream, late_stream):
        ids = [i for output in outputs for i in output.outputs[0].token_ids]
        assert ids == list(whole[-1].outputs[0].token_ids)


def _params(kind):
    return SamplingParams(
        temperature=0.0,
        max_tokens=30,
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=3,
        output_kind=RequestOutputKind[kind],
    )


def test_the_client_knows_the_size_of_an_embedding():
    async def main(address):
        client = await ZmqEngineClient.connect(address, TOKEN)
        await client.close()
        return client.model_info.hidden_size

    with served(make_engine(tiny_model())) as (_, address):
        assert run(main(address)) == 48
