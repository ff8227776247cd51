# ruff: noqa: E501 (a row of the table is a line)
"""Deliberate faults, and the tests that must catch them.

`python -m tests.mutants [WORD ...]` copies the tree, applies one fault at a time to the copy and
runs its tests there; with words, only faults whose file or text contains one of them. A surviving
fault means that the suite has lost coverage. Takes about ten minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """A text replacement in a file of `engine/`, and the tests (in `tests/`) that catch it."""

    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    # Mirrors: signs, masks, swapped operands.
    Fault("reference/rmsnorm.py", "real(x_scale) + residual", "real(x_scale) - residual", "kernels/test_rmsnorm.py"),
    Fault("reference/rmsnorm.py", "+ real(weight_offset)", "- real(weight_offset)", "kernels/test_rmsnorm.py"),
    Fault("reference/rope.py", "b * cos + a * sin", "b * cos - a * sin", "kernels/test_rope.py"),
    Fault("reference/rope.py", "-rows[..., half:] if inverse", "rows[..., half:] if inverse", "kernels/test_rope.py"),
    Fault("reference/rmsnorm_backward.py", "(g - normed * np.mean", "(g + normed * np.mean", "kernels/test_rmsnorm_backward.py"),
    Fault("reference/rmsnorm_backward.py", "        g -= np.mean", "        g += np.mean", "kernels/test_rmsnorm_backward.py"),
    Fault("reference/_activation.py", "factor * (1 + 3 * cubic)", "factor * (1 + cubic)", "kernels/test_geglu_backward.py"),
    Fault("reference/_activation.py", "upstream * up * slope(gate)", "upstream * slope(gate)", "kernels/test_swiglu_backward.py"),
    Fault("reference/activation_backward.py", '"gelu": _activation.gelu_erf_slope', '"gelu": _activation.gelu_tanh_slope', "kernels/test_activation_backward.py"),
    Fault("reference/cross_entropy.py", "dtype.type(2 * z_loss)", "dtype.type(z_loss)", "kernels/test_cross_entropy.py"),
    Fault("reference/cross_entropy.py", "    dx[is_ignored] = 0\n", "", "kernels/test_cross_entropy.py"),
    Fault("reference/scale_rows.py", "* factors[:, None]", "* factors[:1, None]", "kernels/test_scale_rows.py"),
    Fault("reference/swiglu.py", "silu(gate.astype(real, copy=False)) * factor", "silu(factor.astype(real, copy=False)) * gate", "kernels/test_swiglu.py"),
    Fault("reference/merge_states.py", "np.exp(lse - base)", "np.exp(base - lse)", "kernels/test_merge_states.py"),
    Fault("reference/moe_combine.py", "        y += z", "        y -= z", "kernels/test_moe_combine.py"),
    Fault("reference/moe_activation_backward.py", "* (1 - sigmoid))", "* (1 + sigmoid))", "kernels/test_moe_activation_backward.py"),
    Fault("reference/moe_route_backward.py", "d = (d - through)", "d = (d + through)", "kernels/test_moe_route_backward.py"),
    Fault("reference/moe_sort.py", ", 0, num_experts - 1)", ", 0, num_experts)", "kernels/test_moe_sort.py"),
    Fault("reference/moe_wgrad.py", 'if gather == "dy"', 'if gather == "x"', "kernels/test_moe_wgrad.py"),
    Fault("reference/moe_route.py", "np.argsort(-ranked", "np.argsort(ranked", "kernels/test_moe_route.py"),
    Fault("reference/moe_route.py", "experts[slots >= 0]", "experts[slots < 0]", "kernels/test_moe_route.py"),
    Fault("reference/lora_shrink.py", "min(end, depth)", "end - _GRAIN", "kernels/test_lora_shrink.py"),
    Fault("reference/lora_expand.py", "            begin = end\n", "", "kernels/test_lora_expand.py"),
    Fault("reference/lora_expand.py", "sums.astype(b.dtype).astype(real)", "sums", "kernels/test_lora_expand.py"),
    Fault("reference/kv_store.py", "v_pages[block, :, offset] = v", "v_pages[block, :, offset] = k", "kernels/test_kv_store.py"),
    Fault("reference/quantize_rows.py", "peak / largest\n", "largest / peak\n", "kernels/test_quantize_rows.py"),
    Fault("reference/gemm.py", "y += residual", "y -= residual", "kernels/test_gemm.py"),
    Fault("reference/_attention.py", "hidden = keys > last", "hidden = keys >= last", "kernels/test_attention_prefill.py"),
    Fault("reference/_attention.py", "keys <= last[:, None] - window", "keys < last[:, None] - window", "kernels/test_attention_prefill.py"),
    Fault("reference/_attention.py", " * wide.type(softcap)\n", "\n", "kernels/test_attention_prefill.py"),
    Fault("reference/attention_backward.py", "delta -= dlse", "delta += dlse", "kernels/test_attention_backward_options.py"),
    Fault("reference/attention_backward.py", "dv, -np.sum(", "dv, np.sum(", "kernels/test_attention_backward_options.py"),
    Fault("reference/attention_backward.py", "key > last - window", "key >= last - window", "kernels/test_attention_backward.py"),
    Fault("reference/attention_backward.py", "seen & pattern_sees", "seen | pattern_sees", "kernels/test_attention_backward_options.py"),
    Fault("reference/_attention.py", "np.uint64(1) == 0", "np.uint64(1) != 0", "kernels/test_attention_decode.py"),
    Fault("reference/embedding_backward.py", "sorted_ids != padding_id", "sorted_ids != -1", "kernels/test_embedding_backward.py"),
    Fault("reference/embedding.py", "token_ids < weight.shape[0]", "token_ids <= weight.shape[0]", "kernels/test_embedding.py"),
    Fault("reference/sample.py", "values / r, values * r", "values * r, values / r", "kernels/test_sample.py"),
    Fault("reference/sample.py", "-= presence", "+= presence", "kernels/test_sample.py"),
    Fault("reference/sample.py", "row[bits == 0]", "row[bits == 1]", "kernels/test_sample.py"),
    # Wrappers: argument checks and forwarding.
    Fault("kernels/gemm/gemm.py", "            residual=residual,\n", "", "kernels/test_gemm.py"),
    Fault("kernels/rmsnorm.py", "subtract_mean=subtract_mean, bias=bias, **numbers", "subtract_mean=subtract_mean, **numbers", "kernels/test_rmsnorm.py"),
    Fault("kernels/_contract.py", "return self.dims.setdefault(symbol, size)", "return size", "kernels/test_rmsnorm.py"),
    Fault("kernels/_contract.py", "not array.flags.writeable", "array is None", "kernels/test_loader.py"),
    # Scheduler: budgets, order, statistics.
    Fault("scheduler/chunks.py", "room = min(room, config.max_prefill_chunk)", "room = max(room, config.max_prefill_chunk)", "scheduler/test_scheduler.py"),
    Fault("scheduler/drafting.py", "request.short_rope_len - request.num_tokens", "config.max_model_len", "scheduler/test_short_rope.py"),
    Fault("scheduler/request_queues.py", " and parent.long_rope == child.needs_long_rope", "", "scheduler/test_short_rope.py"),
    Fault("request.py", "self.short_rope_len + 1", "self.short_rope_len + 2", "scheduler/test_short_rope.py"),
    Fault("runner/prompt_logprobs.py", "if request.long_rope and len", "if not request.long_rope and len", "e2e/test_longrope.py"),
    Fault("model.py", "        self._rotate_anew(cache, num_new)\n", "        cache.rope_offsets = self.decoder.rope_offsets(cache.lengths + num_new)\n", "test_model.py"),
    Fault("scheduler/chunks.py", "start + num_new == request.num_tokens", "start + num_new > request.num_tokens", "scheduler/test_scheduler.py"),
    Fault("scheduler/waiting.py", "self.num_tokens -= entry.num_tokens", "self.num_tokens += entry.num_tokens", "scheduler/test_scheduler.py::test_a_full_queue_rejects_requests"),
    Fault("scheduler/preemption.py", "< recompute_us", "> recompute_us", "scheduler/test_scheduler.py::test_swap_is_chosen_by_cost"),
    # Cache: owners, lost blocks.
    Fault("cache/block_allocator.py", "owners[block] = count - 1", "owners[block] = 0", "cache"),
    Fault("cache/block_allocator.py", "if num_blocks > len(self._free)", "if num_blocks >= len(self._free)", "cache"),
    Fault("cache/block_allocator.py", "self.num_cached += len(cached)", "self.num_cached += 0", "cache"),
    Fault("cache/block_allocator.py", "                    self._put_back(block)\n", "                    pass\n", "cache"),
    Fault("cache/prefix_tree.py", "limit = len(token_ids) // self.block_size\n", "limit = len(token_ids) // self.block_size - 1\n", "cache/test_prefix_tree.py"),
    Fault("cache/prefix_tree.py", "            num_known += is_own_path", "            num_known += 1", "cache/test_prefix_tree.py"),
    # Batches of a step.
    Fault("runner/batch.py", "blocks * block_size + kv_positions % block_size", "blocks * block_size + positions % block_size", "speculative/test_together.py"),
    Fault("runner/batch.py", "last = cu_seqlens[1:] - np.int32(1)", "last = cu_seqlens[1:] - np.int32(2)", "models/test_batch.py e2e/test_llm.py"),
    Fault("runner/batch.py", "sampled_positions=positions[logits_indices] + np.int32(1)", "sampled_positions=positions[logits_indices]", "e2e/test_oracle.py e2e/test_requests.py"),
    # Text, sampling parameters, structured output, drafts.
    Fault("text/stop.py", "-len(match[1]))", "len(match[1]))", "text/test_stop.py"),
    Fault("text/stop.py", "self._longest + 1)", "self._longest + 2)", "text/test_stop.py"),
    Fault("text/detokenizer.py", "self._pending = data[used:]", 'self._pending = b""', "text/test_detokenizer.py"),
    Fault("sampling_params.py", "self.best_of < self.n", "self.best_of <= self.n", "test_sampling_params.py"),
    Fault("sampling_params.py", "max(ids) >= vocab_size", "max(ids) > vocab_size", "test_sampling_params.py"),
    Fault("structured/masks.py", "state.prefix, rules[row]", "state.prefix, 0", "structured/test_shared_masks.py"),
    Fault("structured/references.py", 'step.replace("~1", "/")', "step", "structured/test_json_schema.py"),
    Fault("structured/cases.py", 'self.of(((schema.child("not"), not wanted),))', "[Case()]", "structured/test_json_schema.py"),
    Fault("structured/json_schema.py", "self._has_open_names = True", "pass", "structured/test_json_schema.py"),
    Fault("structured/json_schema.py", "bottom, top = _apart(bottom, top)", "pass", "structured/test_json_schema.py"),
    Fault("server/tool_parsers/call_grammar.py", 'OWN_DOCUMENT: self.parameters}', '"allOf": [self.parameters]}', "server/test_call_grammars.py"),
    Fault("speculative/ngram.py", "ids[end + 1 + depth] == token_id", "ids[end + depth] == token_id", "speculative/test_ngram.py"),
    # Loading.
    Fault("loading/safetensors.py", "return header, 8 + length", "return header, length", "loading/test_safetensors.py"),
    Fault("loading/safetensors.py", "if end != size:", "if end > size:", "loading/test_safetensors.py"),
    Fault("loading/safetensors.py", "else rows[:, slice(*columns)]", "else rows", "loading/test_safetensors.py loading/test_shards.py"),
    Fault("weights/packing.py", "tiles & 15", "tiles & 7", "weights/test_packing.py"),
    Fault("weights/packing.py", "return rows[:num_rows]", "return rows", "weights loading/quantized"),
    # Server: status codes.
    Fault("server/protocol/errors.py", "APIError(429, str(error), headers", "APIError(503, str(error), headers", "server/test_http.py"),
    Fault("server/limits.py", "APIError(413", "APIError(400", "server/test_http.py"),
    Fault("server/limits.py", "APIError(404", "APIError(400", "server/test_http.py server/test_openai_client.py"),
    Fault("server/auth.py", "            401,\n            f", "            403,\n            f", "server/test_http.py"),
)  # fmt: skip


def copied_tree(folder: Path) -> None:
    """Copy the git-tracked files to `folder`."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def is_caught(fault: Fault, folder: Path, when: int) -> bool:
    """Tell whether the fault's tests catch it in the copy of the tree at `folder`."""
    path = folder / "engine" / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.file}: {fault.old!r} must occur once; {text.count(fault.old)}")
    path.write_text(text.replace(fault.old, fault.new))
    os.utime(path, (when, when))  # new mtime, so Python recompiles the file
    try:
        tests = [f"tests/{name}" for name in fault.tests.split()]
        options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", "--timeout=120"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(text)
        os.utime(path, (when + 1, when + 1))
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{fault}: the tests did not run:\n{done.stdout[-2000:]}")
    return done.returncode == 1


def main(words: list[str]) -> int:
    chosen = [f for f in FAULTS if not words or any(w in " ".join(f[:3]) for w in words)]
    num_survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copied_tree(Path(folder))
        for index, fault in enumerate(chosen):
            start = time.monotonic()
            caught = is_caught(fault, Path(folder), int(time.time()) + 10 * index)
            num_survived += not caught
            verdict = "caught" if caught else "SURVIVED"
            change = f"{fault.old.strip()} -> {fault.new.strip() or '(nothing)'}"
            print(
                f"{verdict:8} {time.monotonic() - start:4.0f} s {fault.file}: {change}", flush=True
            )
    print(f"{len(chosen) - num_survived} of {len(chosen)} faults caught")
    return 1 if num_survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
