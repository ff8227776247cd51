"""`text_offset` of /v1/completions is an index into the text, in characters; a real engine."""

from __future__ import annotations

import codecs
import dataclasses
import json
from types import SimpleNamespace

import httpx
import pytest

from engine.async_engine import AsyncEngine
from engine.sampling_params import RequestOutputKind
from engine.text.tokenizer import load_tokenizer
from tests.e2e.tiny import CONFIG, make_engine, tiny_model
from tests.server.scripted_client import GOLDEN
from tests.server.serving import serve

METADATA = {
    "byte_level": GOLDEN["byte_level"]["metadata"] | {"tokenizer.ggml.pre": "gpt-2"},
    "sentencepiece": GOLDEN["sentencepiece"][0]["metadata"],
}
LETTERS = ["é", "😀", "n", "ab", "ab", "€", "a"]


class Recording(AsyncEngine):
    """Keeps the prompt's ids and those of each continuation of the last request."""

    async def generate(self, prompt, params=None, **options):
        self.ids = {}
        async for output in super().generate(prompt, params, **options):
            self.prompt_ids = list(output.prompt_token_ids)
            for one in output.outputs:
                is_delta = params.output_kind is RequestOutputKind.DELTA
                before = self.ids.get(one.index, []) if is_delta else []
                self.ids[one.index] = before + list(one.token_ids)
            yield output


@pytest.fixture(scope="module", params=METADATA)
def server(request):
    """A tiny random model whose answers are mostly parts of characters."""
    tokenizer = load_tokenizer(METADATA[request.param])
    model = tiny_model(config=dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "has_tokenizer", True)
        patch.setattr(type(model), "tokenizer", tokenizer)
        with (
            serve(lambda: Recording(make_engine(model, debug=False))) as found,
            httpx.Client(base_url=found.url, timeout=60) as http,
        ):
            data = {bytes([b]) for text in LETTERS for b in text.encode()}
            data |= {text.encode() for text in LETTERS}
            ids = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in data]
            ids += sorted(tokenizer.special_ids)[:2]
            yield SimpleNamespace(client=found.client, http=http, tokenizer=tokenizer, ids=ids)


def begins(data, num_chars=0):
    """Return the index of each byte's character; each invalid sequence is one U+FFFD."""
    found = []
    while data:
        size = next((n for n in range(1, 5) if _is_text(data[:n])), 0)
        if not size:
            with pytest.raises(UnicodeDecodeError) as caught:
                data.decode()
            size = caught.value.end
        found += [num_chars] * size
        num_chars += 1
        data = data[size:]
    return [*found, num_chars]


def _is_text(data):
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def expected(server, ids, is_skipping, text):
    """Return where each token begins, from the bytes of all."""
    special = server.tokenizer.special_ids if is_skipping else ()
    parts = [b"" if i in special else server.tokenizer.token_bytes(i) for i in ids]
    chars = begins(b"".join(parts))
    found = []
    before = b""
    for part in parts:
        is_inside = codecs.utf_8_decode(before, "replace", False)[1] < len(before)
        at = len(before) - (is_inside and not part)  # a token without text is in the open character
        found.append(min(chars[at], len(text)))
        before += part
    return found


def ask(server, **fields):
    """Return (text, logprobs) of each choice, and check the chunks of a streamed answer."""
    body = {"prompt": "abé", "logprobs": 2, "max_tokens": 40, "temperature": 2.0, "seed": 3}
    body |= {"ignore_eos": True, "allowed_token_ids": server.ids, **fields}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        choices = answer.json()["choices"]
        return [(choice["text"], choice["logprobs"]) for choice in choices]
    found = {}
    for line in answer.text.split("\n"):
        if line.startswith("data: {"):
            [choice] = json.loads(line[6:])["choices"]
            text, logprobs = found.get(choice["index"], ("", {}))
            new = choice["logprobs"]
            end = len(text) + len(choice["text"])
            if choice["finish_reason"] is None:  # the tokens come with their text
                assert all(len(text) <= offset < end for offset in new["text_offset"])
            joined = {name: logprobs.get(name, []) + values for name, values in new.items()}
            found[choice["index"]] = (text + choice["text"], joined)
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("is_skipping", [True, False])
@pytest.mark.parametrize("stop", [[], ["ab", "na"], ["é"]])
def test_offsets_are_those_of_the_characters(server, stop, is_skipping):
    options = {"n": 3, "stop": stop, "skip_special_tokens": is_skipping}
    options |= {"min_tokens": 12, "max_tokens": 150} if stop else {}
    whole = ask(server, **options)
    ids = dict(server.client.ids)
    for index, (text, logprobs) in enumerate(whole):
        assert logprobs["text_offset"] == expected(server, ids[index], is_skipping, text)
        assert len(logprobs["tokens"]) == len(ids[index])
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            is_shown = "\ufffd" not in token and not (is_skipping and token.startswith("<"))
            if is_shown and offset + len(token) <= len(text):
                assert text[offset:].startswith(token)
    assert any("\ufffd" in token for token in whole[0][1]["tokens"])
    shown = [logprobs["text_offset"][-1] < len(text) for text, logprobs in whole]
    assert shown.count(False) >= (1 if stop else 0)  # the token that completed the stop string
    assert ask(server, stream=True, **options) == whole


@pytest.mark.parametrize("prompt", ["abé", "n😀 a", "  a b", "e\u0301<|im_end|>n", "a</s>n"])
@pytest.mark.parametrize("is_text", [True, False])
def test_an_echo_counts_from_the_prompts_beginning(server, prompt, is_text):
    given = prompt if is_text else server.tokenizer.encode(prompt)
    options = {"prompt": given, "echo": True, "max_tokens": 6, "n": 2}
    whole = ask(server, **options)
    num = len(server.client.prompt_ids)
    shown = prompt if is_text else server.tokenizer.decode(given, skip_special_tokens=False)
    ids = dict(server.client.ids)
    for index, (text, logprobs) in enumerate(whole):
        assert text.startswith(shown)
        offsets = logprobs["text_offset"]
        after = expected(server, ids[index], True, text[len(shown) :])
        assert offsets[num:] == [len(shown) + offset for offset in after]
        assert offsets[:num] == sorted(offsets[:num])
        found = zip(server.client.prompt_ids, logprobs["tokens"], offsets[:num], strict=False)
        for token_id, token, offset in found:
            is_added = token_id == server.tokenizer.bos_token_id and is_text
            if not is_added and "\ufffd" not in token and token.strip():
                assert shown[offset:].lstrip(" ").startswith(token.strip(" "))
    assert ask(server, stream=True, **options) == whole


def test_only_the_prompt(server):
    [(text, logprobs)] = ask(server, prompt="né", echo=True, max_tokens=0)
    assert text == "né"
    assert max(logprobs["text_offset"]) == 1


def test_tokens_with_equal_texts_are_all_in_the_top(server):
    """Parts of different characters are all shown as U+FFFD."""
    [(_, logprobs)] = ask(server, logprobs=20, allowed_token_ids=server.ids[:9])
    for token, top, value in zip(
        logprobs["tokens"], logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True
    ):
        assert top[token] == value
        assert len(top) in (20, 21)
        assert any(key.startswith("token_id:") for key in top)


def test_a_stream_has_prompt_logprobs_though_its_first_token_has_no_text(server):
    part = server.tokenizer.token_bytes
    [begin, *_] = [i for i in server.ids if part(i) == "é".encode()[:1]]
    body = {"prompt": "abé", "prompt_logprobs": 1, "max_tokens": 2, "seed": 3, "n": 2}
    body |= {"temperature": 1, "ignore_eos": True, "allowed_token_ids": [begin]}
    whole = server.http.post("/v1/completions", json=body).json()["choices"]
    answer = server.http.post("/v1/completions", json=body | {"stream": True})
    found = {}
    for line in answer.text.split("\n"):
        if line.startswith("data: {"):
            [choice] = json.loads(line[6:])["choices"]
            found.setdefault(choice["index"], []).append(choice["prompt_logprobs"])
    for choice in whole:
        assert len(choice["prompt_logprobs"]) > 1
        assert found[choice["index"]][0] == choice["prompt_logprobs"]
        assert not any(found[choice["index"]][1:])
