"""Servers for the sessions of client libraries, each of which is one file here.

`make test-clients` installs the libraries into an environment of its own and runs the sessions;
without its library a session is skipped. `server` is `engine serve smollm2` in a process, with a
chat template that reads tools; `scripted` answers with prepared texts, so that a conversation with
tools has a known course.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.loading.download import local_path
from engine.server.server_config import ServerConfig, key_hash
from tests.golden.text_templates import TOOLS
from tests.server.scripted_client import ScriptedClient
from tests.server.serving import serve

ROOT = Path(__file__).parents[3]
MAX_MODEL_LEN = 1024
LONG = "word " * 2000  # does not fit
KEY = "a-key"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
OPTIONS = (
    *("--device", "cpu", "--dtype", "float32", "--port", "0", "--api-key", KEY),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8", "--num-blocks", "512"),
    *("--served-model-name", "smollm2", "--enable-tokenizer-info-endpoint"),
)


def pytest_collection_modifyitems(items):
    """Mark the sessions: slow, with more time on a busy machine; libraries may warn."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.timeout(900))
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def run():
    """Run a coroutine; all in one event loop, as the libraries keep connections."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """`engine serve smollm2` as a process: `url`, `api` (with /v1) and `key`."""
    if local_path("smollm2") is None:
        pytest.skip("SmolLM2 has not been pulled: run `engine pull smollm2`")
    folder = tmp_path_factory.mktemp("server")
    template = folder / "template.jinja"
    # The server would let a model think whose template has these tags; SmolLM2 would not stop.
    template.write_text(TOOLS.replace("think>", "thoughts>"))
    log = folder / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine", "serve", "smollm2", *OPTIONS,
             "--chat-template", str(template)],
            cwd=ROOT, stderr=stderr, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            port = _port(process, log)
            url = f"http://127.0.0.1:{port}"
            yield SimpleNamespace(url=url, api=f"{url}/v1", key=KEY, log=log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """SmolLM2's tokenizer in Hugging Face's files."""
    transformers = pytest.importorskip("transformers")
    path = local_path("smollm2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


def _port(process, log, seconds=120):
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        if found := re.search(r"ready at http://.*:(\d+)", log.read_text()):
            return int(found[1])
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def _script(prompt, params):
    """Call `add` once if there are tools, then tell its result."""
    if "<result>" in prompt.rpartition("<|im_start|>user")[2]:
        return "The sum is 5."
    schema = str(params.structured or "")
    if schema and "triggered_tags" not in schema and "JSON" not in prompt:  # a required tool
        arguments = '{"a": 2, "b": 3}'
        if "'array'" in schema:
            return f'[{{"name": "add", "arguments": {arguments}}}]'
        return arguments
    if "JSON" in prompt:
        return '{"name": "Ada", "age": 36}'
    return CALL if "<tools>" in prompt else "Hello there!"


@pytest.fixture(scope="session")
def scripted():
    """A server of prepared answers: `url`, `api`, `key`, and its `client` with the prompts."""
    config = ServerConfig(
        served_model_name=("scripted",), api_key_hashes=(key_hash(KEY),), access_log=False
    )
    client = ScriptedClient(TOOLS, _script)
    with serve(lambda: client, config) as found:
        yield SimpleNamespace(url=found.url, api=f"{found.url}/v1", key=KEY, client=client)
