"""`python -m tests.bench stages`: what is counted, and the time of a stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

import engine
from engine import kernels
from engine.config import ModelConfig
from engine.kernels._launch import Kernel
from engine.kernels._override.scope import ModelKernels
from engine.llm_engine import LLMEngine
from tests.bench import bench_stages as stages

_DENSE = ModelConfig("llama", 64, 32, 2, 4, 2, 8, 48, 128)
_ENDS = {"embedding": 2, "rmsnorm": 1, "sample": 1}  # and the output layer, a gemm


def _counted(config, form=None, **options):
    model = engine.load(
        config=config, load_format="dummy", device="cpu", dtype="bfloat16", quantization=form
    )
    with stages.counted_launches(), LLMEngine(model, max_num_seqs=1, **options) as served:
        return stages.count_runs(served, 5)


@pytest.mark.parametrize("layers", [2, 3])
def test_five_ops_a_dense_layer(layers):
    config = replace(_DENSE, num_layers=layers, layer_windows=(0,) * layers)
    counts = _counted(config)
    each = {"rmsnorm_gemm": 2 * layers, "attention_decode": layers, "gemm": 2 * layers + 1}
    assert counts.ops == {**_ENDS, **each}
    assert counts.num_ops == 5 * layers + 5 and counts.launches == {}


def test_six_ops_a_layer_of_experts():
    config = replace(
        stages.small_copy(stages.built_in_config("qwen3-30b-a3b")),
        num_layers=2,
        layer_windows=(0, 0),
        max_position_embeddings=128,
    )
    counts = _counted(config)
    moe = ("rmsnorm_moe_route", "moe_gemm", "moe_gemm_combine", "rmsnorm_gemm", "attention_decode")
    assert counts.ops == {**_ENDS, "gemm": 3, **dict.fromkeys(moe, 2)}


def test_ops_taken_apart_are_more_stages():
    fused = _counted(_DENSE)
    with kernels.override(rmsnorm=kernels.rmsnorm):
        apart = _counted(_DENSE)
    ops = {name: number for name, number in apart.ops.items() if "=" not in name}
    assert "rmsnorm_gemm" not in ops and sum(ops.values()) == fused.num_ops + 4


@pytest.mark.parametrize(("name", "form"), stages.MODELS)
def test_small_copies_have_the_models_layers(name, form):
    config = stages.built_in_config(name)
    small = stages.small_copy(config)
    kept = ("num_layers", "model_type", "layer_windows", "qk_norm", "sinks", "activation")
    assert all(getattr(small, key) == getattr(config, key) for key in kept)
    assert (small.moe is None) == (config.moe is None)
    assert small.vocab_size * small.hidden_size < 1 << 20


def test_launches_are_counted_in_the_model_that_makes_them(monkeypatch):
    made = []
    monkeypatch.setattr(Kernel, "launch", lambda self, spec, grid, *_, **__: made.append(grid))
    before = Kernel.launch
    model_kernels = ModelKernels()
    kernel = Kernel("rmsnorm_kernel", "x:ptr")
    with stages.counted_launches():
        kernel.launch(None, (7,), (32,))
        with model_kernels.active():
            for grid in ((1,), (2, 3), (0, 5)):  # an empty grid launches nothing
                kernel.launch(None, grid, (32,))
    assert Kernel.launch is before and made == [(7,), (1,), (2, 3), (0, 5)]
    assert model_kernels.runs == {"rmsnorm_kernel()": 2}


def test_the_time_of_a_stage():
    counts = stages.Counts({"gemm": 3.0, "rmsnorm": 1.0}, {"gemm_kernel()": 5.0})
    timed = {"ms_per_token": 1.0, "weight_GB_per_step": 2.0}
    row = stages.row_of("a model", counts, timed, 2.5)
    assert row["ops a token"] == 4 and row["stages a token"] == 5
    assert row["ms of reading"] == pytest.approx(0.8)  # 2 GB at 2.5 TB/s
    assert row["us a stage"] == pytest.approx(40.0)  # 0.2 ms a token
    assert "us a stage" not in stages.row_of("a model", counts, timed)  # unknown card
    assert "ms a token" not in stages.row_of("a model", counts)
    assert "us a stage 40  gemm_kernel() 5" in stages._line(row)
