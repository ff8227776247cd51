"""A session of OpenAI's and Anthropic's libraries for Node.js.

The environment variable CLIENTS_JS names a folder whose node_modules has them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.libraries.conftest import MAX_MODEL_LEN

SCRIPT = Path(__file__).with_name("openai_js.mjs")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.skipif("CLIENTS_JS" not in os.environ, reason="needs CLIENTS_JS (make test-clients)")
def test_a_session(server):
    done = subprocess.run(
        ["node", str(SCRIPT), server.url, server.key],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "Paris" in found["chat"]
    for name in ("stream", "responses", "message", "message_stream"):
        assert found[name] == found["chat"], name
    assert (found["usage"], found["embedding"]) == (8, 576)
    assert found["error"] == [400, "context_length_exceeded", "messages", "string"]
    status, words, request_id = found["anthropic_error"]
    assert (status, request_id) == (400, "string")
    assert re.search(rf"prompt is too long: \d+ tokens > {MAX_MODEL_LEN - 1} maximum", words)
