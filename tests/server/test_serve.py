"""`engine serve` as processes: start, drain, signals, deaths of each process, options, TLS."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.commands import serve
from engine.engine_config import EngineConfig
from engine.errors import ConfigError, DownloadError, UnknownOptionError
from engine.model import LOAD_OPTIONS
from engine.server.running import PREFIX, running_servers, tree_memory
from engine.server.server_config import ServerConfig, key_hash
from engine.server.supervisor import Supervisor
from engine.text.token_bytes import byte_alphabet
from tests.server.test_listeners import V4, V6, needs_ipv6

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 3,
    "bos_token_id": 1,
}
SMALL = ("--device", "cpu", "--load-format", "dummy", "--num-blocks", "4096", "--port", "0")

# As an installed command, which does not import from the current folder.
_CODE = f"import sys; sys.path[0] = {str(ROOT)!r}\nfrom engine.cli import main; main()"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    return str(folder)


def _tokenizer():
    """Return a tokenizer with a token for each ASCII character."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = True
    letters = {letter: byte for letter, byte in byte_alphabet().items() if byte < 128}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }


@contextlib.contextmanager
def serving(*options, wait=True, folder=ROOT, prelude=""):
    """Run `engine serve`; yield its process with `port`, `lines` (stderr so far) and helpers.

    `prelude` is code that its first process runs before.
    """
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", prelude + _CODE, "serve", *options],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    server = SimpleNamespace(process=process, lines=[], port=None, responses=[])
    try:
        while wait and server.port is None:
            line = process.stderr.readline()
            assert line, server.lines
            server.lines.append(line)
            if found := re.search(r"ready at https?://.*:(\d+)", line):
                server.port = int(found[1])
        yield server
    finally:
        for response in server.responses:
            response.close()
        children = _children(process.pid)
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()
        for pid in children:
            _wait_until(lambda pid=pid: not _is_alive(pid))


def _end(server, seconds=60.0):
    """Wait for the end; return exit status and standard error."""
    rest = server.process.communicate(timeout=seconds)[1]
    return server.process.returncode, "".join(server.lines) + rest


def _is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _children(pid, module=""):
    """Return the ids of the child processes that run this module."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes().decode()
            if parent == pid and module in command:
                found.append(int(stat.parent.name))
    return found


def _wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def _post(server, body, *, key=None, path="/v1/completions", connection=None):
    connection = connection or http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    server.responses.append(response)
    return response


def _body(max_tokens, **more):
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": max_tokens, "temperature": 0}
    return {**body, "ignore_eos": True, **more}


def _stream(server, max_tokens):
    """Start a stream and read its first event."""
    response = _post(server, _body(max_tokens, stream=True))
    assert response.status == 200
    assert response.readline().startswith(b"data: {")
    return response


def _rest(response):
    """Return what still comes, be it whole or not."""
    try:
        return response.read()
    except http.client.IncompleteRead as error:
        return error.partial
    except OSError:
        return b""


@pytest.fixture
def small(model):
    return (model, *SMALL, "--served-model-name", "tiny")


@pytest.mark.kills
@pytest.mark.kills
def test_a_running_server_is_recorded_until_it_ends(model):
    def record():
        return next((r for r in running_servers() if r.pid == server.process.pid), None)

    with serving(model, *SMALL, "--served-model-name", "tiny") as server:
        found = record()
        assert (found.model, found.is_ready) == ("tiny", True)
        assert found.url == f"http://127.0.0.1:{server.port}"
        [engine] = _children(server.process.pid, "engine_process")
        assert tree_memory(server.process.pid) > tree_memory(engine) > 20e6
        server.process.terminate()
        assert _end(server)[0] == 0 and record() is None
    with serving(model, *SMALL) as server:
        folder = _temporary_folder(server.process.pid)
        server.process.kill()  # leaves its folder, which the next look removes
        server.process.wait()
        assert record() is None and not folder.exists()


def _temporary_folder(pid):
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/server.json"):
        with contextlib.suppress(OSError):  # its server has just ended
            if f'"pid": {pid},' in file.read_text():
                return file.parent
    raise AssertionError(f"process {pid} has no record")


def test_sigterm_drains(small):
    """The running stream ends whole, new requests get 503, the exit status is 0.

    The log tells of the load, and at the end of everything that was served.
    """
    options = ("--shutdown-timeout", "20", "--log-stats-interval", "0.1")
    with serving(*small, *options) as server:
        response = _stream(server, 1500)
        server.process.send_signal(signal.SIGTERM)
        refused = None
        while refused is None or refused.status == 200:
            refused = _post(server, _body(1))
        assert refused.status == 503 and refused.headers["Retry-After"]
        assert response.read().rstrip().endswith(b"data: [DONE]")
        status, errors = _end(server)
        assert status == 0
        load = re.findall(r"engine\.server\.load: prompt .* running (\d), waiting 0, .*", errors)
        assert load and set(load) <= {"0", "1"}
        last = errors.splitlines()[-1]
        assert last.startswith("engine: ended by SIGTERM; served ") and last.endswith(" s")
        answered = re.findall(r"status=200 .* prompt_tokens=3 output_tokens=(\d+) ttft_ms=", errors)
        assert f"served {len(answered)} requests, {3 * len(answered)} prompt tokens" in last
        assert f" {sum(map(int, answered))} output tokens in " in last


@pytest.mark.kills
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_not_done_in_time_ends_with_an_error(small, tmp_path, count):
    """As an event of the request's protocol, or as the answer; also with several replicas."""
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    options = ["--shutdown-timeout", "0.5", "--chat-template", str(tmp_path / "template")]
    message = {"messages": [{"role": "user", "content": "Hi"}]}
    bodies = {
        "/v1/completions": {"prompt": [5, 6, 7]},
        "/v1/chat/completions": message,
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": message,
    }
    with serving(*small, *options, "--data-parallel-size", str(count)) as server:
        streams = {}
        for path, body in bodies.items():
            name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            body = body | {"model": "tiny", name: 16000, "temperature": 0, "stream": True}
            if path.endswith("completions"):
                body["ignore_eos"] = True
            streams[path] = _post(server, body, path=path)
            assert streams[path].status == 200, streams[path].read()
            streams[path].readline()
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(lambda: _post(server, _body(16000)))
            time.sleep(0.2)
            start = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            response = whole.result(20)
        reason = "the server ends, and the request did not within 0.5 s"
        assert response.status == 503 and reason in response.read().decode()
        found = {path: stream.read().decode() for path, stream in streams.items()}
        for path in ("/v1/completions", "/v1/chat/completions"):
            error, done = found[path].strip().split("\n\n")[-2:]
            assert done == "data: [DONE]" and error.startswith('data: {"error":{"message":"')
            assert reason in error and '"code":"service_unavailable"' in error
        assert "event: response.failed" in found["/v1/responses"]
        error = found["/v1/messages"].strip().split("\n\n")[-1]
        assert error.startswith('event: error\ndata: {"type":"error","error":{"type":"overloaded')
        assert reason in found["/v1/responses"] and reason in error
        status, _ = _end(server)
        assert status == 0 and time.monotonic() - start < 8


@pytest.mark.kills
def test_a_log_that_nobody_reads_stops_nothing(small):
    """Standard error is a pipe of one page, full after 40 requests; SIGTERM still works."""
    with serving(*small, "--shutdown-timeout", "5") as server:
        fcntl.fcntl(server.process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        for _ in range(150):
            connection.request("GET", "/v1/models")
            response = connection.getresponse()
            assert response.status == 200 and response.read()
        connection.close()
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0 and time.monotonic() - start < 10
        lines = server.process.stderr.read().splitlines()
        assert 20 < sum("path=/v1/models status=200" in line for line in lines) < 150


@pytest.mark.kills
def test_a_second_signal_ends_it_at_once(small):
    with serving(*small) as server:
        _stream(server, 16000)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None
        start = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert _end(server)[0] == 1 and time.monotonic() - start < 3


@pytest.mark.kills
def test_a_dead_engine_ends_the_server_with_its_reason(small):
    with serving(*small) as server:
        response = _stream(server, 16000)
        [engine] = _children(server.process.pid, "engine_process")
        start = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        rest = _rest(response)
        assert b"the engine's process has ended" in rest
        status, errors = _end(server)
        assert status == 1
        assert "engine: the engine's process ended: killed by SIGKILL; served 0 requests" in errors
        assert time.monotonic() - start < 10


@pytest.mark.kills
def test_an_engine_that_dies_in_a_drain_is_a_failure(small):
    with serving(*small, "--shutdown-timeout", "60") as server:
        response = _stream(server, 16000)
        [engine] = _children(server.process.pid, "engine_process")
        server.process.send_signal(signal.SIGTERM)
        _wait_until(lambda: _post(server, _body(1)).status == 503)  # it drains
        os.kill(engine, signal.SIGKILL)
        assert b"the engine's process has ended" in _rest(response)
        status, errors = _end(server)
        assert status == 1 and "the engine's process ended: killed by SIGKILL" in errors


@pytest.mark.kills
def test_an_engine_that_does_not_end_is_a_failure(small):
    with serving(*small) as server:
        [engine] = _children(server.process.pid, "engine_process")
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        status, errors = _end(server)
        assert status == 1 and "the engine's process did not end within 6 s" in errors


def _health(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        response = connection.getresponse()
        return response.status, response.read()


@pytest.mark.kills
def test_health_tells_of_a_hung_engine(small):
    with serving(*small, "--step-timeout", "0.5") as server:
        [engine] = _children(server.process.pid, "engine_process")
        assert _health(server) == (200, b"")
        os.kill(engine, signal.SIGSTOP)
        _wait_until(lambda: _health(server)[0] == 503)
        assert b"longer than step_timeout" in _health(server)[1]
        os.kill(engine, signal.SIGCONT)
        _wait_until(lambda: _health(server)[0] == 200)


@pytest.mark.kills
@pytest.mark.parametrize("is_draining", [False, True])
def test_a_hung_engine_ends_the_server_with_its_reason(small, is_draining):
    with serving(*small, "--hang-timeout", "1") as server:
        time.sleep(2.5)  # idle is not hung
        response = _stream(server, 16000)
        [engine] = _children(server.process.pid, "engine_process")
        if is_draining:
            server.process.send_signal(signal.SIGTERM)
            _wait_until(lambda: _post(server, _body(1)).status == 503)
        os.kill(engine, signal.SIGSTOP)
        start = time.monotonic()
        assert b"the engine's process has ended" in _rest(response)
        status, errors = _end(server)
        assert status == 1 and "ended: a step has taken longer than hang_timeout=1 s" in errors
        assert 1 < time.monotonic() - start < 10


@pytest.mark.kills
def test_sigquit_prints_the_stacks_of_a_process(small):
    with serving(*small) as server:
        [engine] = _children(server.process.pid, "engine_process")
        os.kill(engine, signal.SIGQUIT)
        assert _post(server, _body(1)).status == 200
        server.process.send_signal(signal.SIGTERM)
        status, errors = _end(server)
        assert status == 0 and re.search(r"engine_loop.py\", line \d+ in run\b", errors), errors


@pytest.mark.kills
def test_a_dead_api_process_is_replaced_and_the_others_go_on(small):
    with serving(*small, "--api-server-count", "2") as server:
        processes = _children(server.process.pid, "api_process")
        streams = [_stream(server, 2000) for _ in range(12)]
        os.kill(processes[0], signal.SIGKILL)
        num_whole = 0
        for response in streams:
            num_whole += b"[DONE]" in _rest(response)
        # Twelve connections hardly all go to one of two processes.
        assert 0 < num_whole < 12

        def is_replaced():
            now = _children(server.process.pid, "api_process")
            return len(now) == 2 and processes[0] not in now

        _wait_until(is_replaced)
        for _ in range(8):
            assert _post(server, _body(2)).status == 200
        server.process.send_signal(signal.SIGTERM)
        status, errors = _end(server)
        assert status == 0 and "is started again" in errors


@pytest.mark.kills
def test_a_dead_supervisor_leaves_nothing_behind(small):
    with serving(*small) as server:
        children = _children(server.process.pid)
        assert len(children) == 2
        server.process.kill()
        for pid in children:
            _wait_until(lambda pid=pid: not _is_alive(pid))


def test_nothing_is_imported_from_the_current_folder(small, tmp_path):
    for name in ("zmq", "msgspec", "engine", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not meant to be imported')\n")
    with serving(*small, folder=tmp_path) as server:
        assert _post(server, _body(2)).status == 200


@needs_ipv6
@pytest.mark.parametrize("count", ["1", "2"])
def test_every_address_of_the_host_is_served(small, count):
    prelude = f"""
import socket
found = {[(int(V4[0]), 1, 6, "", V4[4]), (int(V6[0]), 1, 6, "", V6[4])]}
socket.getaddrinfo = lambda *_, **__: found
"""
    options = ("--host", "name", "--api-server-count", count)
    with serving(*small, *options, prelude=prelude) as server:
        for host in ("127.0.0.1", "::1"):
            for _ in range(4):
                connection = http.client.HTTPConnection(host, server.port, timeout=20)
                assert _post(server, _body(1), connection=connection).status == 200


def test_a_template_from_a_file(small, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
    with serving(*small, "--chat-template", str(template)) as server:
        response = _post(server, body, path="/v1/chat/completions")
        assert json.loads(response.read())["usage"]["prompt_tokens"] == 4


@pytest.mark.kills
def test_fifty_streams_survive_sigterm(small):
    with serving(*small, "--max-num-seqs", "64", "--shutdown-timeout", "60") as server:
        streams = [_stream(server, 100) for _ in range(50)]
        server.process.send_signal(signal.SIGTERM)
        for response in streams:
            assert response.read().rstrip().endswith(b"data: [DONE]")
        assert _end(server, 30)[0] == 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--block-size", "17"), "block_size"),
        (("--dtype", "float8"), "dtype"),
        (("--api-server-count", "0"), "api_server_count"),
        (("--tool-call-parser", "unknown"), "tool_call_parser|unknown"),
        (("--chat-template", "/nowhere"), "nowhere"),
        (("--ssl-certfile", "/nowhere"), "ssl_keyfile"),
        (("--ssl-certfile", "/nowhere", "--ssl-keyfile", "/none"), "got /nowhere and /none: .*No"),
        (("--api-key-file", "/nowhere"), "api_key_file"),
    ],
)
def test_a_wrong_option_ends_it_with_a_reason(small, options, word):
    with serving(*small, *options, wait=False) as server:
        status, errors = _end(server)
    assert status == 2 and re.search(word, errors), errors
    assert "Traceback" not in errors


def _tls_status(server, context, key=None):
    """Return the status of a request over TLS."""
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=20)
    with contextlib.closing(connection):
        return _post(server, _body(1), key=key, connection=connection).status


def test_tls_and_a_key_from_a_file(small, certificate, tmp_path):
    (tmp_path / "serve.toml").write_text(
        f'api-key = ["secret"]\nssl_certfile = "{certificate}/cert.pem"\nmax-num-seqs = 8\n'
        f'ssl_keyfile = "{certificate}/key.pem"\n'
    )
    context = ssl.create_default_context(cafile=certificate / "cert.pem")
    with serving(*small, "--config", str(tmp_path / "serve.toml")) as server:
        assert _tls_status(server, context) == 401
        assert _tls_status(server, context, "secret") == 200


@pytest.mark.slow
def test_a_tls_handshake_has_a_deadline(small, certificate):
    """A client that connects and says nothing; uvicorn would let it wait for a minute."""
    cert = ("--ssl-certfile", str(certificate / "cert.pem"))
    key = ("--ssl-keyfile", str(certificate / "key.pem"))
    with (
        serving(*small, *cert, *key) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as silent,
    ):
        begin = time.monotonic()
        assert silent.recv(100) == b""
        assert time.monotonic() - begin < 25


def test_clients_must_have_a_certificate(small, certificate):
    own = [certificate / "cert.pem", certificate / "key.pem"]
    context = ssl.create_default_context(cafile=own[0])
    options = ("--ssl-certfile", own[0], "--ssl-keyfile", own[1], "--ssl-ca-certs", own[0])
    with serving(*small, *map(str, options)) as server:
        with pytest.raises((ssl.SSLError, OSError)):
            _tls_status(server, context)
        context.load_cert_chain(*own)
        assert _tls_status(server, context) == 200


# ---- options, without processes


def _options(*arguments):
    parser = serve.argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve._given(parser.parse_args(arguments))


def test_every_option_of_the_engine_has_a_flag():
    fields = {f.name for f in dataclasses.fields(EngineConfig)}
    assert set(serve.LLM_OPTIONS) == fields | set(LOAD_OPTIONS) - {"config", "progress"}


def test_flags_become_options(model):
    given = _options(
        *(model, "--port", "1", "--api-key", "a", "--api-key", "b", "--no-access-log"),
        *("--allowed-origins", "https://x", "--gpu-memory-utilization", "0.5", "--no-cuda-graphs"),
        *("--shutdown-timeout", "1.5", "-q", "fp8", "--enable-prefix-caching"),
        *("--admin-api-key", "root", "--lora-modules", "a=b", "--lora-modules", "c=d=e"),
    )
    name, server, engine = serve._split(given)
    assert name == model
    assert server == ServerConfig(
        port=1,
        api_key_hashes=(key_hash("a"), key_hash("b")),
        admin_key_hashes=(key_hash("root"),),
        access_log=False,
        allowed_origins=("https://x",),
        shutdown_timeout=1.5,
        served_model_name=(model,),
    )
    del engine["progress"]
    assert engine == {
        "memory_utilization": 0.5,
        "cuda_graphs": False,
        "quantization": "fp8",
        "enable_prefix_caching": True,
        "lora_modules": ["a=b", "c=d=e"],
    }
    config = EngineConfig(lora_modules=engine["lora_modules"])
    assert config.lora_modules == {"a": "b", "c": "d=e"}


def test_a_built_in_configuration_is_served_if_random_weights_were_asked_for():
    name, server, engine = serve._split({"model": "qwen3-0.6b", "load_format": "dummy"})
    path = serve._model_path(name, engine["load_format"])
    assert Path(path, "config.json").exists() and engine["load_format"] == "dummy"
    assert server.served_model_name == ("qwen3-0.6b",)
    with pytest.raises(DownloadError, match=r"'qwen3-0\.6b' has no weights here: .*engine plan"):
        serve._model_path("qwen3-0.6b", None)


@pytest.mark.parametrize("option", ["chat-template", "lora-root", "api-key-file", "ssl-certfile"])
def test_files_are_looked_at_before_a_model_is_downloaded(option, monkeypatch):
    monkeypatch.setattr(serve, "_model_path", lambda *_: pytest.fail("downloaded"))
    parser = serve.argparse.ArgumentParser()
    serve.add_arguments(parser)
    more = ["--ssl-keyfile", "/no/such/key"] if option == "ssl-certfile" else []
    with pytest.raises(ConfigError, match=f"{option.replace('-', '_')}.*/no/such/file"):
        serve.run(parser.parse_args(["smollm2", f"--{option}", "/no/such/file", *more]))


@pytest.mark.parametrize(
    ("text", "error", "word"),
    [
        ("prot = 1", UnknownOptionError, "'port'"),
        ("api_key_hashes = []", UnknownOptionError, "api_key"),
        ("port = ", ConfigError, "serve.toml"),
        ("port = '1'", ConfigError, "port"),
        ("model = 3", ConfigError, "model"),
        ("api-key = [1]", ConfigError, "api_key"),
        ("admin-api-key = 1", ConfigError, "admin_api_key"),
        ("dtype = 2020-01-01", ConfigError, "dtype must be .*date"),
        ("dtype = ['float16']", ConfigError, "dtype must be"),
        ("lora_modules = [2020-01-01]", ConfigError, "lora_modules must be .*date"),
        ("pipeline_layers = [2020-01-01]", ConfigError, "pipeline_layers must be .*date"),
        ("memory_utilization = 0.5\ngpu-memory-utilization = 0.5", ConfigError, "not both"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, error, word):
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(error, match=word):
        serve._split(serve._read(file))


def test_stages_in_the_file_are_numbers_in_a_list(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text("pipeline-parallel-size = 2\npipeline-layers = [17, 15]\n")
    assert serve._split(serve._read(file))[2]["pipeline_layers"] == [17, 15]


def test_a_missing_library_is_named_with_its_extra(monkeypatch, model):
    monkeypatch.setitem(sys.modules, "zmq", None)
    parser = serve.argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(ConfigError, match=r"'zmq'.*rawengine\[serve\]"):
        serve.run(parser.parse_args([model]))


def test_a_long_folder_for_temporary_files_is_named(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match="TMPDIR"):
        Supervisor("model", ServerConfig(), {})


def test_flags_override_the_file(tmp_path, monkeypatch, model):
    file = tmp_path / "serve.toml"
    file.write_text("port = 1\nhost = '::1'\nmax_num_seqs = 3\n")
    found = {}
    module = "engine.server.supervisor.supervise"
    monkeypatch.setattr(module, lambda *given: found.update(given=given) or 0)
    parser = serve.argparse.ArgumentParser()
    serve.add_arguments(parser)
    assert serve.run(parser.parse_args([model, "--config", str(file), "--port", "2"])) == 0
    _, server, engine = found["given"]
    assert (server.port, server.host, engine["max_num_seqs"]) == (2, "::1", 3)
