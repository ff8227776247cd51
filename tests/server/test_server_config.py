"""The server's options: ranges, types, and what contradicts itself."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from engine.errors import ConfigError, UnknownOptionError
from engine.server import reasoning, tool_parsers
from engine.server.server_config import _FLAGS, _TEXTS, _TUPLES, RANGES, ServerConfig, key_hash


def test_every_field_is_checked():
    checked = {*RANGES, *_FLAGS, *_TUPLES, *_TEXTS}
    assert checked == {f.name for f in fields(ServerConfig)}


def test_options_survive_json():
    config = ServerConfig(port=0, served_model_name=("a", "b"), api_key_hashes=(key_hash("k"),))
    assert ServerConfig.from_options(json.loads(json.dumps(config.options()))) == config


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"port": -1}, "port"),
        ({"port": "80"}, "port"),
        ({"access_log": 1}, "access_log"),
        ({"served_model_name": "name"}, "served_model_name"),
        ({"served_model_name": ("",)}, "served_model_name"),
        ({"host": None}, "host"),
        ({"log_level": "loud"}, "log_level"),
        ({"tool_call_parser": "herms"}, "tool_call_parser .* got 'herms'; did you mean 'hermes'"),
        ({"reasoning_parser": "qwen"}, "reasoning_parser .* got 'qwen'; did you mean 'qwen3'"),
        ({"reranker": "qwen"}, "reranker .* got 'qwen'; did you mean 'qwen3'"),
        ({"ssl_certfile": "cert.pem"}, "ssl_keyfile"),
        ({"ssl_ca_certs": "ca.pem"}, "ssl_certfile"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "allow_credentials"),
        ({"allowed_origins": ("example.com",)}, "allowed_origins must be .*; got 'example.com'"),
        ({"allowed_origins": ("https://example.com/",)}, "allowed_origins must be"),
        ({"allowed_origins": ("*", "https://*.example.com")}, "allowed_origins must be"),
        ({"allowed_hosts": ("http://example.com",)}, "allowed_hosts must be .*; got 'http://"),
        ({"allowed_hosts": ("*.example.com:8000",)}, "allowed_hosts must be"),
    ],
)
def test_a_wrong_value_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        ServerConfig(**options)


def test_forms_of_hosts_and_origins():
    hosts = (
        "*",
        "*.example.com",
        "a_b.example:80",
        "::1",
        "[fd00::1]",
        "[fd00::1]:8000",
        "10.0.0.1",
    )
    origins = ("*", "null", "http://localhost:3000", "chrome-extension://abc", "http://[::1]:80")
    config = ServerConfig(allowed_hosts=hosts, allowed_origins=origins)
    assert (config.allowed_hosts, config.allowed_origins) == (hosts, origins)


def test_every_named_parser_is_an_option():
    for name in (*tool_parsers.NAMES, "auto"):
        assert ServerConfig(tool_call_parser=name).tool_call_parser == name
    for name in (*reasoning.NAMES, "auto"):
        assert ServerConfig(reasoning_parser=name).reasoning_parser == name


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(UnknownOptionError, match="api_server_count"):
        ServerConfig.from_options({"api_servers_count": 2})


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({"host": "::1"}, "http://[::1]:8000"),
        ({"ssl_certfile": "c", "ssl_keyfile": "k", "port": 443}, "https://127.0.0.1:443"),
    ],
)
def test_url(options, url):
    assert ServerConfig(**options).url == url
