"""A server whose engine proposes drafts: the option, the switch of a request, the metrics."""

from __future__ import annotations

import json
import urllib.request

import pytest

from engine.commands import serve
from engine.errors import ConfigError
from tests.server.test_serve import _body, _options, _post, model, serving, small

__all__ = ["model", "small"]  # fixtures

NGRAM = '{"method": "ngram", "prompt_lookup_min": 1, "adaptive": false}'


def read_metrics(server, part="spec_decode"):
    """Return the values whose names contain `part`, by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if part in line and line[0] != "#"]
    return {name: float(value) for name, _, value in pairs if not name.endswith("created")}


def _total(found, name):
    return sum(v for k, v in found.items() if k.startswith(f"vllm:spec_decode_{name}_total"))


def test_drafts_are_counted_and_change_no_token(small):
    answers = {}
    for options in ((), ("--speculative-config", NGRAM)):
        with serving(*small, "--deterministic", *options) as server:
            for switch in ({}, {"use_speculation": False}):
                before = _total(read_metrics(server), "num_draft_tokens")
                answer = json.loads(_post(server, _body(200, **switch)).read())
                answers[options, bool(switch)] = answer["choices"][0]["text"]
                found = read_metrics(server)
                has_drafted = _total(found, "num_draft_tokens") > before
                assert has_drafted == (bool(options) and not switch)
    assert len(set(answers.values())) == 1
    accepted = _total(found, "num_accepted_tokens")
    by_position = [v for k, v in found.items() if "per_pos_total" in k and "position=" in k]
    assert len(by_position) == 8 and sum(by_position) == accepted > 0
    assert _total(found, "num_drafts") > 0


def test_a_wrong_config_ends_the_start_with_its_reason(small):
    with serving(*small, "--speculative-config", '{"method": "magic"}', wait=False) as server:
        assert server.process.wait(30) == 2
        assert "speculative_config.method must be one of" in server.process.stderr.read()


def test_it_is_json_or_a_table(tmp_path, monkeypatch):
    _, _, engine = serve._split(_options("smollm2", "--speculative-config", NGRAM))
    assert engine["speculative_config"] == json.loads(NGRAM)
    file = tmp_path / "serve.toml"
    file.write_text('model = "smollm2"\n[speculative_config]\nmethod = "suffix"\n')
    _, _, engine = serve._split(serve._read(file))
    assert engine["speculative_config"] == {"method": "suffix"}
    file.write_text('model = "smollm2"\n[speculative_config]\nmethod = 2024-01-01\n')
    with pytest.raises(ConfigError, match=r"speculative_config.method .*got .*date"):
        serve._split(serve._read(file))
    for wrong in ("[1]", "{", '"ngram"', ""):
        with pytest.raises(ConfigError, match="--speculative-config must be a JSON object"):
            serve._split(_options("smollm2", "--speculative-config", wrong))
