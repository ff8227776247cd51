"""The clients and our own server understand each other."""

from __future__ import annotations

import io
import json

import pytest

from engine import cli
from engine.server.server_config import ServerConfig, key_hash
from tests.server.serving import CannedClient, serve

PIECES = ("one ", "two ", "three ", "four")


@pytest.fixture
def server():
    config = ServerConfig(api_key_hashes=(key_hash("right"),), access_log=False)
    with serve(lambda: CannedClient(*PIECES, delay=0.01), config) as found:
        yield found


def _run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(list(map(str, arguments)))
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_bench_serve_reads_our_streams(capsys, tmp_path, server, endpoint):
    file = tmp_path / "x.json"
    words = ["--base-url", server.url, "--endpoint", endpoint, "--api-key", "right"]
    words += ["--num-prompts", 5, "--random-input-len", 9, "--random-output-len", 19]
    words += ["--ignore-eos", "--json", file, "--save-detailed", "--max-concurrency", 5]
    status, out, err = _run(capsys, "bench", "serve", *words)
    assert status == 0, out + err
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["completed"], row["failed"], row["without_usage"]) == (5, 0, 0)
    assert row["total_output_tokens"] == 5 * len("".join(PIECES))  # one token a character
    assert [len(gaps) for gaps in row["requests"]["itls"]] == [3] * 5  # a chunk a piece
    assert row["model"] == "scripted" and 5 < row["p50_itl_ms"] < 200


def test_bench_serve_says_what_the_server_refused(capsys, server):
    words = ["bench", "serve", "--base-url", server.url, "--model", "scripted"]
    status, _, err = _run(capsys, *words, "--api-key", "wrong")
    assert status == 2 and "http 401" in err
    status, _, err = _run(capsys, *words, "--api-key", "right", "--extra-body", '{"top_q": 1}')
    assert status == 2 and "http 400" in err and "did you mean 'top_p'" in err


def test_chat_reads_our_streams(capsys, monkeypatch, server):
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    status, out, err = _run(capsys, "chat", "--url", server.url, "--top-k", 4)
    assert status == 0, err
    assert out.splitlines() == ["".join(PIECES)] * 2
    assert err.count("18 tokens after") == 2
    assert server.client.requests[0][1].top_k == 4
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    status, _, err = _run(capsys, "chat", "--url", server.url)
    assert status == 2 and "answered 401" in err
