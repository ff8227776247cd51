"""`engine doctor --plan`: where the memory goes, from a configuration alone."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import pytest

import engine
from engine import cli
from engine.cache.block_plan import MemoryBudget
from engine.cache.kv_cache import KVGeometry
from engine.cache.memory_pool import format_bytes
from engine.commands._bench_models import built_in_config, built_in_names, config_folder
from engine.config import GatedDeltaConfig
from engine.core import resolve as resolving
from engine.core.resolve import default_budget, resolve
from engine.device import CPU, Device, resolve_device
from engine.engine_config import EngineConfig
from engine.kernels._override.scope import ModelKernels
from engine.loading.load_config import LoadConfig
from engine.loading.weight_memory import quantized_formats, weight_bytes
from engine.loading.weight_table import weight_shapes
from engine.models.rope_tables import rope_bytes
from engine.runner.features import FeatureTap
from engine.scaling.memory import _group_of, plan_memory
from engine.weights import FORMATS
from tests.golden.configs import CASES, golden_config
from tests.loading import tiny

CUDA = Device("cuda", 0)


def _how(config, dtype="bfloat16", quantization=None, length=4096, device=CUDA):
    length = min(length, config.max_position_embeddings)
    return LoadConfig(device, dtype, length, "auto", quantization)


@pytest.mark.parametrize("quantization", [None, "int4_g128", "fp8"])
@pytest.mark.parametrize("name", built_in_names())
def test_the_groups_are_all_weights(name, quantization):
    config = built_in_config(name)
    plan = plan_memory(config, _how(config, quantization=quantization), 80 * 10**9)
    formats = quantized_formats(config, FORMATS[quantization]) if quantization else {}
    total = weight_bytes(config, "bfloat16", formats=formats)
    assert sum(group.num_bytes for group in plan.weights) == total
    assert plan.rope_bytes == rope_bytes(config, plan.max_model_len)
    assert plan.budget.weights == total + plan.rope_bytes
    kinds = {each.rpartition(".")[2] for each in weight_shapes(config)}
    assert all(("norm" in kind) == (_group_of(kind) == "norms") for kind in kinds)
    sizes = [group.num_bytes for group in plan.weights]
    assert sizes == sorted(sizes, reverse=True)


def test_pages_fill_what_is_left():
    config = built_in_config("llama-3.1-8b")
    plan = plan_memory(config, _how(config), 141 * 10**9)
    geometry = KVGeometry.of_model(config, "bfloat16")
    wide, narrow = plan.pages
    assert wide.bytes_per_token == geometry.bytes_per_token == 2 * narrow.bytes_per_token
    for pages in plan.pages:
        room = plan.budget.left - pages.num_tokens * pages.bytes_per_token
        assert 0 <= room < 16 * pages.bytes_per_token
    assert wide.num_tokens <= narrow.num_tokens // 2 <= wide.num_tokens + 16


def test_float32_pages_take_four_times_8_bits():
    config = built_in_config("qwen3-0.6b")
    wide, narrow = plan_memory(config, _how(config, "float32", device=CPU), 10**10).pages
    assert wide.bytes_per_token == 4 * narrow.bytes_per_token


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["fp8", "int8", "int4_g128", "int4_g32_zp", "int8_g64"])
def test_the_plan_of_a_cpu_is_what_a_load_takes(tmp_path, form, dtype):
    sizes = {"hidden_size": 256, "intermediate_size": 384}
    tiny.write_model(tmp_path / "source", "llama", ml_dtypes.bfloat16, **sizes)
    engine.quantize(tmp_path / "source", tmp_path / "stored", format=form)
    for name, quantization in (("source", form), ("stored", None)):
        with engine.load(
            tmp_path / name, device="cpu", dtype=dtype, quantization=quantization
        ) as m:
            how = replace(m.load_config, quantization=form)
            plan = plan_memory(m.config, how, 10**10, is_rounded=name == "source")
            assert plan.budget.weights == m.weight_bytes, name


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_budget_is_the_engines(device, num_ranks, monkeypatch):
    """GPUs that share a model have allocated the buffers of collectives by then."""
    config = built_in_config("qwen3-0.6b")
    total, weights = 80 * 10**9, 1_200_000_000
    buffers = 3 * 96 << 20 if device.is_cuda and num_ranks > 1 else 0
    shares = 1 if device.is_cuda else num_ranks  # processes on the memory of this machine
    left = total - weights * shares - buffers
    monkeypatch.setattr(resolving, "device_memory", lambda place: (total * shares, left))
    model = SimpleNamespace(
        config=config,
        device=device,
        dtype="bfloat16",
        weight_bytes=weights,
        num_ranks=num_ranks,
        num_stages=1,
    )
    sizes = (8192, 256, True) if device.is_cuda else (512, 16, False)
    found = resolving._memory(EngineConfig(), model, *sizes, num_features=0)
    expected = default_budget(config, "bfloat16", device.kind, total, weights, num_ranks=num_ranks)
    assert replace(found, others=0) == expected and expected.collectives == buffers
    assert found.others == 0 or not device.is_cuda
    assert ("buffers of collectives 288.00 MiB" in str(found)) == bool(buffers)


@pytest.mark.parametrize("total", [80 * 10**9, 30 * 10**9])
def test_states_are_planned_as_the_engine_does(total, monkeypatch):
    """With less memory fewer requests run: their states take half of what weights leave."""
    kinds = {"layer_kinds": ("attention", "gated_delta") * 16}
    kinds["gated_delta"] = GatedDeltaConfig(16, 32, 128, 128)
    config = replace(built_in_config("llama-3.1-8b"), **kinds)
    plan = plan_memory(config, _how(config), total)
    monkeypatch.setattr(resolving, "device_memory", lambda place: (total, total))
    fields = {"device": CUDA, "dtype": "bfloat16", "deterministic": False, "num_ranks": 1}
    fields |= {"num_stages": 1, "feature_layers": (), "stage_sizes": lambda *given: []}
    fields |= {
        "has_patterns": False,
        "num_adapter_slots": 0,
        "kernels": ModelKernels(),
        "max_model_len": 131072,
    }
    sizes = {"weight_bytes": plan.budget.weights}
    model = SimpleNamespace(config=config, whole_config=config, **sizes, **fields)
    made = resolve(EngineConfig(max_model_len=4096), model)
    limits = made.scheduler
    per_request = 16 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)  # states, and inputs of convolutions
    assert plan.states.bytes_per_request == made.geometry.bytes_per_slot == per_request
    assert plan.states.num_requests == limits.max_num_seqs
    assert plan.budget.states == limits.num_state_slots * per_request
    left = plan.budget.left + plan.budget.states
    if total == 80 * 10**9:
        assert limits.max_num_seqs == 256
        assert limits.num_state_slots - 256 == (left - 256 * per_request) // 4 // per_request
    else:
        assert limits.max_num_seqs == left // 2 // per_request < 256
        assert "half of what is left" in made.reasons["max_num_seqs"]
    assert limits.num_blocks * 16 == min(plan.pages[0].num_tokens, 4096 * limits.max_num_seqs)
    assert "states" in str(plan) and "32.75 MiB for each of" in str(plan)
    assert not plan_memory(built_in_config("llama-3.1-8b"), _how(config), total).budget.states


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_features_for_a_head_are_planned(device, monkeypatch):
    """As many bytes as `FeatureTap` allocates: for this step, the last one, and the graphs."""
    config, total = built_in_config("qwen3-0.6b"), 80 * 10**9
    monkeypatch.setattr(resolving, "device_memory", lambda place: (total, total))
    fields = {"device": device, "dtype": "bfloat16", "deterministic": False, "weight_bytes": 0}
    fields |= {"num_ranks": 1, "num_stages": 1, "stage_sizes": lambda *given: []}
    fields |= {"has_patterns": False, "num_adapter_slots": 0, "kernels": ModelKernels()}
    model = SimpleNamespace(config=config, whole_config=config, max_model_len=4096, **fields)
    plain = SimpleNamespace(**vars(model), feature_layers=())
    head = SimpleNamespace(**vars(model), feature_layers=(2, 9, 2))
    sizes = {"max_num_batched_tokens": 1000, "max_num_seqs": 20, "max_draft_tokens": 3}
    tap = FeatureTap(SimpleNamespace(config=config, device=CPU, dtype="bfloat16"), (2, 9, 2))
    counts = [1000, 1000] + [32 * (1 + 3)] * device.is_cuda
    arrays = [one for count in counts for one in tap.new_for_graphs(count).values()]
    wanted = sum(one.nbytes for one in arrays)
    made = [resolve(EngineConfig(**sizes), model, draft) for draft in (plain, head)]
    reasons = [one.reasons["draft_model"] for one in made]
    assert reasons[1] == f"{reasons[0]}, {format_bytes(wanted)} for the model's features"
    budget = MemoryBudget(total, 0, 0, 0)
    plans = [
        resolving._draft_sizes(
            EngineConfig(**sizes), model, draft, 1000, 20, device.is_cuda
        ).added_to(budget, 1000, 20, device.is_cuda)
        for draft in (plain, head)
    ]
    assert plans[0].left - plans[1].left == wanted


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_draft_model_takes_what_the_engine_gives_it(device, monkeypatch):
    names, total = ("llama-3.1-8b", "qwen3-0.6b"), 80 * 10**9
    config, small = map(built_in_config, names)
    how, beside = (_how(each, device=device) for each in (config, small))
    plan = plan_memory(config, how, total, draft=(small, beside), num_drafts=20)
    of_small = plan_memory(small, beside, total).budget.weights
    monkeypatch.setattr(resolving, "device_memory", lambda place: (total, total))
    sizes = {"device": device, "dtype": "bfloat16", "deterministic": False, "num_ranks": 1}
    sizes |= {"num_stages": 1, "feature_layers": (), "stage_sizes": lambda *given: []}
    sizes |= {"has_patterns": False, "num_adapter_slots": 0, "kernels": ModelKernels()}
    made = resolve(
        EngineConfig(max_draft_tokens=20),
        SimpleNamespace(
            config=config,
            whole_config=config,
            weight_bytes=plan.budget.weights,
            max_model_len=4096,
            **sizes,
        ),
        SimpleNamespace(config=small, weight_bytes=of_small, max_model_len=4096, **sizes),
    )
    assert made.reasons["draft_model"] == str(plan.draft)
    alone = plan_memory(config, how, total)
    assert (
        plan.draft.bytes_per_block
        == 16 * plan_memory(small, beside, total).pages[0].bytes_per_token
    )
    seqs = 256 if device.is_cuda else 16
    assert plan.draft.num_spare_blocks == 2 * seqs
    taken = alone.budget.left - plan.budget.left
    assert taken >= of_small + 2 * seqs * plan.draft.bytes_per_block
    assert "draft model" in str(plan) and "draft model" not in str(alone)
    more = plan.draft.bytes_per_block // 16
    for page, other in zip(plan.pages, alone.pages, strict=True):
        assert page.bytes_per_token == other.bytes_per_token + more


def test_a_model_that_is_too_large_is_said_to_be():
    config = built_in_config("llama-3.1-8b")
    plan = plan_memory(config, _how(config), 8 * 10**9)
    assert plan.budget.left < 0 and [pages.num_tokens for pages in plan.pages] == [0, 0]
    assert str(plan).splitlines()[-1].startswith("does not fit: ")
    fitting = plan_memory(config, _how(config, quantization="int4_g128"), 12 * 10**9)
    assert fitting.budget.left > 0 and "does not fit" not in str(fitting)


def test_pages_of_latents_have_no_8_bits():
    config = golden_config("deepseek_v3")
    (pages,) = plan_memory(config, _how(config), 80 * 10**9).pages
    assert pages.dtype == "bfloat16"


def test_every_kind_of_weight_has_its_group():
    for case in CASES:
        kinds = {name.rpartition(".")[2] for name in weight_shapes(golden_config(case))}
        assert all(("norm" in kind) == (_group_of(kind) == "norms") for kind in kinds), case
    groups = ("attention", "MLPs", "experts", "layers with states", "residual streams")
    kinds = ("second_mla_out", "second_gate_up", "moe_latent_in", "lightning_in", "laurel_left")
    assert tuple(map(_group_of, kinds)) == groups


# ------------------------------------------------------------------------------ the command


def _run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", *arguments])
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def test_the_command_prints_the_plan(capsys):
    options = ("--memory", "141GB", "-q", "int4", "--max-model-len", "8192")
    status, text, error = _run(capsys, "--plan", "llama-3.1-8b", *options)
    assert status == 0, error
    lines = text.splitlines()
    assert lines[0] == "llama-3.1-8b in int4_g128 on 131.32 GiB of a GPU"
    assert [line.split()[0] for line in lines[1:4]] == ["weights", "MLPs", "embeddings"]
    for part in ("for 8192 tokens", "90 % of 131.32 GiB", "bfloat16 pages", "8-bit pages"):
        assert part in text
    status, text, _ = _run(capsys, "--plan", "llama-3.1-8b", "--memory", "9GB")
    assert status == 1 and "does not fit" in text
    by_folder = _run(capsys, "--plan", str(config_folder("llama-3.1-8b")), *options)[1]
    assert by_folder.splitlines()[1:] == lines[1:]


def test_the_command_reads_a_gguf_file_and_this_machines_memory(capsys):
    status, text, error = _run(capsys, "--plan", "smollm2", "--dtype", "float16")
    assert status == 0, error
    held = "q4_1" if resolve_device("auto")[0].is_cuda else "float16"
    assert text.startswith("smollm2 in q4_1 on ") and re.search(f"MLPs .* MiB  {held}\n", text)
    text = _run(capsys, "--plan", "smollm2", "--dtype", "float16", "-q", "none")[1]
    assert text.startswith("smollm2 in float16 on ") and "output layer" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--memory", "80GB"), "--memory needs --plan"),
        (("--max-model-len", "8"), "--max-model-len needs --plan"),
        (("--dtype", "float16"), "--dtype needs --plan"),
        (("-q", "int4"), "--quantization needs --plan"),
        (("--speculative-config", "{}"), "--speculative-config needs --plan"),
        (("--plan", "llama-3.1-8b", "--memory", "80"), "--memory must be a size such as 141GB"),
        (("--plan", "llama-3.1-8b", "--memory", "0GB"), "--memory must be a size such as 141GB"),
        (("--plan", "llama-3.1-8b", "--memory", "-1GB"), "expected one argument"),
        (("--plan", "llama-3.1-8b", "--memory", "9GB", "-q", "x"), "quantization must be one of"),
        (("--plan", "llama-3.1-8b", "--memory", "9GB", "--dtype", "x"), "dtype must be one of"),
        (("--plan", "llama-3.1-8b", "--memory", "9GB", "--max-model-len", "0"), "max_model_len"),
        (("--plan", "/no/such/model"), "/no/such/model"),
        (("--plan", ""), "--plan must name a model"),
        (("--plan", "llama-3.1-8b", "--speculative-config", '{"method": "mtp"}'), "got 'mtp'"),
    ],
)
def test_the_command_names_a_bad_option(arguments, message, capsys):
    status, _, error = _run(capsys, *arguments)
    assert status == 2 and message in error and "Traceback" not in error
