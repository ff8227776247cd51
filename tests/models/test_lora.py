"""LoRA adapters of every family: the adapter's logits are those of the merged checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

import engine
from engine.device import to_numpy
from engine.errors import ConfigError
from tests.lora_files import (
    adaptable,
    random_adapter,
    read_tensors,
    write_adapter,
    write_merged,
)
from tests.models.test_golden import CASES, VARIED

RANK = 8


def _load(directory, where="cpu", **options):
    options = {"max_loras": 3, "max_lora_rank": 12} | options
    return engine.load(
        directory, device=where, dtype="float32", progress=False, enable_lora=True, **options
    )


def _logits(model, rows, slots=None):
    cache = model.new_cache(len(rows), len(rows[0]), adapter_slots=slots)
    return to_numpy(model.step(rows, cache, logits="all"))


def _error(got, want):
    return float(np.abs(got - want).max() / want.std())


@pytest.mark.parametrize("case", CASES)
def test_adapter_equals_the_merged_checkpoint(golden, case, where, tmp_path):
    base = golden(case)
    model = _load(base.directory, where)
    tensors = read_tensors(base.directory)
    names = adaptable(model, tensors)
    assert len(names) >= model.config.num_layers
    pairs = random_adapter(names, tensors, RANK, strength=0.1)
    merged = write_merged(tmp_path / "merged", base.directory, pairs, scale=2.0)
    # peft says this of a GPT-2's adapter, whose matrices are stored as all others are.
    options = {"fan_in_fan_out": True} if case.startswith("gpt2") else {}
    folder = write_adapter(tmp_path / "adapter", pairs, RANK, lora_alpha=2 * RANK, **options)
    model.write_adapter(model.read_adapter("one", folder), 1)
    want = _logits(engine.load(merged, device=where, dtype="float32"), [base.prompt])
    got = _logits(model, [base.prompt], [1])
    alone = _logits(model, [base.prompt])
    assert _error(got, want) < 3e-4
    assert _error(alone[0], base.logits) < 1e-4  # the base model is unchanged
    assert _error(want, alone) > 0.05


@pytest.mark.parametrize("case", VARIED)
def test_rows_of_several_adapters(golden, case, where, tmp_path):
    """Each row of a batch has the logits that it has alone, whatever the others' adapters are."""
    base = golden(case)
    model = _load(base.directory, where)
    tensors = load_file(base.directory / "model.safetensors")
    names = adaptable(model, tensors)
    for slot, rank in enumerate((1, 12, 5)):
        # The second one changes only some modules.
        pairs = random_adapter(names[slot % 2 :: 1 + slot % 2], tensors, rank, seed=slot)
        folder = write_adapter(tmp_path / str(slot), pairs, rank)
        model.write_adapter(model.read_adapter(str(slot), folder), slot)
    slots = [2, None, 0, 1, None, 2]
    prompts = [np.roll(base.prompt, row).tolist() for row in range(len(slots))]
    got = _logits(model, prompts, slots)
    for row, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
        assert _error(got[row : row + 1], _logits(model, [prompt], [slot])) < 1e-4


def test_a_slot_is_overwritten_whole(golden, tmp_path):
    base = golden("qwen3")
    model = _load(base.directory)
    tensors = load_file(base.directory / "model.safetensors")
    names = adaptable(model, tensors)
    first = write_adapter(tmp_path / "first", random_adapter(names, tensors, 8), 8)
    second = write_adapter(tmp_path / "second", random_adapter(names[:2], tensors, 2, seed=1), 2)
    model.write_adapter(model.read_adapter("second", second), 1)
    want = _logits(model, [base.prompt], [1])
    model.write_adapter(model.read_adapter("first", first), 0)
    assert _error(_logits(model, [base.prompt], [0]), want) > 0.05
    model.write_adapter(model.read_adapter("second", second), 0)
    assert np.array_equal(_logits(model, [base.prompt], [0]), want)


@pytest.mark.parametrize("slot", [-1, 3, True, None])
def test_an_adapter_is_written_only_to_a_slot_of_the_model(golden, tmp_path, slot):
    base = golden("qwen3")
    model = _load(base.directory)
    tensors = load_file(base.directory / "model.safetensors")
    pairs = random_adapter(adaptable(model, tensors), tensors, RANK)
    adapter = model.read_adapter("one", write_adapter(tmp_path / "one", pairs, RANK))
    for target, count in ((model, 3), (base.load(), 0)):
        with pytest.raises(ConfigError, match=rf"slot must be in \[0, {count}\) .*; got {slot}"):
            target.write_adapter(adapter, slot)
    assert _error(_logits(model, [base.prompt], [2])[0], base.logits) < 1e-4  # not slot -1


def test_deterministic_rows_do_not_depend_on_the_batch(golden, tmp_path):
    base = golden("llama_dynamic")
    model = _load(base.directory, deterministic=True)
    tensors = load_file(base.directory / "model.safetensors")
    names = adaptable(model, tensors)
    folder = write_adapter(tmp_path / "a", random_adapter(names, tensors, 8), 8)
    model.write_adapter(model.read_adapter("a", folder), 0)
    alone = _logits(model, [base.prompt], [0])
    for slots in ([0, 0, None], [None, 0, 0]):
        got = _logits(model, [base.prompt] * 3, slots)
        for row, slot in enumerate(slots):
            assert slot is None or np.array_equal(got[row], alone[0])


def test_slots_of_a_cache_are_checked(golden):
    model = _load(golden("qwen3").directory)
    for slots in ([3], [-1], [0, 0], [True], "0"):
        with pytest.raises(ConfigError, match=r"adapter_slots must be 1 slots in \[0, 3\)"):
            model.new_cache(1, 4, adapter_slots=slots)


def test_a_model_without_slots_reads_no_adapter(golden, tmp_path):
    model = golden("qwen3").load()
    with pytest.raises(ConfigError, match="adapter 'a' needs a model loaded with enable_lora"):
        model.read_adapter("a", tmp_path)
    with pytest.raises(ConfigError, match="adapter_slots needs a model loaded with enable_lora"):
        model.new_cache(2, 4, adapter_slots=[0, None])
    model.new_cache(2, 4, adapter_slots=[None, None])
