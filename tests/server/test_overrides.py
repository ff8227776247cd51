"""A server with a kernel of the user's own: the options, the answers, the metrics."""

from __future__ import annotations

import json

import pytest

from engine.commands import serve
from engine.errors import ConfigError
from tests.server.test_serve import _body, _options, _post, model, serving, small
from tests.server.test_speculation import read_metrics

__all__ = ["model", "small"]  # fixtures

MINE = """
import numpy as np

def half(x):
    return x[:, : x.shape[1] // 2]

def seven(token_ids, logits):
    logits[:] = 0
    logits[7] = 9
"""


@pytest.fixture
def file(tmp_path):
    """A file of the user."""
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def _answer(server):
    return json.loads(_post(server, _body(8, temperature=0)).read())["choices"][0]["text"]


def test_the_kernel_answers_and_is_counted(small, file):
    with serving(*small) as server:
        wanted = _answer(server)
    with serving(*small, "--kernels", f"swiglu={file}:half") as server:
        assert _answer(server) != wanted
        found = read_metrics(server, "kernel_runs_total")
        mine = [count for name, count in found.items() if 'kernel="swiglu=half"' in name]
        assert len(mine) == 1 and mine[0] > 0


def test_a_wrong_kernel_ends_the_start_with_its_reason(small, file):
    with serving(*small, "--kernels", f"swiglu={file}:other", wait=False) as server:
        assert server.process.wait(30) == 2
        assert "has nothing called 'other'" in server.process.stderr.read()


def test_the_options_are_lists_or_a_table(tmp_path, file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ("--kernels", "swiglu=mine.py:half", "--logits-processors", "mine.py:seven")
    _, _, engine = serve._split(_options("smollm2", *given))
    assert engine["kernels"] == {"swiglu": f"{file}:half"}
    assert engine["logits_processors"] == [f"{file}:seven"]
    toml = tmp_path / "serve.toml"
    toml.write_text(f'model = "smollm2"\n[kernels]\nswiglu = "{file}:half"\n')
    _, _, engine = serve._split(serve._read(toml))
    assert engine["kernels"] == {"swiglu": f"{file}:half"}
    for wrong, text in (("swiglu", "OP=FILE.py:NAME"), ("swiglu=mine:half", "FILE.py:NAME")):
        with pytest.raises(ConfigError, match=text):
            serve._split(_options("smollm2", "--kernels", wrong))
    toml.write_text('model = "smollm2"\nlogits_processors = "mine.py:seven"\n')
    with pytest.raises(ConfigError, match="logits_processors must be a list"):
        serve._split(serve._read(toml))
