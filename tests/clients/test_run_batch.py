"""`engine run-batch`: a line for each line, in their order, whatever is wrong with some."""

from __future__ import annotations

import asyncio
import io
import json
import os

import numpy as np
import pytest

from engine import cli
from engine.commands import run_batch
from engine.commands._batch import MAX_LINE, Batch
from engine.errors import EngineError, RequestError
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.server.chat_stream import ChatService
from tests.server.serving import CannedClient

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def _line(custom_id, url=TEXT, /, **body):
    body = body or {"prompt": "hello"}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def _results(client, lines, *window):
    async def main():
        batch = Batch(client, ChatService(client), ["m", "other"], *(window or (100,)))
        return [result async for result in batch.results(lines)]

    return asyncio.run(main())


def _bodies(results):
    return [json.loads(bytes(result.response.body)) for result in results]


class SlowFirst(CannedClient):
    """Answers the earlier the later a request has come."""

    most_active = 0

    async def _outputs(self, prompt, params, options):
        self.most_active = max(self.most_active, self.num_active)
        self.delay = 0.02 * max(1, 9 - len(self.requests))
        async for output in super()._outputs(prompt, params, options):
            yield output


def test_results_have_the_order_of_the_lines():
    client = SlowFirst("yes")
    lines = [_line(f"r{index}", prompt=f"p{index}") for index in range(8)]
    results = _results(client, lines)
    assert [result.custom_id for result in results] == [f"r{index}" for index in range(8)]
    assert client.most_active == 8
    assert len({result.id for result in results}) == 8
    first = _bodies(results)[0]
    assert first["object"] == "text_completion" and first["model"] == "m"
    assert first["choices"][0]["text"] == "yes" and first["usage"]["prompt_tokens"] == 2


def test_so_many_lines_are_begun_at_once():
    client = SlowFirst("yes")
    assert len(_results(client, [_line(str(index)) for index in range(9)], 3)) == 9
    assert client.most_active == 3


@pytest.mark.parametrize(("num_lines", "most_active"), [(3.0, 3), (2.9, 2), (0.5, 1)])
def test_so_many_bytes_are_begun_at_once(num_lines, most_active):
    client = SlowFirst("yes")
    lines = [_line(str(index)) for index in range(9)]
    assert len(_results(client, lines, 100, int(num_lines * len(lines[0])))) == 9
    assert client.most_active == most_active


def test_chats_and_completions_are_answered_as_the_server_does():
    client = CannedClient("an", "swer")
    messages = [{"role": "user", "content": "x"}]
    lines = [
        _line("a", CHAT, messages=messages, max_completion_tokens=7, n=2),
        _line("b", prompt=[1, 2, 3], model="other", temperature=0.5),
        _line("c", prompt=["x", "y"], echo=True),
    ]
    chat, text, both = _bodies(_results(client, lines))
    assert chat["object"] == "chat.completion" and len(chat["choices"]) == 2
    assert chat["choices"][1]["message"]["content"] == "answer"
    assert client.requests[0][1].max_tokens == 7 and client.requests[1][1].temperature == 0.5
    assert text["model"] == "other" and text["usage"]["prompt_tokens"] == 3
    assert [choice["text"] for choice in both["choices"]] == ["xanswer", "yanswer"]


def test_token_ids_are_answered():
    options = {"return_token_ids": True}
    lines = [
        _line("a", CHAT, messages=[{"role": "user", "content": "x"}], **options),
        _line("b", prompt=[1, 2, 3], **options),
    ]
    chat, text = _bodies(_results(CannedClient("yes"), lines))
    assert chat["choices"][0]["token_ids"] == text["choices"][0]["token_ids"] == [*map(ord, "yes")]
    assert chat["prompt_token_ids"] == [*map(ord, "x\nassistant: ")]
    assert text["choices"][0]["prompt_token_ids"] == [1, 2, 3]


def test_embeddings_are_answered():
    class Embedder(CannedClient):
        async def embed(self, prompts, pooling="last", *, normalize=True):
            return [np.full(2, len(prompt), np.float32) for prompt in prompts]

    (body,) = _bodies(_results(Embedder(), [_line("a", "/v1/embeddings", input=["x", "yz"])]))
    assert [item["embedding"] for item in body["data"]] == [[1.0, 1.0], [2.0, 2.0]]


def test_a_line_has_the_servers_limits():
    chat = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": -1}
    many = {"prompt": [[1] * 500] * 60, "prompt_logprobs": 20}
    lines = [_line("a", prompt="x", prompt_logprobs=-1), _line("b", CHAT, **chat)]
    results = _results(CannedClient("yes"), [*lines, _line("c", **many)])
    assert [result.response.status_code for result in results] == [400, 400, 400]
    messages = [body["error"]["message"] for body in _bodies(results)]
    assert all("max-logprobs" in message for message in messages[:2])
    assert "log-probabilities" in messages[2]


def test_errors_name_the_field_of_the_line():
    (result,) = _results(CannedClient("yes"), [_line("a", "/v1/embeddings", input=[])])
    assert json.loads(bytes(result.response.body))["error"]["param"] == "input"


@pytest.mark.parametrize(
    ("line", "custom_id", "message"),
    [
        (b"{", None, "line 2: the line must be JSON"),
        (b"\xff", None, "line 2: the line must be JSON"),
        (b"[" * 100_000, None, "line 2: "),
        (b"7", None, "line 2: "),
        (b"{}", None, "line 2: "),
        (
            _line("x", "/v1/completion"),
            "x",
            "'/v1/completion'; did you mean '/v1/completions'?",
        ),
        (_line("good"), "good", "custom_id must be unique; got 'good' again"),
        (
            b'{"custom_id": "x", "url": "/v1/completions"}',
            "x",
            "line 2: the line must be valid: object missing required field `body`",
        ),
        (
            _line("x").replace(b"POST", b"GET"),
            "x",
            "line 2: method must be 'POST'; got 'GET'",
        ),
        (_line("x").replace(b"method", b"methode"), "x", "'methode'; did you mean 'method'?"),
        (b" " * MAX_LINE + b"{}", None, f"must have at most {MAX_LINE} bytes"),
    ],
    ids=range(11),
)
def test_a_line_that_is_no_request_has_an_error(line, custom_id, message):
    results = _results(CannedClient("yes"), [_line("good"), line, b"\n", _line("last")])
    good, bad, last = results
    assert good.is_success and last.is_success and not bad.is_success
    assert bad.response is None and bad.error.code == "invalid_request"
    assert message in bad.error.message and bad.custom_id == custom_id, bad


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        (_line("x", promt="a"), 400, "'promt'; did you mean 'prompt'?"),
        (_line("x", prompt="a", stream=True), 400, "stream must be false in a batch"),
        (_line("x", prompt="a", model="gpt-9"), 404, "this run has m, other"),
        (_line("x", prompt="a", top_p=7), 400, "top_p must be"),
        (_line("x", prompt=[]), 400, "prompt must be a text"),
        (_line("x", CHAT, messages=[]), 400, "messages must not be empty"),
        (_line("x", CHAT, messages=[{"role": "u"}]), 400, "role"),
    ],
    ids=range(7),
)
def test_a_request_that_is_refused_has_the_servers_answer(line, status, message):
    good, bad = _results(CannedClient("yes"), [_line("good"), line])
    assert good.is_success and bad.error is None
    assert bad.response.status_code == status and bad.custom_id == "x"
    assert message in json.loads(bytes(bad.response.body))["error"]["message"]


def test_what_the_engine_refuses_has_the_servers_answer():
    client = CannedClient("x", raises=RequestError("prompt must have 1 to 9 tokens; got 10"))
    (result,) = _results(client, [_line("x")])
    assert result.response.status_code == 400


def test_an_engine_that_fails_ends_the_run():
    client = CannedClient("x", raises=RuntimeError("lost"))
    client.error = EngineError("the GPU is gone")
    with pytest.raises(EngineError, match="the engine has failed: the GPU is gone"):
        _results(client, [_line("a"), _line("b")])


# ---- the command


def _run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["run-batch", *map(str, arguments)])
    captured = capsys.readouterr()
    return end.value.code, captured.out + captured.err


def test_the_command_answers_as_the_library_does(capsys, tmp_path):
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    greedy = {"temperature": 0, "max_tokens": 8}
    prompts = ["The capital of France is", "One, two,"]
    lines = [_line("a", prompt=prompts[0], **greedy)]
    lines += [_line("b", prompt=prompts[1], model="second", new_field=1, **greedy)]
    lines += [b"nonsense", _line("chat", CHAT, messages=question, **greedy)]
    file.write_bytes(b"\n".join(lines))
    out.write_text("old")
    options = [
        *("--device", "cpu", "--max-model-len", "256", "--max-num-seqs", "4"),
        *("--max-num-batched-tokens", "512", "--served-model-name", "first"),
        *("--served-model-name", "second", "--tool-call-parser", "hermes"),
        *("--reasoning-parser", "qwen3", "--ignore-unknown-fields"),
    ]
    status, text = _run(capsys, file, "-o", out, *options)
    assert status == 0 and "3 of 4 requests answered" in text, text
    assert list(tmp_path.iterdir()) in ([file, out], [out, file])
    first, second, bad, chat = map(json.loads, out.read_text().splitlines())
    assert bad["error"]["message"].startswith("line 3: ")
    with LLM("smollm2", device="cpu", max_model_len=256) as llm:
        wanted = llm.generate(prompts, SamplingParams(**greedy))
        asked = llm.chat([question], SamplingParams(**greedy))
    bodies = [row["response"]["body"] for row in (first, second)]
    assert [body["model"] for body in bodies] == ["first", "second"]
    found = [body["choices"][0]["text"] for body in bodies]
    assert found == [output.outputs[0].text for output in wanted]
    message = chat["response"]["body"]["choices"][0]["message"]
    assert message["content"] == asked[0].outputs[0].text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{tmp}/none.jsonl", "-o", "{tmp}/x"], "none.jsonl: cannot be read"),
        (["/dev/zero", "-o", "{tmp}/x"], "must be a regular file"),
        (["{tmp}/empty.jsonl", "-o", "{tmp}/x"], "must have a line; it is empty"),
        (["{tmp}/one.jsonl", "-o", "{tmp}"], "--output-file must be a regular file in an existing"),
        (["{tmp}/one.jsonl", "-o", "{tmp}/no/x"], "must be a regular file in an existing folder"),
        (["{tmp}/one.jsonl", "-o", "{tmp}/fifo"], "--output-file must be a regular file"),
        (["{tmp}/one.jsonl", "-o", "{tmp}/one.jsonl"], "--output-file must be another file"),
        (["{tmp}/b.partial", "-o", "{tmp}/b"], "--output-file must be another file"),
        (["{tmp}/one.jsonl", "-o", "{tmp}/x", "--max-num-seqs", "0"], "must be from 1 to 65536"),
        (
            ["{tmp}/one.jsonl", "-o", "{tmp}/x", "--tool-call-parser", "herms"],
            "tool_call_parser must be one of",
        ),
        (
            ["{tmp}/one.jsonl", "-o", "{tmp}/x", "--reasoning-parser", "qwen"],
            "did you mean 'qwen3'",
        ),
    ],
    ids=range(11),
)
def test_a_bad_option_is_named_before_the_model_is_loaded(
    capsys, tmp_path, monkeypatch, words, message
):
    monkeypatch.setattr(run_batch.AsyncEngine, "from_name", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "empty.jsonl").write_text("\n \n")
    os.mkfifo(tmp_path / "fifo")
    for name in ("one.jsonl", "b.partial"):
        (tmp_path / name).write_bytes(_line("a"))
    status, text = _run(capsys, *(word.format(tmp=tmp_path) for word in words))
    assert status == 2 and message in text, text
    assert not (tmp_path / "x").exists() and (tmp_path / "b.partial").read_bytes() == _line("a")


def test_after_a_failure_the_old_output_is_there_and_what_was_done(capsys, tmp_path, monkeypatch):
    class Failing(CannedClient):
        async def generate(self, prompt, params=None, **options):
            if prompt == "b":
                self.error = EngineError("the GPU is gone")
                raise self.error
            async for output in super().generate(prompt, params, **options):
                yield output

    monkeypatch.setattr(
        run_batch.AsyncEngine, "from_name", lambda *_, **__: Failing("yes", delay=0.01)
    )
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(_line("custom-a") + b"\n" + _line("b", prompt="b"))
    out.write_text("old")
    status, text = _run(capsys, file, "-o", out)
    assert status == 2 and "the GPU is gone" in text
    assert out.read_text() == "old"
    partial = (tmp_path / "out.jsonl.partial").read_text()
    assert [json.loads(line)["custom_id"] for line in partial.splitlines()] == ["custom-a"]


def test_a_model_that_cannot_be_loaded_leaves_the_lines_of_an_earlier_run(capsys, tmp_path):
    file, partial = tmp_path / "in.jsonl", tmp_path / "out.jsonl.partial"
    file.write_bytes(_line("a"))
    partial.write_text("of an earlier run")
    status, _ = _run(capsys, file, "-o", tmp_path / "out.jsonl", "--model", tmp_path / "none")
    assert status == 2 and partial.read_text() == "of an earlier run"


def test_the_output_may_be_a_link(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(run_batch.AsyncEngine, "from_name", lambda *_, **__: CannedClient("yes"))
    file, link, target = tmp_path / "in.jsonl", tmp_path / "link", tmp_path / "folder" / "out"
    file.write_bytes(_line("a"))
    target.parent.mkdir()
    target.with_name("out.partial").write_text("of an earlier run")
    link.symlink_to(target)
    status, text = _run(capsys, file, "-o", link)
    assert status == 0, text
    assert link.is_symlink() and json.loads(target.read_text())["custom_id"] == "a"
    assert not target.with_name("out.partial").exists()


def test_a_long_line_is_skipped_whole(tmp_path):
    file = tmp_path / "x"
    with file.open("wb") as target:
        target.write(b"a\n" + b"x" * (2 * MAX_LINE + 5) + b"\nb")
    with io.FileIO(file) as opened:
        sizes = [len(line) for line in run_batch._lines(opened)]
    assert sizes == [2, MAX_LINE + 1, 1]


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "x"
    file.write_text('{"a": 1}\n{}\n', "utf-8-sig")
    with io.FileIO(file) as opened:
        assert list(run_batch._lines(opened)) == [b'{"a": 1}\n', b"{}\n"]


def test_the_rest_of_a_closed_file_is_given_up_quietly(tmp_path):
    """After Ctrl-C the file is closed before its lines are."""
    file = tmp_path / "x"
    file.write_bytes(b"a\nb\n")
    with io.FileIO(file) as opened:
        lines = run_batch._lines(opened)
        assert next(lines) == b"a\n"
    lines.close()
