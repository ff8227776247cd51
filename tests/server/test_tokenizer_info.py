"""/tokenizer_info with SmolLM2's tokenizer (``engine pull smollm2``)."""

from __future__ import annotations

import httpx
import pytest

from engine.loading.download import local_path
from engine.server.api_process import load_model_tokenizer
from engine.server.server_config import ServerConfig, key_hash
from tests.server.serving import CannedClient, serve


def _serve(**options):
    if local_path("smollm2") is None:
        pytest.skip("SmolLM2 has not been pulled: run `engine pull smollm2`")
    client = CannedClient("Hi")
    client.tokenizer = load_model_tokenizer("smollm2", None)
    return serve(lambda: client, ServerConfig(**options, access_log=False))


def test_it_is_off_by_default():
    with _serve() as server:
        assert httpx.get(server.url + "/tokenizer_info").status_code == 404
        paths = httpx.get(server.url + "/openapi.json").json()["paths"]
        assert "/tokenizer_info" not in paths


def test_it_holds_what_tokenizes_remotely_and_no_path():
    options = {"enable_tokenizer_info_endpoint": True, "api_key_hashes": (key_hash("k"),)}
    with _serve(**options) as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/tokenizer_info").status_code == 401
        http.headers["X-API-Key"] = "k"
        found = http.get("/tokenizer_info").json()
        template = found.pop("chat_template")
        assert found == {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
            "sep_token": None,
            "cls_token": None,
            "tokenizer_class": "Tokenizer",
            "vocab_size": 49152,
            "model_max_length": 4096,
        }
        assert template == server.client.tokenizer.chat_template
        assert "add_generation_prompt" in template
        # The end token is one token, as harnesses assume.
        fields = {"prompt": found["eos_token"], "add_special_tokens": False}
        assert http.post("/tokenize", json=fields).json()["tokens"] == [2]
