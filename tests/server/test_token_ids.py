"""Token ids in answers (`return_token_ids`), and /inference/v1/generate: ids in, ids out."""

from __future__ import annotations

import json

import httpx
import pytest

from engine.async_engine import AsyncEngine
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.server.server_config import ServerConfig, key_hash
from tests.e2e.tiny import make_engine, tiny_model
from tests.server.loops import connected, run, served
from tests.server.serving import CannedClient, serve

QUESTION = [{"role": "user", "content": "Name the three primary colors."}]
PROMPT = "The capital of France is"
GENERATE = "/inference/v1/generate"
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def http(real_server):
    with httpx.Client(base_url=real_server.url, timeout=60) as found:
        yield found


def post(http, path, **body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def frames(http, path, **body):
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ---- return_token_ids


def test_a_conversation_returns_its_ids(http, smollm2):
    given = {"messages": QUESTION, "temperature": 0, "max_tokens": 24}
    found = post(http, "/v1/chat/completions", return_token_ids=True, **given)
    assert found["prompt_token_ids"] == smollm2.tokenizer.encode_chat(QUESTION)
    [choice] = found["choices"]
    assert smollm2.tokenizer.decode(choice["token_ids"]) == choice["message"]["content"]
    assert len(choice["token_ids"]) == found["usage"]["completion_tokens"]
    first, *others = frames(http, "/v1/chat/completions", return_token_ids=True, **given)
    assert first["prompt_token_ids"] == found["prompt_token_ids"]
    assert not any("prompt_token_ids" in frame for frame in others)
    ids = [i for frame in others for i in frame["choices"][0]["token_ids"]]
    assert ids == choice["token_ids"]
    text = "".join(frame["choices"][0]["delta"].get("content", "") for frame in others)
    assert text == choice["message"]["content"]
    given |= {"prompt_logprobs": 1, "n": 2, "return_token_ids": True, "temperature": 1}
    scored = post(http, "/v1/chat/completions", **given)
    assert len(scored["prompt_logprobs"]) == len(found["prompt_token_ids"])
    first, *others = frames(http, "/v1/chat/completions", **given)
    assert first["prompt_token_ids"] == found["prompt_token_ids"]
    assert first["prompt_logprobs"] == scored["prompt_logprobs"]
    assert not any("prompt_logprobs" in frame for frame in others)
    given = {"messages": QUESTION, "temperature": 0, "max_tokens": 24}
    plain = post(http, "/v1/chat/completions", **given)
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]
    assert plain["choices"][0]["message"] == choice["message"]
    assert "token_ids" not in json.dumps(frames(http, "/v1/chat/completions", **given))


@pytest.mark.parametrize("options", [{}, {"logprobs": True}, {"stop": ["red"]}], ids=str)
def test_streamed_ids_are_those_of_the_whole_answer(http, options):
    """Whatever holds text back: several answers, a stop string, log-probabilities."""
    given = {"messages": QUESTION, "seed": 3, "n": 2, "max_tokens": 20, "return_token_ids": True}
    given |= options
    want = post(http, "/v1/chat/completions", **given)
    given["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    ids = {0: [], 1: []}
    for frame in frames(http, "/v1/chat/completions", **given):
        for choice in frame["choices"]:
            ids[choice["index"]] += choice.get("token_ids", [])
            count = frame["usage"]["completion_tokens"]
    assert ids == {choice["index"]: choice["token_ids"] for choice in want["choices"]}
    assert count == sum(map(len, ids.values()))


def test_ids_of_text_that_is_no_content_are_sent(smollm2):
    """Reasoning that is not shown, and calls that are parsed, have their tokens in the stream."""
    pieces = ("<think>a", "b</think>", "c", "<|im_end|>")
    with serve(lambda: CannedClient(*pieces)) as server, httpx.Client(base_url=server.url) as http:
        server.app.state.chat.reasoning_parser = "qwen3"
        given = {"messages": QUESTION, "return_token_ids": True, "include_reasoning": False}
        found = frames(http, "/v1/chat/completions", **given)
        ids = [i for frame in found for i in frame["choices"][0].get("token_ids", [])]
        assert ids == list(map(ord, "".join(pieces)))
        shown = [frame["choices"][0]["delta"].get("content", "") for frame in found]
        assert "a" not in "".join(shown)


def test_completions_return_the_ids_of_each_prompt(http, smollm2):
    prompts = [PROMPT, "1, 2, 3,"]
    given = {"prompt": prompts, "n": 2, "seed": 5, "max_tokens": 6, "return_token_ids": True}
    found = post(http, "/v1/completions", **given)["choices"]
    assert len(found) == 4
    for choice in found:
        ids = smollm2.tokenizer.encode(prompts[choice["index"] // 2])
        assert choice["prompt_token_ids"] == ids
        assert smollm2.tokenizer.decode(choice["token_ids"]) == choice["text"]
    prompt_ids, ids, texts = {}, {i: [] for i in range(4)}, dict.fromkeys(range(4), "")
    for frame in frames(http, "/v1/completions", **given):
        [choice] = frame["choices"]
        index = choice["index"]
        if "prompt_token_ids" in choice:
            assert index not in prompt_ids
            prompt_ids[index] = choice["prompt_token_ids"]
        ids[index] += choice["token_ids"]
        texts[index] += choice["text"]
    for index, choice in enumerate(found):
        assert prompt_ids[index] == choice["prompt_token_ids"]
        assert (ids[index], texts[index]) == (choice["token_ids"], choice["text"])


def test_a_scored_prompt_has_no_generated_ids(http):
    given = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "return_token_ids": True}
    [choice] = post(http, "/v1/completions", **given)["choices"]
    assert choice["token_ids"] == [] and len(choice["prompt_token_ids"]) == 5


def test_the_ids_of_an_answer_are_bounded():
    config = ServerConfig(max_body_bytes=1000)
    with serve(lambda: CannedClient("a"), config) as server:
        body = {"prompt": [1] * 100, "n": 2, "return_token_ids": True}
        found = httpx.post(server.url + "/v1/completions", json=body)
        assert found.status_code == 400 and found.json()["error"]["param"] == "prompt"
        assert "at most 125 token ids" in found.text and "got 200 in 2 copies" in found.text
        body["n"] = 1
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200


# ---- /inference/v1/generate


def test_generate_equals_completions(http, smollm2):
    ids = smollm2.tokenizer.encode(PROMPT)
    found = post(http, GENERATE, token_ids=ids, sampling_params=GREEDY, request_id="mine")
    assert found["request_id"] == "mine" and found["model"] == "smollm2"
    want = post(http, "/v1/completions", prompt=ids, return_token_ids=True, **GREEDY)
    [choice] = found["choices"]
    assert choice == {
        "index": 0,
        "token_ids": want["choices"][0]["token_ids"],
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    usage = {name: found["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    assert usage == {"prompt_tokens": 5, "completion_tokens": 8}
    options = {"include_usage": True}
    *parts, last = frames(
        http, GENERATE, token_ids=ids, sampling_params=GREEDY, stream_options=options
    )
    assert [i for part in parts for i in part["choices"][0]["token_ids"]] == choice["token_ids"]
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8


def test_logprobs_of_generated_ids(http, smollm2):
    ids = smollm2.tokenizer.encode(PROMPT)
    params = {**GREEDY, "logprobs": 2, "prompt_logprobs": 0}
    found = post(http, GENERATE, token_ids=ids, sampling_params=params)
    content = found["choices"][0]["logprobs"]["content"]
    want = post(http, "/v1/completions", prompt=ids, logprobs=2, prompt_logprobs=0, **GREEDY)
    logprobs = want["choices"][0]["logprobs"]
    assert [item["token"] for item in content] == logprobs["tokens"]
    assert [item["logprob"] for item in content] == pytest.approx(logprobs["token_logprobs"])
    assert [len(item["top_logprobs"]) for item in content] == [2] * 8
    assert [entry and list(entry) for entry in found["prompt_logprobs"]] == [
        None,
        *([str(i)] for i in ids[1:]),
    ]
    parts = frames(http, GENERATE, token_ids=ids, sampling_params=params)
    assert parts[0]["prompt_logprobs"] == found["prompt_logprobs"]
    assert all(part["prompt_logprobs"] is None for part in parts[1:])
    streamed = [item for part in parts for item in part["choices"][0]["logprobs"]["content"]]
    assert streamed == content


def test_stops_and_several_continuations(http, smollm2):
    ids = smollm2.tokenizer.encode(PROMPT)
    params = {**GREEDY, "stop": ["Paris"]}
    [choice] = post(http, GENERATE, token_ids=ids, sampling_params=params)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Paris")
    assert smollm2.tokenizer.decode(choice["token_ids"]) == " Paris"
    params = {"n": 3, "seed": 7, "max_tokens": 5}
    found = post(http, GENERATE, token_ids=ids, sampling_params=params)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in found["choices"]}) > 1
    params = {"max_tokens": 4, "temperature": 0, "structured_outputs": {"choice": ["no", "yes"]}}
    [choice] = post(http, GENERATE, token_ids=ids, sampling_params=params)["choices"]
    assert smollm2.tokenizer.decode(choice["token_ids"], True) in ("no", "yes")


def test_without_max_tokens_the_context_is_the_limit(http):
    found = post(http, GENERATE, token_ids=[5] * 500, sampling_params={"ignore_eos": True})
    assert found["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"token_ids": []}, "token_ids", "must not be empty"),
        ({"token_ids": [5] * 512}, "token_ids", "512"),
        ({"token_ids": [1, 1 << 20]}, "token_ids", "49152"),
        ({"token_ids": [-1]}, "token_ids", "-1"),
        ({"token_ids": [1], "features": {}}, "features", "text only"),
        ({"token_ids": [1], "kv_transfer_params": {}}, "kv_transfer_params", "not transferred"),
        ({"token_ids": [1], "request_id": ""}, "request_id", "1 to 256"),
        ({"token_ids": [1], "sampling_params": {"top_p": 2}}, "top_p", "top_p"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 21}}, "logprobs", "at most 20"),
        ({"token_ids": [1], "sampling_params": {"stream": True}}, "sampling_params.stream", "unkn"),
        ({"token_ids": "abc"}, "token_ids", "array"),
        ({}, "token_ids", "token_ids"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_refused(http, body, param, words, stream):
    found = http.post(GENERATE, json={**body, "stream": stream})
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_a_model_without_a_tokenizer_is_served():
    with serve(lambda: AsyncEngine(make_engine(tiny_model()))) as server:
        body = {"token_ids": [5, 6, 7], "sampling_params": {**GREEDY, "logprobs": 0}}
        found = httpx.post(server.url + GENERATE, json=body, timeout=30).json()["choices"][0]
        assert len(found["token_ids"]) == len(found["logprobs"]["content"])


def test_keys_are_isolated():
    keys = {"api_key_hashes": (key_hash("a"), key_hash("b"))}
    with serve(lambda: AsyncEngine(make_engine(tiny_model())), ServerConfig(**keys)) as server:

        def cached(key):
            headers = {"X-API-Key": key}
            body = {"token_ids": [5, 9, 2, 7] * 16, "sampling_params": {"max_tokens": 1}}
            found = httpx.post(server.url + GENERATE, json=body, headers=headers, timeout=30)
            return found.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached(key) for key in "abab"] == [0, 0, 48, 48]


def test_through_an_engine_in_another_process(smollm2):
    """Its client builds no text either, but finds stop strings."""
    engine = make_engine(smollm2, max_num_batched_tokens=64)
    tokenizer = smollm2.tokenizer

    async def main(address):
        async with connected(address, tokenizer) as client:
            given = {"temperature": 0.0, "max_tokens": 6, "output_kind": RequestOutputKind.DELTA}
            found = []
            for params in (
                SamplingParams(**given, detokenize=False),
                SamplingParams(**given, stop=["Paris"]),
            ):
                outputs = client.generate(tokenizer.encode(PROMPT), params)
                found.append([i async for o in outputs for i in o.outputs[0].token_ids])
            return found

    with served(engine) as (_, address):
        every, stopped = run(main(address))
    assert len(every) == 6 and every[: len(stopped)] == stopped
    assert tokenizer.decode(stopped) == " Paris"
