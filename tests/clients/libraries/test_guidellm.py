"""A short benchmark by GuideLLM, over chat completions and over completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("guidellm")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_benchmark(server, tokenizer_folder, tmp_path, path):
    out = tmp_path / "report.json"
    backend = {
        "kind": "openai_http",
        "target": server.url,
        "model": "smollm2",
        "request_format": path,
        "api_key": server.key,
    }
    data = {"kind": "synthetic_text", "prompt_tokens": 32, "output_tokens": 8}
    tokenizer = {"kind": "huggingface_auto", "model": str(tokenizer_folder)}
    arguments = {
        "--backend": backend,
        "--profile": {"kind": "concurrent", "streams": 2},
        "--constraint": {"kind": "max_requests", "count": 6},
        "--tokenizer": tokenizer,
        "--data": data,
        "--output": {"kind": "json", "path": str(out)},
    }
    flat = [part for name, value in arguments.items() for part in (name, _pairs(value))]
    done = subprocess.run(
        [sys.executable, "-m", "guidellm", "run", *flat, "--disable-console"],
        capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = json.loads(out.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)
    for request in found["requests"]["successful"]:
        assert request["output_metrics"]["text_tokens"] == 8  # by the server's usage
        assert request["input_metrics"]["text_tokens"] >= 32


def _pairs(values):
    return ",".join(f"{name}={value}" for name, value in values.items())
