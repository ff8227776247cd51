"""`engine bench` at tiny sizes on the CPU: the published workloads, and results as data."""

from __future__ import annotations

import argparse
import json

import pytest

from engine import cli
from engine.commands import _bench_compare, bench
from engine.commands._bench_models import built_in_config, built_in_names
from engine.commands._bench_workloads import Work, prefill, serve, throughput
from engine.errors import ConfigError
from engine.loading.weight_table import weight_shapes
from tests.e2e.tiny import make_engine, tiny_model


def _run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *arguments])
    captured = capsys.readouterr()
    return end.value.code, captured.out + captured.err


def test_the_workload_is_the_published_one():
    work = Work.mixed(256)
    assert (work.num_prompt_tokens, work.num_output_tokens) == (141_664, 150_245)
    assert work.temperature == 0.6 and len(work.prompts) == 256
    assert {len(p) for p in work.prompts} <= set(range(100, 1025)) >= set(work.lengths)
    assert Work.same(16, 4096, 1).num_prompt_tokens == 65_536


# Parameters of the published checkpoints, in millions.
@pytest.mark.parametrize(
    ("name", "millions"),
    [("qwen2.5-0.5b", 494), ("qwen3-0.6b", 596), ("llama-3.2-1b", 1236), ("llama-3.1-8b", 8030)],
)
def test_built_in_configurations_have_the_published_sizes(name, millions):
    config = built_in_config(name)
    shapes = weight_shapes(config)
    if config.tie_word_embeddings:
        shapes.pop("lm_head", None)
    total = 0
    for shape in shapes.values():
        count = 1
        for size in shape:
            count *= size
        total += count
    assert round(total / 1e6) == millions and name in built_in_names()
    assert config.dtype == "bfloat16"


def test_work_is_served_whole():
    engine = make_engine(tiny_model(), max_num_batched_tokens=64)
    work = Work.mixed(3, longest=20, max_id=96)
    seconds, metrics = serve(engine, work)
    assert seconds > 0
    assert [m.num_generation_tokens for m in metrics] == list(work.lengths)
    row = throughput(engine, work, 1)
    assert row["total_tokens_per_s"] > row["output_tokens_per_s"] > 0
    assert prefill(engine, Work.same(2, 30, 1, max_id=96), 1)["prompt_tokens_per_s"] > 0


@pytest.mark.parametrize("kind", ["latency", "throughput", "prefill"])
def test_on_the_cpu(kind, capsys, tmp_path):
    file = tmp_path / "result.json"
    options = ["--device", "cpu", "--model", "smollm2", "--load-format", "dummy", "--repeats", "1"]
    sizes = ["--num-requests", "1", "--prompt-len", "5", "--output-len", "2", "--json", str(file)]
    status, text = _run(capsys, kind, *options, *sizes)
    assert status == 0 and kind in text
    record = json.loads(file.read_text())
    assert {"card", "date", "commit", "command", "version", "rows"} <= set(record)
    [row] = record["rows"]
    assert row["kind"] == kind and row["prompt_tokens"] == 5 and not row["cuda_graphs"]
    assert all(value > 0 for value in row.values() if isinstance(value, float))


def test_startup_counts_from_the_start_of_the_process(capsys, tmp_path):
    file = tmp_path / "result.json"
    options = ["--device", "cpu", "--model", "smollm2", "--load-format", "dummy"]
    status, text = _run(capsys, "startup", *options, "--json", str(file))
    assert status == 0, text
    cold, warm = json.loads(file.read_text())["rows"]
    assert (cold["kernel_cache"], warm["kernel_cache"]) == ("cold", "warm")
    for row in (cold, warm):
        assert 0 < row["imported_s"] < row["ready_s"] < row["first_token_s"] < 120


def test_without_torch_the_comparison_says_so(monkeypatch):
    monkeypatch.setattr(_bench_compare.importlib.util, "find_spec", lambda name: None)
    options = argparse.Namespace(model="qwen3-0.6b", device="cpu")
    with pytest.raises(ConfigError, match="--compare needs torch, which is not installed"):
        _bench_compare.transformers_latency(options, Work.same(1, 4, 2), 1)


def test_nonsense_is_refused(capsys):
    assert _run(capsys, "speed")[0] == 2
    status, text = _run(capsys, "latency", "--model", "/no/such/model", "--device", "cpu")
    assert status == 2 and "/no/such/model" in text
    assert set(bench._KINDS) == {"latency", "throughput", "prefill", "startup"}
