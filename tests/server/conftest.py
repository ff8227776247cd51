"""Servers that several test files share."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from engine.async_engine import AsyncEngine
from engine.llm_engine import LLMEngine
from engine.model import load
from engine.server.server_config import ServerConfig
from tests.server.serving import serve


@pytest.fixture(scope="module")
def smollm2():
    """The model, on the CPU in float32; its answers are deterministic. Its server closes it."""
    return load("smollm2", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def real_server(smollm2):
    """A server of smollm2."""
    options = {"max_num_seqs": 8, "max_model_len": 512, "num_blocks": 256}

    def make_client():
        return AsyncEngine(LLMEngine(smollm2, **options))

    with serve(make_client, ServerConfig(served_model_name=("smollm2",))) as found:
        yield found


@pytest.fixture(scope="module")
def client(real_server):
    """OpenAI's client of `real_server`."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(
        base_url=real_server.url + "/v1", api_key="none", max_retries=0, timeout=60
    ) as found:
        yield found


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A folder with a certificate that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    folder = tmp_path_factory.mktemp("certificate")
    names = ("-keyout", folder / "key.pem", "-out", folder / "cert.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names, "-days", "1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return folder
