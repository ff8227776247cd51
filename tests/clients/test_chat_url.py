"""`engine chat --url` against a scripted server."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from engine import cli
from tests.clients.scripted_server import ScriptedServer


def _chat(capsys, monkeypatch, text, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with pytest.raises(SystemExit) as end:
        cli.main(["chat", *arguments])
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


async def _echo(exchange):
    """Answer with how many messages came, and the last one."""
    if exchange.method == "GET":
        await exchange.json(200, {"data": [{"id": "first"}, {"id": "second"}]})
        return
    await exchange.head()
    await exchange.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    await exchange.event({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    messages = exchange.body["messages"]
    for piece in (f"{len(messages)} ", messages[-1]["content"]):
        await exchange.token(piece)
    await exchange.token("", "length")
    await exchange.end(11, 3)


def test_a_conversation_goes_to_the_server(capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-env")
    words = ("--system", "be brief", "--temperature", "0.5", "--stop", "x", "--top-k", "3")
    with ScriptedServer(_echo) as server:
        status, out, err = _chat(
            capsys, monkeypatch, "one\ntwo\n/reset\nthree\n", "--url", server.url + "/v1/", *words
        )
    assert status == 0
    assert out.splitlines() == ["2 one", "4 two", "2 three"]
    assert err.count("3 tokens after 11") == 3 and "hm" in err and ", length" in err
    models, first, second, _ = server.requests
    assert models.path == "/v1/models" and first.path == "/v1/chat/completions"
    assert first.headers["authorization"] == "Bearer sk-env"
    fields = {name: first.body[name] for name in ("model", "temperature", "stop", "top_k")}
    assert fields == {"model": "first", "temperature": 0.5, "stop": ["x"], "top_k": 3}
    assert first.body["max_tokens"] == 256 and "ignore_eos" not in first.body
    roles = [message["role"] for message in second.body["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert second.body["messages"][2]["content"] == "2 one"


def test_an_answer_cannot_steer_the_terminal(capsys, monkeypatch):
    async def script(exchange):
        await exchange.head()
        await exchange.token("a\x1b[2J\x9b\rb\n\tç", "\x1b[2J")
        await exchange.end(1, 1)

    with ScriptedServer(script) as server:
        _, out, err = _chat(capsys, monkeypatch, "x\n", "--url", server.url, "--model", "m")
    assert out == "a\ufffd[2J\ufffd\ufffdb\n\tç\n"
    assert err.endswith(", \ufffd[2J\n")


def test_a_content_type_cannot_steer_the_terminal(capsys, monkeypatch):
    async def script(exchange):
        await exchange.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: a/\x1b[2J\r\nContent-Length: 0\r\n\r\n"
        )

    with ScriptedServer(script) as server:
        _, _, err = _chat(capsys, monkeypatch, "x\n", "--url", server.url, "--model", "m")
    assert err.endswith("must answer with text/event-stream; got a/\\x1b[2j\n")


@pytest.mark.parametrize("count", [-1, 10**400, True, "7"])
def test_a_usage_that_is_no_count_is_not_shown(capsys, monkeypatch, count):
    async def script(exchange):
        await exchange.head()
        await exchange.token("yes")
        await exchange.end(1, count)

    with ScriptedServer(script) as server:
        status, out, err = _chat(capsys, monkeypatch, "x\n", "--url", server.url, "--model", "m")
    assert (status, out) == (0, "yes\n") and err.startswith("first token after")


async def _broken(exchange):
    """Fail in another way for each question; then answer."""
    how = exchange.body["messages"][-1]["content"]
    if how == "status":
        await exchange.json(503, {"error": {"message": "still loading"}})
    elif how == "no stream":
        await exchange.json(200, {})
    elif how == "drop":
        await exchange.head()
        await exchange.token("half")
        exchange.drop()
    else:
        await exchange.head()
        events = {
            "no json": "{",
            "no object": "7",
            "types": {"choices": [{"delta": {"content": 7}}]},
            "error": {"error": {"message": "the engine died"}},
        }
        if how in events:
            await exchange.event(events[how])
        elif how == "long":
            await exchange.chunk(b"data: " + b"x" * (2 << 20))
        elif how == "works":
            await exchange.token("yes")
            await exchange.end(1, 1)
        await exchange.chunk(b"")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("status", "answered 503: still loading"),
        ("no stream", "must answer with text/event-stream; got application/json"),
        ("drop", "closed the stream before [DONE]"),
        ("no json", "an event that is no JSON object: {"),
        ("no object", "an event that is no JSON object: 7"),
        ("types", "no chunk of a chat: its content must be text"),
        ("error", "the engine died"),
        ("long", "a line of more than 1048576 bytes"),
        ("ends", "closed the stream before [DONE]"),
    ],
)
def test_a_failure_is_one_line_and_the_conversation_goes_on(capsys, monkeypatch, how, message):
    with ScriptedServer(_broken) as server:
        status, out, err = _chat(
            capsys, monkeypatch, f"{how}\nworks\n", "--url", server.url, "--model", "m"
        )
    assert status == 0 and out.endswith("yes\n")
    first, *_ = err.splitlines()
    assert first.startswith("engine chat: ") and message in first, err
    if how != "drop":
        assert [m["content"] for m in server.requests[1].body["messages"]] == ["works"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--url", "localhost:8000"), "--url must be a URL like http://127.0.0.1:8000"),
        (("--url", "http://u:p@x"), "--url must be a URL like"),
        (("--url", "http://a..b"), "--url must be a URL like"),
        (("--url", "http://x:0"), "--url must be a URL like"),
        (("--url", "http://x", "--device", "cpu"), "--device applies to a model here"),
        (("--url", "http://x", "--max-model-len", "9"), "--max-model-len applies to a model"),
        (("--url", "http://x", "-q", "int8"), "--quantization applies to a model here"),
        (("--url", "http://x", "--top-p", "0"), "top_p must be"),
        (("--url", "http://x", "--api-key", "a\nb"), "--api-key must be printable ASCII"),
        (("--api-key", "x"), "--api-key needs --url"),
    ],
)
def test_a_bad_option_is_named(capsys, monkeypatch, words, message):
    status, _, err = _chat(capsys, monkeypatch, "x\n", *words)
    assert status == 2 and message in err and len(err.splitlines()) == 1


def test_a_server_without_models_or_without_a_port(capsys, monkeypatch):
    async def script(exchange):
        await exchange.json(200, {"data": []})

    with ScriptedServer(script) as server:
        status, _, err = _chat(capsys, monkeypatch, "x\n", "--url", server.url)
        assert status == 2 and "/v1/models must list a model" in err
    status, _, err = _chat(capsys, monkeypatch, "x\n", "--url", server.url)
    assert status == 2 and f"the connection to {server.url} failed: Connection refused" in err


def test_ctrl_c_closes_the_connection_and_not_the_program():
    closed = []

    async def script(exchange):
        await exchange.head()
        try:
            while not exchange.writer.transport.is_closing():
                await exchange.token("a ")
                await asyncio.sleep(0.02)
        finally:
            closed.append(True)

    with ScriptedServer(script) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine", "chat", "--url", server.url, "--model", "m"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            # In a shell's background SIGINT is ignored, and that is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.read(4) == "a a "
            process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + 60
            while not closed and time.monotonic() < deadline:
                time.sleep(0.02)
            assert closed, "the request was not ended"
            out, err = process.communicate("/exit\n", timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0 and "[stopped]" in out, err


@pytest.fixture
def talk(capsys, monkeypatch, tmp_path):
    """A function that enters lines in a chat with `_echo`; returns requests, output and errors."""
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))

    def talk(*lines, words=()):
        with ScriptedServer(_echo) as server:
            text = "".join(f"{line}\n" for line in lines)
            status, out, err = _chat(capsys, monkeypatch, text, "--url", server.url, *words)
        assert status == 0
        return [each for each in server.requests if each.method == "POST"], out, err

    return talk


def test_set_changes_and_lists_the_sampling_parameters(talk):
    requests, _, err = talk(
        *("/set temperature 0.2", '/set stop "\\n\\n"', "/set ignore_eos true", "one"),
        *("/set temperature default", "/set ignore_eos default", "/set", "two"),
        words=("--top-k", "7"),
    )
    first, second = (each.body for each in requests)
    assert (first["temperature"], first["stop"], first["top_k"]) == (0.2, ["\n\n"], 7)
    assert first["ignore_eos"] is True and first["max_tokens"] == 256
    assert "temperature" not in second and "ignore_eos" not in second and second["top_k"] == 7
    rows = {line.split()[0]: line.split()[1:] for line in err.splitlines() if line[:1].isalpha()}
    assert rows["top_k"] == ["7", "set", "here"] and rows["max_tokens"] == ["256"]
    assert rows["min_p"] == ["-", "the", "server's", "default"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/savee x", "there is no command '/savee'; did you mean '/save'? (a space before"),
        ("/zzz", "there is no command '/zzz'; /help lists them"),
        ("/set temprature 1", "no sampling parameter 'temprature'; did you mean 'temperature'?"),
        ("/set temperature hot", "temperature must be a number; got 'hot'"),
        ("/set top_p 2", "top_p must be a number"),
        ("/set top_k 1.5", "top_k must be a whole number; got '1.5'"),
        ("/set min_tokens 300", "min_tokens must be"),
        ("/set ignore_eos 1", "ignore_eos must be true or false; got '1'"),
        ("/save", "a conversation's name must be letters"),
        ("/save ../../x", "a conversation's name must be letters"),
        ("/load ../x", "a conversation's name must be letters"),
        ("/load none", "there is no conversation 'none'; saved are none"),
        ("/model frist", "has no model 'frist'; did you mean 'first'?"),
        ('"""never closed', 'a block that """ begins must end with """'),
    ],
)
def test_a_wrong_command_is_an_error_and_sends_nothing(talk, tmp_path, line, message):
    requests, _, err = talk(line)
    assert not requests and err.startswith("engine chat: ") and message in err
    assert not [*tmp_path.rglob("*.json")]


def test_entries_of_several_lines_and_of_a_slash(talk):
    requests, _, err = talk(
        '"""', "def f():", "    return 1", '"""', " /etc/hosts?", '/system """be', 'brief"""', "x"
    )
    contents = [each.body["messages"][-1]["content"] for each in requests]
    assert contents == ["def f():\n    return 1", "/etc/hosts?", "x"]
    assert requests[-1].body["messages"][0] == {"role": "system", "content": "be\nbrief"}
    assert "system message: be\nbrief" in err


def test_a_conversation_is_saved_and_loaded(talk, tmp_path):
    talk("/system be kind", "one", "/set top_k 5", "/save talk", "/save talk")
    file = tmp_path / "chats" / "talk.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    record = json.loads(file.read_text())
    assert record["model"] == "first" and record["sampling"] == {"top_k": 5}
    assert [m["role"] for m in record["messages"]] == ["system", "user", "assistant"]
    requests, _, err = talk("/load", "lost", "/load talk", "two", "/model second", "three")
    assert "talk" in err.splitlines() and "2 messages of talk" in err
    bodies = [each.body for each in requests]
    assert [each["model"] for each in bodies] == ["first", "first", "second"]
    contents = [m["content"] for m in bodies[1]["messages"]]
    assert contents == ["be kind", "one", "2 one", "two"] and bodies[1]["top_k"] == 5
    assert len(bodies[2]["messages"]) == 6  # the other model sees the whole conversation


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": "x", "sampling": {}}, "messages must be a list"),
        ({"messages": [{"role": "tool", "content": "x"}], "sampling": {}}, "messages must be"),
        ({"messages": [], "sampling": []}, "sampling must be an object"),
        ({"messages": [], "sampling": {"top_p": 7}}, "top_p must be a number"),
        ({"messages": [], "sampling": {"topp": 0.1}}, "did you mean 'top_p'?"),
        ({"messages": [], "sampling": {"n": 3}}, "there is no sampling parameter 'n'"),
    ],
)
def test_a_damaged_conversation_changes_nothing(talk, tmp_path, record, message):
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "bad.json").write_text(json.dumps(record))
    requests, out, err = talk("one", "/load bad", "two")
    assert message in err and out.splitlines() == ["1 one", "3 two"]
    assert "top_p" not in requests[-1].body


def test_a_system_message_is_unset(talk):
    requests, out, err = talk("one", "/system default", "two", words=("--system", "be brief"))
    assert out.splitlines() == ["2 one", "3 two"] and "no system message" in err
    assert requests[-1].body["messages"][0]["role"] == "user"


def test_clear_keeps_the_system_message(talk):
    out = talk("one", "/clear", "two", words=("--system", "be brief"))[1]
    assert out.splitlines() == ["2 one", "2 two"]
