"""`engine bench` at tiny sizes on the CPU: the published workloads, and results as data."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
from types import SimpleNamespace

import pytest

from engine import cli
from engine.commands import _bench_compare, _bench_workloads, bench
from engine.commands._bench_models import built_in_config, built_in_names
from engine.commands._bench_workloads import Work, latency, prefill, serve, throughput
from engine.config import MoeConfig
from engine.errors import ConfigError, EngineError
from engine.loading.weight_table import weight_shapes
from tests.e2e.tiny import CONFIG, make_engine, tiny_model


def _run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *arguments])
    captured = capsys.readouterr()
    return end.value.code, captured.out + captured.err


@pytest.fixture
def tiny_folder(tmp_path):
    """The configuration of a model with a limit of 64 tokens, without weights."""
    fields = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96,
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return ["--model", str(folder), "--device", "cpu", "--load-format", "dummy"]


def test_the_workload_is_the_published_one():
    work = Work.mixed(256)
    assert (work.num_prompt_tokens, work.num_output_tokens) == (141_664, 150_245)
    assert work.temperature == 0.6 and len(work.prompts) == 256
    assert {len(p) for p in work.prompts} <= set(range(100, 1025)) >= set(work.lengths)
    assert Work.same(16, 4096, 1).num_prompt_tokens == 65_536


# Parameters of the published checkpoints, in millions.
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *(("qwen2.5-0.5b", 494), ("qwen3-0.6b", 596), ("llama-3.2-1b", 1236)),
        *(("llama-3.1-8b", 8030), ("gpt-oss-20b", 20915), ("qwen3-30b-a3b", 30532)),
        *(("mixtral-8x7b", 46703), ("llama-3.1-70b", 70554), ("gpt-oss-120b", 116829)),
        *(("qwen3-235b-a22b", 235094), ("qwen3.6-35b-a3b", 34661)),
    ],
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


def test_every_request_gets_all_its_tokens():
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
    sizes = ["--num-requests", "1", "--prompt-len", "5", "--json", str(file)]
    if kind != "prefill":  # which always generates one token
        sizes += ["--output-len", "2"]
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
        _bench_compare.check(options)


def test_the_table_names_its_numbers(capsys, tiny_folder):
    sizes = ["--num-requests", "2", "--prompt-len", "5", "--output-len", "3", "--repeats", "1"]
    status, text = _run(capsys, "throughput", *tiny_folder, *sizes)
    assert status == 0, text
    for part in ("num_requests 2", "prompt_tokens", "output_tokens", "cuda_graphs False"):
        assert part in text


def test_outputs_of_throughput_have_a_length_of_their_own():
    work = Work.mixed(20, longest=30, longest_output=4)
    assert {len(p) for p in work.prompts} == {30} and set(work.lengths) == {4}
    assert Work.mixed(20, 300).prompts == Work.mixed(20, 300, longest_output=5).prompts


def test_latency_is_of_all_requests_but_the_first_runs(monkeypatch):
    def request(first, last):
        return SimpleNamespace(ttft=first, first_token_time=first, last_token_time=last)

    runs = iter([[request(9, 99)] * 3, [request(1, 3), request(2, 8), request(3, 13)]])
    monkeypatch.setattr(_bench_workloads, "serve", lambda *_: (0.0, next(runs)))
    row = latency(make_engine(tiny_model()), Work.same(3, 4, 3), repeats=1)
    assert row["ttft_ms"] == 2000.0
    assert row["ms_per_token"] == 3000.0  # of 1, 3 and 5 s: two gaps each


EXPERTS = dataclasses.replace(
    CONFIG,
    model_type="qwen3_moe",
    num_layers=4,
    qk_norm=True,
    moe=MoeConfig(8, 2, 16, (False, True, True, False)),
)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("output_len", [2, 6])
def test_a_step_reads_the_experts_that_it_hits(output_len, is_async):
    """One request hits top_k experts a layer; the other weights are those of the dense model."""
    model = tiny_model(config=EXPERTS)
    engine = make_engine(model, async_scheduling=is_async)
    row = latency(engine, Work.same(1, 9, output_len, max_id=90), repeats=1)
    weights = model.decoder.weights
    matrices = [w for name, w in weights.items() if "experts_" in name]
    assert len(matrices) == 4 and all(w.shape[0] == 8 for w in matrices)
    unread = sum(w.num_bytes for w in matrices) * 6 / 8
    is_tied = weights["embed"] is weights["lm_head"]
    unread += model.decoder.table_bytes + (0 if is_tied else weights["embed"].num_bytes)
    assert row["experts_per_step"] == 2
    assert row["weight_GB_per_step"] * 1e9 == pytest.approx(model.weight_bytes - unread)
    rate = row["weight_GB_per_step"] / row["ms_per_token"]
    assert row["weight_TB_per_s"] == pytest.approx(rate)


def test_a_batch_reads_an_expert_once_for_all_its_tokens():
    model = tiny_model(config=EXPERTS)
    work = Work.same(8, 9, 6, max_id=90)
    assert 2 < latency(make_engine(model), work, repeats=1)["experts_per_step"] <= 8
    for name, weight in model.decoder.weights.items():
        if name.endswith(".router"):
            weight.data[...] = 0  # a tie, for every token: it gets the experts 0 and 1
    assert latency(make_engine(model), work, repeats=1)["experts_per_step"] == 2


def test_dense_models_read_all_their_weights():
    model = tiny_model()
    row = latency(make_engine(model), Work.same(2, 9, 3, max_id=90), repeats=1)
    unread = model.decoder.table_bytes
    if model.decoder.weights["embed"] is not model.decoder.weights["lm_head"]:
        unread += model.decoder.weights["embed"].num_bytes
    assert "experts_per_step" not in row
    assert row["weight_GB_per_step"] * 1e9 == pytest.approx(model.weight_bytes - unread)


def test_with_drafts_no_rate_is_derived_from_the_time_per_token():
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    engine = make_engine(tiny_model(config=EXPERTS), speculative_config=drafts)
    row = latency(engine, Work.same(1, 9, 6, max_id=90), repeats=1)
    assert row["experts_per_step"] >= 2 and "weight_TB_per_s" not in row


def test_missing_tokens_are_not_counted(monkeypatch):
    """A request that fails ends early (because of a row of NaN, for example)."""
    engine = make_engine(tiny_model())
    work = Work.same(1, 5, 4, max_id=96)
    add = engine.add_request

    def add_shorter(request_id, prompt, params):
        add(request_id, prompt, dataclasses.replace(params, max_tokens=2))

    monkeypatch.setattr(engine, "add_request", add_shorter)
    with pytest.raises(EngineError, match="request 0 ended after 2 of 4 tokens"):
        serve(engine, work)


@pytest.fixture
def stations(monkeypatch):
    """Replace the measured processes; returns the calls."""
    calls = []

    def answer(command, **options):
        calls.append((command, options))
        return SimpleNamespace(returncode=0, stdout=json.dumps({"ready": 2e9}), stderr="")

    monkeypatch.setattr(subprocess, "run", answer)
    return calls


def test_startup_measures_what_the_options_say(capsys, stations, tiny_folder):
    options = ["--no-cuda-graphs", "--max-num-seqs", "3", "--max-num-batched-tokens", "64"]
    assert _run(capsys, "startup", *tiny_folder, *options, "--no-async")[0] == 0
    options += ["-tp", "2", "-pp", "2", "--pipeline-layers", "1,1", "--enable-expert-parallel"]
    assert _run(capsys, "startup", *tiny_folder, *options, "--no-async")[0] == 0
    for command, _ in stations[2:]:
        assert {"--tensor-parallel-size=2", "--pipeline-parallel-size=2"} < set(command)
        assert {"--pipeline-layers=1,1", "--enable-expert-parallel"} < set(command)
    for command, _ in stations:
        assert {"--no-cuda-graphs", "--no-async", "--max-num-seqs=3"} < set(command)
        assert {"--max-num-batched-tokens=64", "--load-format=dummy"} < set(command)


def test_startup_names_a_downloaded_model_by_its_path(capsys, stations, monkeypatch, tmp_path):
    """The measured processes have an empty cache: a download must not be part of the time."""
    file = tmp_path / "SmolLM2.gguf"
    monkeypatch.setattr("engine.loading.download.pull", lambda name, **_: file)
    source = type("Source", (), {"__fspath__": lambda self: str(file)})()
    monkeypatch.setattr("engine.loading.download._source_at", lambda path: source)
    assert _run(capsys, "startup", "--device", "cpu", "--model", "smollm2")[0] == 0
    for command, options in stations:
        assert f"--model={file}" in command
        assert options["env"]["ENGINE_CACHE_DIR"] != os.environ.get("ENGINE_CACHE_DIR")


def test_startup_of_a_model_that_holds_few_tokens(capsys, tiny_folder):
    status, text = _run(capsys, "startup", *tiny_folder)
    assert status == 0, text


def test_a_failed_start_is_reported_in_one_line(capsys, tiny_folder):
    status, text = _run(capsys, "startup", *tiny_folder, "--dtype", "int8")
    assert status == 2 and "int8" in text and len(text.splitlines()) == 1
    status, text = _run(capsys, "startup", "--device", "cpu", "--model", "nosuch")
    assert status == 2 and "'nosuch'" in text and len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "options", "wanted", "got"),
    [
        ("latency", "--num-requests 0", "--num-requests must be from 1 to", "0"),
        ("throughput", "--num-requests -2", "--num-requests must be from 1 to", "-2"),
        ("prefill", "--num-requests 0", "--num-requests must be from 1 to", "0"),
        ("latency", "--repeats 0", "--repeats must be from 1 to", "0"),
        ("latency", f"--repeats {10**30}", "--repeats must be from 1 to 10000", f"{10**30}"),
        ("throughput", "--repeats -1", "--repeats must be from 1 to", "-1"),
        ("latency", "--prompt-len -3", "--prompt-len must be from 1 to", "-3"),
        ("throughput", "--prompt-len 0", "--prompt-len must be from 1 to", "0"),
        ("latency", "--output-len 1", "--output-len must be from 2 to", "1"),
        ("throughput", "--output-len 0", "--output-len must be from 1 to", "0"),
        ("latency", "--max-num-seqs 0", "--max-num-seqs must be from 1 to", "0"),
        ("latency", "--max-num-batched-tokens 0", "--max-num-batched-tokens must be", "0"),
        ("prefill", "--output-len 7", "--output-len applies to latency, throughput", "prefill"),
        ("startup", "--repeats 2", "--repeats applies to latency, throughput, prefill", "startup"),
        ("startup", "--num-requests 2", "--num-requests applies to latency", "startup"),
        ("throughput", "--compare", "--compare applies to latency", "throughput"),
        ("latency", "--json /no/such/folder/x.json", "--json must name", "/no/such/folder/x.json"),
        ("latency", "--json /", "--json must name a file", "/"),
        ("latency", "--prompt-len 60 --output-len 5", "at most 64, the limit of ", "65"),
    ],
)
def test_a_bad_option_is_named_before_anything_is_measured(
    capsys, tiny_folder, monkeypatch, kind, options, wanted, got
):
    monkeypatch.setattr(_bench_workloads, "serve", None)
    status, text = _run(capsys, kind, *tiny_folder, *options.split())
    assert status == 2 and wanted in text and text.rstrip().endswith(got), text
    assert len(text.splitlines()) == 1 and text.startswith("engine bench: ")


def test_an_unwritable_result_is_reported_in_one_line(capsys, tiny_folder, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    file = tmp_path / "x.json"
    monkeypatch.setattr(type(file), "write_text", fail)
    sizes = ["--prompt-len", "5", "--output-len", "2", "--repeats", "1", "--json", str(file)]
    status, text = _run(capsys, "latency", *tiny_folder, *sizes)
    assert status == 2 and f"--json {file} cannot be written" in text and "ms_per_token" in text


def test_the_comparison_is_of_the_same_kind(monkeypatch):
    """Same dtype, same device, one request; what cannot be matched is refused."""
    monkeypatch.setattr(_bench_compare.importlib.util, "find_spec", lambda name: True)
    options = argparse.Namespace(model="qwen3-0.6b", device="auto", num_requests=3)
    with pytest.raises(ConfigError, match="--num-requests 1; got 3"):
        _bench_compare.check(options)
    options.num_requests = None
    _bench_compare.check(options)
    asked = []
    torch = SimpleNamespace(
        float16="half", tensor=lambda *_, **__: None, cuda=SimpleNamespace(is_available=bool)
    )
    made = SimpleNamespace(generate=lambda *_, **__: None, eval=lambda: made)
    made.to = lambda place: asked.append(place) or made
    auto = SimpleNamespace(from_config=lambda config, dtype: asked.append(dtype) or made)
    transformers = SimpleNamespace(
        AutoConfig=SimpleNamespace(for_model=lambda **_: None),
        AutoModelForCausalLM=auto,
        __version__="0",
    )
    modules = {"torch": torch, "transformers": transformers}
    monkeypatch.setattr(_bench_compare.importlib, "import_module", modules.__getitem__)
    work = Work.same(1, 4, 2)
    row = _bench_compare.transformers_latency(options, work, 1, dtype="float16", device="cpu")
    assert row["dtype"] == "float16" and asked == ["half", "cpu"]
    with pytest.raises(ConfigError, match="PyTorch with CUDA for cuda:1"):
        _bench_compare.transformers_latency(options, work, 1, dtype="float16", device="cuda:1")


def test_invalid_options_are_refused(capsys):
    assert _run(capsys, "speed")[0] == 2
    status, text = _run(capsys, "latency", "--model", "/no/such/model", "--device", "cpu")
    assert status == 2 and "/no/such/model" in text
    assert set(bench._KINDS) == {"latency", "throughput", "prefill", "startup"}
