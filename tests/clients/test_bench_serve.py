"""`engine bench serve` against a scripted server: known delays, failures, and no end."""

from __future__ import annotations

import asyncio
import json
import math
import re
import statistics
import time
from array import array
from itertools import pairwise
from types import SimpleNamespace

import pytest

from engine import cli
from engine.commands import _record
from engine.commands.bench_serve import driver, plot, worker
from engine.commands.bench_serve.connection import Answer
from engine.commands.bench_serve.driver import Target, run_load
from engine.commands.bench_serve.figures import parse_goodput, summarize
from engine.commands.bench_serve.workload import (
    CHAT,
    COMPLETIONS,
    Job,
    Lengths,
    arrivals,
    file_jobs,
    random_jobs,
)
from engine.device import CPU
from engine.errors import ConfigError, EngineError, RequestError
from tests.clients.scripted_server import ScriptedServer


async def _stream(exchange):
    await exchange.stream()


def _target(server, endpoint=COMPLETIONS, **options):
    options = {"model": "m", "api_key": None, "body": {}, "timeout": 5.0} | options
    place = {"host": "127.0.0.1", "port": server.port, "tls": False}
    return Target(**place, path=endpoint, endpoint=endpoint, **options)


def _load(script, count=4, num_tokens=3, **options):
    """Send `count` requests at once to a server with this script; return the row and the server."""
    jobs = [Job({"prompt": [index, 2]}, num_tokens, 2) for index in range(count)]
    limits = {name: options.pop(name) for name in ("max_concurrency", "workers") if name in options}
    with ScriptedServer(script) as server:
        answers = run_load(_target(server, **options), jobs, [0.0] * count, **limits)
    return summarize(jobs, answers, {}), answers, server


def _run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "serve", *arguments])
    captured = capsys.readouterr()
    return end.value.code, captured.out + captured.err


# ---- times


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_known_delays_are_measured(endpoint):
    async def script(exchange):
        await exchange.stream(gap=0.03, first=0.15)

    row, answers, _ = _load(script, 2, 5, endpoint=endpoint)
    assert (row["completed"], row["failed"], row["total_output_tokens"]) == (2, 0, 10)
    assert row["total_input_tokens"] == 14  # the server's usage, not what was asked for
    for name in ("tpot", "itl"):
        assert 25 < row[f"p50_{name}_ms"] < 60, row
    assert 140 < row["p50_ttft_ms"] < 400
    assert 255 < row["p50_e2el_ms"] < 700
    assert all(len(answer.times) == 5 for answer in answers)


def test_a_role_and_a_reason_alone_are_no_tokens():
    async def script(exchange):
        await exchange.head()
        await exchange.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for delta in ({"reasoning_content": "x"}, {"content": ""}, {"content": "y"}):
            await exchange.event({"choices": [{"delta": delta, "finish_reason": None}]})
        await exchange.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        await exchange.event("[DONE]")
        await exchange.chunk(b"")

    row, answers, _ = _load(script, 1, endpoint=CHAT)
    assert len(answers[0].times) == 3 and answers[0].finish_reason == "stop"
    assert row["without_usage"] == 1 and row["total_output_tokens"] == 3


def test_figures_of_known_answers():
    first = Answer(1.0, 2.0, array("d", [1.1, 1.2, 1.4]), 4, 3)
    second = Answer(1.5, 3.0, array("d", [2.5]), 4, 1)
    failed = Answer(1.0, 9.0, failure="timeout")
    jobs = [Job({}, 3), Job({}, 5), Job({}, 3)]
    row = summarize(jobs, [first, second, failed], {"ttft": 200.0, "tpot": 160.0})
    assert row["duration"] == 8.0 and row["failures"] == {"timeout": 1}
    assert (row["completed"], row["short_outputs"]) == (2, 1)
    assert row["request_goodput"] == pytest.approx(1 / 8)
    assert row["output_throughput"] == pytest.approx(4 / 8)
    assert row["total_token_throughput"] == pytest.approx(12 / 8)
    assert row["mean_tpot_ms"] == pytest.approx(150)  # the answer of one token has none
    assert row["mean_ttft_ms"] == pytest.approx(550)
    assert row["mean_itl_ms"] == pytest.approx(150)
    assert row["p50_e2el_ms"] == pytest.approx(1250)


# ---- failures


async def _refuse(exchange):
    await exchange.json(429, {"error": {"message": "queue is full"}})


async def _cut_the_chunk(exchange):
    await exchange.head()
    await exchange.send(b"ff\r\ndata: {")
    exchange.writer.close()


async def _drop(exchange):
    await exchange.head()
    await exchange.token("a")
    exchange.drop()


async def _end_too_early(exchange):
    await exchange.head()
    await exchange.token("a")
    await exchange.chunk(b"")


async def _error_in_the_stream(exchange):
    await exchange.head()
    await exchange.token("a")
    await exchange.event({"error": {"message": "the engine died"}})
    await asyncio.sleep(30)


async def _no_json(exchange):
    await exchange.head()
    await exchange.event("{")


async def _wrong_types(exchange):
    await exchange.head()
    await exchange.event({"choices": 7})


async def _endless_usage(exchange):
    await exchange.head()
    await exchange.event({"usage": {"prompt_tokens": math.inf}})


async def _huge_usage(exchange):
    await exchange.head()
    await exchange.token("a")
    await exchange.end(1, 10**400)


async def _no_tokens(exchange):
    await exchange.head()
    await exchange.end(1, 0)


async def _no_stream(exchange):
    await exchange.json(200, {"choices": [{"text": "a"}]})


async def _silence(exchange):
    await exchange.head()
    await exchange.token("a")
    await asyncio.sleep(30)


async def _for_ever(exchange):
    await exchange.head()
    while True:
        await exchange.chunk(b": " + b"x" * 60_000 + b"\n")


async def _slowly_for_ever(exchange):
    await exchange.head()
    while True:
        await exchange.token("a")
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "reason", "detail"),
    [
        (_refuse, "http 429", "queue is full"),
        (_cut_the_chunk, "disconnected", "closed the connection in the answer"),
        (_drop, "disconnected", ""),
        (_end_too_early, "truncated stream", "without \\[DONE\\]"),
        (_error_in_the_stream, "error in the stream", "the engine died"),
        (_no_json, "malformed response", ""),
        (_wrong_types, "malformed response", "choices"),
        (_endless_usage, "malformed response", "infinity"),
        (_huge_usage, "malformed response", "from 0 to"),
        (_no_tokens, "no tokens", ""),
        (_no_stream, "malformed response", "no text/event-stream, but 'application/json"),
        (_silence, "timeout", "after 1 s"),
        (_slowly_for_ever, "timeout", "after 1 s"),
        (_for_ever, "response too long", "more than 1245184 bytes"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_failure_has_a_reason_and_does_not_disturb_the_others(script, reason, detail):
    async def every_other(exchange):
        is_odd = exchange.body["prompt"][0] % 2
        await (script if is_odd else _stream)(exchange)

    row, answers, server = _load(every_other, 6, timeout=1.0, max_concurrency=1)
    assert (row["completed"], row["failed"]) == (3, 3), [a.detail for a in answers]
    assert row["failures"] == {reason: 3}
    assert [answer.failure for answer in answers] == ["", reason] * 3
    assert re.search(detail, answers[1].detail), answers[1].detail
    assert server.in_flight == 0


def test_a_server_that_is_not_there(capsys):
    with ScriptedServer(_stream) as server:
        pass
    status, text = _run(capsys, "--base-url", server.url, "--model", "m")
    assert status == 2 and "a request before the measurement failed" in text
    status, text = _run(capsys, "--base-url", server.url)
    assert status == 2 and f"the connection to {server.url} failed" in text
    status, text = _run(
        capsys, "--base-url", server.url, "--model", "m", "--num-warmups", "0", "--num-prompts", "2"
    )
    assert status == 1 and "2 x no connection" in text


# ---- connections and load


def test_connections_are_kept_and_replaced():
    row, _, server = _load(_stream, 6, max_concurrency=2)
    assert row["completed"] == 6 and server.num_connections == 2

    async def close_after(exchange):
        await exchange.stream()
        exchange.writer.close()

    row, _, server = _load(close_after, 4, max_concurrency=1)
    assert row["completed"] == 4 and server.num_connections == 4


def test_concurrency_is_bounded_over_all_workers():
    async def script(exchange):
        await exchange.stream(gap=0.01)

    row, _, server = _load(script, 20, max_concurrency=5, workers=2)
    assert row["completed"] == 20
    assert server.most_in_flight <= 5 and server.num_connections <= 5
    _, _, server = _load(script, 20, workers=3)
    assert server.most_in_flight > 10


def test_answers_are_in_the_order_of_the_jobs():
    jobs = [Job({"prompt": "x"}, 1 + index) for index in range(7)]
    with ScriptedServer(_stream) as server:
        answers = run_load(_target(server), jobs, [0.0] * 7, workers=3)
    assert [answer.num_output_tokens for answer in answers] == list(range(1, 8))


def test_requests_of_one_moment_keep_their_order(monkeypatch):
    """Also where the moment passes while they are prepared."""
    sent, monotonic = [], time.monotonic

    class Pool:
        async def send(self, data, answer, **options):
            sent.append(json.loads(data.split(b"\r\n\r\n")[1]))

        def close(self):
            pass

    def late():
        time.sleep(0.02)
        return monotonic()

    monkeypatch.setattr(worker, "ConnectionPool", lambda *place, **options: Pool())
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=late))
    plan = {"host": "h", "port": 1, "tls": False, "path": "/", "headers": {}, "timeout": 1}
    plan |= {"jobs": [(0.0, index, 1) for index in range(6)], "max_concurrency": 1}
    asyncio.run(worker.run_jobs(plan, monotonic() + 0.05, lambda: None))
    assert sent == list(range(6))


def test_requests_are_sent_at_their_moments():
    moments = [0.0, 0.1, 0.4]
    jobs = [Job({"prompt": "x"}, 1)] * 3
    with ScriptedServer(_stream) as server:
        for _ in range(5):  # a busy machine may delay some of them
            answers = run_load(_target(server), jobs, moments)
            starts = [answer.start - answers[0].start for answer in answers]
            late = [start - moment for start, moment in zip(starts, moments, strict=True)]
            if min(late) > -0.02 and max(late) < 0.08:
                return
    pytest.fail(f"late by {late} s")


def test_a_worker_that_dies_ends_the_load(monkeypatch):
    monkeypatch.setattr(driver.sys, "executable", "/bin/false")
    with ScriptedServer(_stream) as server, pytest.raises(EngineError, match="ended too early"):
        run_load(_target(server), [Job({"prompt": "x"}, 1)], [0.0])


def test_a_worker_imports_nothing_from_the_current_folder(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    with ScriptedServer(_stream) as server:
        [answer] = run_load(_target(server), [Job({"prompt": "x"}, 1)], [0.0])
    assert not answer.failure


# ---- workloads


def test_random_requests_follow_the_seed():
    lengths = Lengths(562, 562, 0.822, prefix_len=16)
    jobs = random_jobs(200, lengths, COMPLETIONS, 3, 1000)
    assert jobs == random_jobs(200, lengths, COMPLETIONS, 3, 1000)
    assert jobs[:9] == random_jobs(9, lengths, COMPLETIONS, 3, 1000)
    assert jobs != random_jobs(200, lengths, COMPLETIONS, 4, 1000)
    prompts = [job.prompt["prompt"] for job in jobs]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    sizes = [len(prompt) - 16 for prompt in prompts]
    assert 100 <= min(sizes) < 150 and 970 < max(sizes) <= 1024
    assert all(job.num_prompt_tokens == len(job.prompt["prompt"]) for job in jobs)
    assert {100 <= job.num_output_tokens <= 1024 for job in jobs} == {True}
    assert max(map(max, prompts)) < 1000
    words = random_jobs(2, Lengths(5, 5), CHAT, 0, 10)[0].prompt["messages"][0]["content"]
    assert len(words.split()) == 5


def test_arrivals():
    assert arrivals(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]
    poisson = arrivals(4000, 10.0, 1.0, 0)
    gaps = [after - before for before, after in pairwise(poisson)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.08)
    even = arrivals(4000, 10.0, 100.0, 0)
    gaps = [after - before for before, after in pairwise(even)]
    assert statistics.stdev(gaps) == pytest.approx(0.01, rel=0.08)


def test_a_file_gives_requests_in_its_order(tmp_path):
    file = tmp_path / "x.jsonl"
    rows = [{"prompt": "one", "output_tokens": 4}, {"prompt": [1, 2], "id": 7}]
    file.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    jobs = file_jobs(file, 3, COMPLETIONS, 9)
    assert jobs == [Job({"prompt": "one"}, 4), Job({"prompt": [1, 2]}, 9), jobs[0]]
    messages = [{"role": "user", "content": "x"}]
    file.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "y"}))
    jobs = file_jobs(file, 2, CHAT, 9)
    assert jobs[0].prompt == {"messages": messages}
    assert jobs[1].prompt == {"messages": [{"role": "user", "content": "y"}]}


@pytest.mark.parametrize(
    ("line", "endpoint", "message"),
    [
        ("", COMPLETIONS, "must have a line"),
        ("{", COMPLETIONS, "line 1: must be JSON"),
        ("[" * 100_000, COMPLETIONS, "line 1: must be JSON"),
        ("7", COMPLETIONS, "line 1: must be an object"),
        ('{"prompt": 7}', COMPLETIONS, "a completion needs a prompt"),
        ('{"prompt": [1.5]}', COMPLETIONS, "a completion needs a prompt"),
        ('{"messages": [1]}', COMPLETIONS, "a completion needs a prompt"),
        ('{"prompt": [1]}', CHAT, "a chat needs messages"),
        ('{"prompt": "x", "output_tokens": 0}', COMPLETIONS, "from 1 to 16777216; got 0"),
        ('{"prompt": "x", "output_tokens": true}', COMPLETIONS, "from 1 to 16777216; got True"),
        ('{"prompt": "x", "output_tokens": 16777217}', COMPLETIONS, "; got 16777217"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, endpoint, message):
    file = tmp_path / "x.jsonl"
    file.write_text(line)
    with pytest.raises(RequestError, match=message):
        file_jobs(file, 1, endpoint, 9)


# ---- the command


def test_the_command_sweeps_and_keeps_its_results(capsys, tmp_path, monkeypatch):
    async def script(exchange):
        if exchange.method == "GET":
            await exchange.json(200, {"data": [{"id": "a-model"}]})
        else:
            await exchange.stream(gap=0.002)

    result, picture = tmp_path / "x.json", tmp_path / "x.png"
    with ScriptedServer(script) as server:
        words = [
            *("--base-url", f"{server.url}/base/v1", "--num-prompts", "6", "--seed", "5"),
            *("--random-input-len", "8", "--random-output-len", "4", "--ignore-eos"),
            *("--max-concurrency", "1", "3", "--goodput", "ttft:2000", "tpot:500"),
            *("--extra-body", '{"top_k": 5}', "--api-key", "secret-1"),
            *("--json", str(result), "--save-detailed", "--metadata", "card=H200"),
            *("--plot", str(picture)),
        ]
        monkeypatch.setattr("sys.argv", ["engine", "bench", "serve", *words])
        status, text = _run(capsys, *words)
    assert status == 0, text
    assert "6 requests, inf requests/s, at most 3 in flight" in text
    assert "6 completed, 0 failed" in text and "goodput" in text and "secret" not in text
    record = json.loads(result.read_text())
    assert record["card"] == "H200" and "secret" not in result.read_text()
    assert [row["max_concurrency"] for row in record["rows"]] == [1, 3]
    for row in record["rows"]:
        assert (
            row["model"] == "a-model" and row["completed"] == 6 and row["total_output_tokens"] == 24
        )
        assert row["request_goodput"] > 0 and len(row["requests"]["itls"][0]) == 3
        assert row["request_rate"] == "inf" and row["event_loop"] in ("uvloop", "asyncio")
    assert picture.read_bytes().startswith(b"\x89PNG")
    models, warm_up, *rest = server.requests
    assert models.path == "/base/v1/models" and len(rest) == 12
    assert warm_up.path == "/base/v1/completions"
    for exchange in (models, warm_up, *rest):
        assert exchange.headers["authorization"] == "Bearer secret-1"
    body = rest[0].body
    assert body["ignore_eos"] is True and body["top_k"] == 5 and body["temperature"] == 0
    assert len(body["prompt"]) == 8 and body["stream_options"] == {"include_usage": True}
    assert [e.body["prompt"] for e in rest[:6]] == [
        job.prompt["prompt"] for job in random_jobs(6, Lengths(8, 4), COMPLETIONS, 5, 10_000)
    ]


def test_one_run_is_drawn_as_its_distributions(capsys, tmp_path):
    picture = tmp_path / "x.svg"
    with ScriptedServer(_stream) as server:
        status, text = _run(
            capsys,
            *("--base-url", server.url, "--model", "m", "--num-prompts", "3"),
            *("--random-output-len", "2", "--plot", str(picture), "--endpoint", CHAT),
        )
    assert status == 0, text
    assert "<svg" in picture.read_text()


def test_a_drawing_that_fails_leaves_the_record(monkeypatch, capsys, tmp_path):
    def fail(*_):
        raise OSError("no font")

    monkeypatch.setattr(plot, "draw", fail)
    result = tmp_path / "x.json"
    with ScriptedServer(_stream) as server:
        words = ("--base-url", server.url, "--model", "m", "--num-prompts", "2")
        _run(capsys, *words, "--plot", str(tmp_path / "x.svg"), "--json", str(result))
    assert json.loads(result.read_text())["rows"][0]["completed"] == 2


def test_failures_are_counted_in_the_output(capsys):
    async def script(exchange):
        await (_refuse if exchange.number % 2 else _stream)(exchange)

    with ScriptedServer(script) as server:
        status, text = _run(capsys, *("--base-url", server.url, "--model", "m"),
                            *("--num-prompts", "4", "--max-concurrency", "1"))  # fmt: skip
    assert status == 0
    assert "2 completed, 2 failed" in text
    assert "2 x http 429; the first: http 429: queue is full" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-prompts 0", "--num-prompts must be from 1 to"),
        ("--max-concurrency 4 0", "--max-concurrency must be from 1 to 65536; got 0"),
        ("--request-rate 0", "--request-rate must be above 0"),
        ("--request-rate nan", "--request-rate must be above 0"),
        ("--burstiness -1", "--burstiness must be above 0"),
        ("--timeout inf", "--timeout must be above 0"),
        ("--random-range-ratio 1", "--random-range-ratio must be in [0, 1)"),
        ("--temperature -1", "--temperature must be at least 0"),
        ("--base-url ftp://x", "--base-url must be a URL like"),
        ("--base-url http://x:y", "--base-url must be a URL like"),
        ("--goodput tftt:3", "--goodput got an unknown name 'tftt'; did you mean 'ttft'?"),
        ("--goodput ttft:x", "--goodput ttft must have positive milliseconds"),
        ("--extra-body [1]", "--extra-body must be a JSON object"),
        ("--dataset-name custom", "--dataset-name custom needs --dataset-path"),
        ("--dataset-name random --dataset-path x", "takes no --dataset-path"),
        ("--dataset-path /no/such/file", "/no/such/file"),
        ("--json /no/such/folder/x.json", "--json must name a file in an existing folder"),
        ("--save-detailed", "need --json"),
        ("--json /tmp/x.json --metadata x", "--metadata must be NAME=VALUE"),
        ("--plot x.gif", "--plot must name a .png or .svg file"),
        ("--api-key é", "--api-key must be printable ASCII"),
        ("--nothing", "unrecognized arguments: --nothing"),
    ],
)
def test_a_bad_option_is_named_before_anything_is_sent(capsys, words, message):
    status, text = _run(capsys, *words.split())
    assert status == 2 and message in text, text


def test_goals():
    assert parse_goodput(["ttft:200", "e2el:1.5"]) == {"ttft": 200.0, "e2el": 1.5}
    with pytest.raises(ConfigError, match="known: ttft, tpot, e2el"):
        parse_goodput(["x"])


def test_rate_data_and_sampling_options_reach_the_server(capsys, tmp_path):
    words = [
        *("--request-rate", "50", "--burstiness", "inf", "--timeout", "5", "--workers", "2"),
        *("--temperature", "0.5", "--num-warmups", "0", "--num-prompts", "8", "--model", "m"),
    ]
    random = [
        *("--dataset-name", "random", "--random-input-len", "10", "--random-prefix-len", "3"),
        *("--random-range-ratio", "0.5", "--random-output-len", "4", "--random-vocab-size", "50"),
    ]
    with ScriptedServer(_stream) as server:
        status, text = _run(capsys, "--base-url", server.url, *words, *random)
        assert status == 0, text
        bodies = [exchange.body for exchange in server.requests]
    assert "8 requests, 50.0 requests/s, no limit" in text
    seconds = float(re.search(r"in (\d+\.\d+) s", text)[1])
    assert seconds > 4 / 50
    assert {body["temperature"] for body in bodies} == {0.5}
    assert len({tuple(body["prompt"][:3]) for body in bodies}) == 1
    assert {5 + 3 <= len(body["prompt"]) <= 15 + 3 for body in bodies} == {True}
    assert {2 <= body["max_tokens"] <= 6 for body in bodies} == {True}
    assert max(max(body["prompt"]) for body in bodies) < 50
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "a", "output_tokens": 2}\n{"prompt": "b"}\n')
    data = ["--dataset-name", "custom", "--dataset-path", str(file), "--custom-output-len", "3"]
    with ScriptedServer(_stream) as server:
        status, text = _run(capsys, "--base-url", server.url, *words, *data)
        assert status == 0, text
        asked = sorted((e.body["prompt"], e.body["max_tokens"]) for e in server.requests)
    assert asked == [("a", 2)] * 4 + [("b", 3)] * 4


def test_the_help_of_bench_names_serve(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    assert "engine bench serve --help" in capsys.readouterr().out
    status, text = _run(capsys, "--help")
    assert status == 0 and "engine bench serve" in text and "--goodput" in text


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--api-key", "s3cret", "-x"], ["--api-key", "...", "-x"]),
        (["--api-key=s3cret"], ["--api-key=..."]),
        (["--api", "s3cret"], ["--api", "..."]),
        (["--api-key"], ["--api-key"]),
        (["--json", "x", "--", "y"], ["--json", "x", "--", "y"]),
    ],
)
def test_a_kept_command_has_no_key(words, shown):
    assert _record._without_keys(words) == shown


def test_a_record_is_written_without_git(monkeypatch, tmp_path):
    monkeypatch.delenv("ENGINE_COMMIT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "x.json"
    _record.write_record(file, CPU, {"rows": [1]})
    record = json.loads(file.read_text())
    assert record["rows"] == [1] and record["commit"] == "unknown"


def test_runs_in_which_all_failed_are_drawn_empty(tmp_path):
    row = {"model": "m", "endpoint": COMPLETIONS, "num_prompts": 1, "request_rate": "inf"}
    failed = row | {"max_concurrency": 3, "output_throughput": 0.0}
    good = failed | {"max_concurrency": 1, "output_throughput": 9.0}
    good |= {f"p{p}_{name}_ms": 2.0 for p in (50, 99) for name in ("ttft", "tpot")}
    nothing = {"itls": [None], "ttfts": [None], "e2els": [None]}
    for rows in ([failed], [failed, failed], [good, failed]):
        file = tmp_path / "x.png"
        plot.draw(file, rows, [nothing] * len(rows))
        assert file.read_bytes().startswith(b"\x89PNG")
        file.unlink()
