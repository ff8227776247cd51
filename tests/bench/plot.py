"""`python -m tests.bench.plot [NAME ...]`: draw the figures of docs/benchmarks from their data.

Each shows our results, the peers' and the hardware limit. Without names, all are drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.bench.figure import FOLDER, Bars, Lines, Picture, Roofline, draw

# NVIDIA H200 datasheet: dense tensor-core rate, memory bandwidth.
_BF16, _E4M3 = 989.0, 1979.0  # TFLOP/s
_HBM = 4800.0  # GB/s
_H100_HBM = 3350.0  # GB/s, an H100's
_SHORT = {"qwen3-8b": "8B", "qwen2.5-0.5b": "0.5B", "qwen3-0.6b": "0.6B", "llama-1b": "L-1B"}


def _load(stem: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((FOLDER / f"{stem}.json").read_text())
    return record


def _source(record: dict[str, Any], commit: str | None = None) -> str:
    return f"{record['card']}, {record['date']}, commit {commit or record['commit']}"


def _layer(row: dict[str, Any]) -> str:
    model, _, layer = row["layer"].partition(" ")
    return f"{_SHORT.get(model, model)} {layer} ({row['n']}, {row['k']})".replace("  ", " ")


def _gemm_bound_us(row: dict[str, Any]) -> float:
    """Return the time of a GEMM at the roofline: pure compute or one pass over the operands."""
    m, n, k = row["m"], row["n"], row["k"]
    return max(2 * m * n * k / _BF16 * 1e-6, 2 * (m * k + n * k + m * n) / _HBM * 1e-3)


def _gemm_sm90() -> Picture:
    record = _load("gemm_sm90")
    panels = []
    for m in (256, 1024, 4096, 8192):
        rows = [row for row in record["rows"] if row["m"] == m and row["layer"] != "lm_head"]

        def rate(key: str, rows: list[Any] = rows) -> list[float]:
            return [2e-6 * r["m"] * r["n"] * r["k"] / r[key] for r in rows]

        bound = [2e-6 * r["m"] * r["n"] * r["k"] / _gemm_bound_us(r) for r in rows]
        panels.append(
            Bars(
                f"{m:,} rows",
                "TFLOP/s",
                [_layer(row) for row in rows],
                {"ours": rate("overlap_us"), "cuBLAS": rate("cublas_us")},
                ("tensor cores (989 TFLOP/s) or memory (4.8 TB/s)", bound),
            )
        )
    return Picture("Products of many rows, bfloat16", _source(record), panels, 4, 4.0,
                   shared_cases=True)  # fmt: skip


def _make_it_fast() -> Picture:
    record = _load("make_it_fast")
    rows = {row["name"]: row for row in record["rows"]}
    cases = ("naive", "vectorised", "tiled", "mma", "tma", "kernels.gemm", "cuBLAS")
    panel = Bars(
        "versions of one product, 4,096 x 4,096 x 4,096",
        "TFLOP/s",
        cases,
        {
            "ours": [rows[name]["tflops"] if name != "cuBLAS" else None for name in cases],
            "cuBLAS": [rows[name]["tflops"] if name == "cuBLAS" else None for name in cases],
        },
        (
            "predicted from bytes and operations; libraries: tensor cores, 989 TFLOP/s",
            [rows[name].get("predicted", _BF16) for name in cases],
        ),
        log=True,
        digits=".3g",
    )
    return Picture("The course, chapter 6, bfloat16", _source(record), [panel], 1, 3.0)


def _gemm_skinny() -> Picture:
    record = _load("gemm_skinny")["bars_dc0106f"]
    panels = []
    for m in (1, 16, 64):
        rows = [row for row in record["rows"] if row["m"] == m]

        def rate(key: str, rows: list[Any] = rows) -> list[float]:
            return [2e-6 * (r["m"] * (r["n"] + r["k"]) + r["n"] * r["k"]) / r[key] for r in rows]

        panels.append(
            Bars(
                f"{m} row{'s' * (m > 1)}",
                "TB/s of operands",
                [_layer(row) for row in rows],
                {
                    "ours": rate("overlap_us"),
                    "ours, pdl=False": rate("alone_us"),
                    "cuBLAS": rate("cublas_us"),
                },
                ("memory, 4.8 TB/s", _HBM / 1e3),
                digits=".2f",
            )
        )
    return Picture("Products of few rows, bfloat16", _source(record), panels, 3, 5.0,
                   shared_cases=True)  # fmt: skip


def _attention_case(row: dict[str, Any]) -> str:
    found = re.search(r"B(\d+) H(\d+)(/\d+)? D(\d+) S(\d+) (full|causal)", row["case"])
    assert found, row["case"]
    batch, heads, kv_heads, dim, length, mask = found.groups()
    if kv_heads and kv_heads != f"/{heads}":
        heads += kv_heads
    return f"{batch}, {heads}, {dim}, {int(length):,} {mask}"


def _peer_rate(rows: list[dict[str, Any]], peer: str) -> list[float | None]:
    return [r["TFLOP/s"] * r["us"] / r[f"{peer} us"] if f"{peer} us" in r else None for r in rows]


def _attention_prefill() -> Picture:
    record = _load("attention_prefill_sm90")
    rows = [row for row in record["rows"] if "cudnn us" in row]
    third = {r["case"]: r["flash3 TFLOP/s"] for r in record["peers_2026_11_21"]["rows"]}
    panel = Bars(
        "batch, heads, head dim, tokens, mask",
        "TFLOP/s of Q Kᵀ and P V (causal: half of the square)",
        [_attention_case(row) for row in rows],
        {
            "ours": [row["TFLOP/s"] for row in rows],
            "cuDNN": _peer_rate(rows, "cudnn"),
            "FlashAttention-3 (2026-11-21)": [third.get(row["case"]) for row in rows],
            "FlashAttention-2": _peer_rate(rows, "flash2"),
        },
        ("tensor cores, 989 TFLOP/s", _BF16),
    )
    return Picture("attention_prefill, bfloat16", _source(record), [panel], 1, 5.2)


def _attention_prefill_fp8() -> Picture:
    record = _load("attention_prefill_fp8")
    rows = record["rows"]
    panel = Bars(
        "batch, heads, head dim, tokens, mask",
        "TFLOP/s of Q Kᵀ and P V (causal: half of the square)",
        [_attention_case(row) for row in rows],
        {
            "ours": [row["TFLOP/s"] for row in rows],
            "ours, bfloat16": _peer_rate(rows, "bfloat16"),
            "cuDNN, bfloat16": _peer_rate(rows, "cudnn"),
            "FlashAttention-2, bfloat16": _peer_rate(rows, "flash2"),
        },
        ("tensor cores, e4m3, 1,979 TFLOP/s", _E4M3),
    )
    return Picture("attention_prefill_fp8, e4m3", _source(record), [panel], 1, 4.0)


def _attention_backward() -> Picture:
    record = _load("attention_backward")
    free = {r["case"]: r["TFLOP/s"] for r in record["rows"]}
    rows = [row for row in record["rows"] if not row["case"].endswith("any order")]
    panel = Bars(
        "batch, heads, head dim, tokens, mask",
        "TFLOP/s of five products (causal: half of the square)",
        [_attention_case(row) for row in rows],
        {
            "ours": [row["TFLOP/s"] for row in rows],
            "ours, deterministic=False": [free[f"{row['case']} any order"] for row in rows],
            "cuDNN": _peer_rate(rows, "cudnn"),
            "FlashAttention-2": _peer_rate(rows, "flash2"),
        },
        ("tensor cores, 989 TFLOP/s", _BF16),
    )
    return Picture("attention_backward, bfloat16", _source(record), [panel], 1, 5.0)


def _torch_ops() -> Picture:
    record = _load("torch_ops")
    panels = []
    for model in ("100M", "1B", "8B"):
        rows = [row for row in record["rows"] if row["model"] == model]
        ops = list(dict.fromkeys(row["op"] for row in rows))

        def ratios(name: str, rows: list[Any] = rows, ops: list[str] = ops) -> list[float | None]:
            found = {row["op"]: row["ratio"] for row in rows if row["pass"] == name}
            return [found.get(op) for op in ops]

        parts = {f"ours, {name}": ratios(name) for name in ("forward", "backward")}
        series = {"ours": ratios("both"), **parts}
        panel = Bars(model, "times torch.compile's speed", ops, series, ("torch.compile", 1.0))
        panels.append(replace(panel, digits=".1f"))
    return Picture("operators of PyTorch, 16,384 tokens, bfloat16", _source(record), panels, 3, 6.0)


def _attention_decode() -> Picture:
    record = _load("attention_decode")
    ours = {r["case"]: r["GB/s"] for r in record["rows"] if r["version"] == "09bf3f6"}
    same = {r["case"]: r for r in record["peers_2026_11_22"]["rows"]}
    other = {r["case"]: r for r in record["peers_2026_11_21"]["rows"]}
    contexts, tokens = (1024, 4096, 16384), (1, 2, 4, 8)

    def panel(title: str, x_name: str, x: tuple[int, ...], cases: list[str]) -> Lines:
        series: dict[str, list[float | None]] = {"ours": [ours.get(case) for case in cases]}
        for name, key in (("cuDNN", "cudnn"), ("FlashAttention-2", "flash2")):
            series[f"{name}, dense keys"] = [same[case].get(f"{key} GB/s") for case in cases]
        if x is contexts:
            for name, key in (("FlashAttention-3", "flash3"), ("FlashInfer", "flashinfer")):
                series[f"{name} (2026-11-21)"] = [other[case][f"{key} GB/s"] for case in cases]
        return Lines(title, "GB/s of K and V", x_name, x, series, ("memory, 4,800 GB/s", _HBM))

    panels = [
        panel(f"{b} sequence{'s' * (b > 1)}, 1 query token", "keys of a sequence", contexts,
              [f"B{b} ctx{n} Q1" for n in contexts])
        for b in (1, 16, 64, 128)
    ]  # fmt: skip
    panels += [
        panel(f"{b} sequence{'s' * (b > 1)} of 4,096 keys", "query tokens", tokens,
              [f"B{b} ctx4096 Q{n}" for n in tokens])
        for b in (1, 16)
    ]  # fmt: skip
    source = _source(record, "09bf3f6, pages of 16 tokens; dense peers: beside 565290c that day")
    return Picture("attention_decode, bfloat16, 32/8 heads of 128", source, panels, 3, 2.7)


def _mla_decode() -> Picture:
    record = _load("mla_decode")
    rows = {row["case"]: row for row in record["rows"]}
    batches = (1, 16, 32, 64, 128)

    def panel(heads: int, unit: str, limit: tuple[str, float], published: float) -> Lines:
        cases = [rows.get(f"B {n}, 4096 keys, H {heads}, Q 1", {}) for n in batches]
        series: dict[str, list[float | None]] = {"ours": [row.get(unit) for row in cases]}
        series["ours, any chip"] = [
            row[unit] * row["us"] / row["portable us"] if "portable us" in row else None
            for row in cases
        ]
        if published:
            series["FlashMLA, published (H800)"] = [published if row else None for row in cases]
        title = f"{heads} query heads, 4,096 keys"
        return Lines(title, unit, "sequences", batches, series, limit)

    memory = (f"memory, {record['peak GB/s']:,} GB/s", record["peak GB/s"])
    panels = [
        panel(16, "GB/s", memory, 0),
        panel(64, "GB/s", memory, 0),
        panel(128, "TFLOP/s", ("tensor cores, 989 TFLOP/s", _BF16), record["FlashMLA TFLOP/s"]),
    ]
    title = "mla_decode, bfloat16, latents of 512 + 64"
    return Picture(title, _source(record), panels, 3, 2.9)


def _moe_gemm() -> Picture:
    record = _load("moe_gemm")
    panels = []
    for part, title in (
        ("layer", "a layer of experts without its router's product"),
        ("gate_up", "gate and up"),
        ("down", "down"),
    ):
        rows = [row for row in record["rows"] if row["case"].startswith(part)]
        floor = [max(r["GB/s"] / _HBM, r["TFLOP/s"] / _BF16) * r["us"] for r in rows]
        tokens = [int(row["case"].partition("=")[2]) for row in rows]
        series = {name: [row[key] for row in rows] for name, key in _MOE_SERIES.items()}
        cases = [f"{count:,} token{'s' * (count > 1)}" for count in tokens]
        limit = ("memory (4.8 TB/s) or tensor cores (989 TFLOP/s)", floor)
        panels.append(Bars(title, "us, less is better", cases, series, limit, log=True))
    return Picture("Experts of Qwen3-30B-A3B, bfloat16", _source(record), panels, 3, 3.6,
                   shared_cases=True)  # fmt: skip


_MOE_SERIES = {"ours": "us", "torch grouped product": "torch us", "Triton": "triton us"}


def _shared_prefix() -> Picture:
    record = _load("shared_prefix")
    rows = [row for row in record["rows"] if row["op"] == "shared_prefix"]
    cases = []
    for row in rows:
        batch, prefix, own, queries = map(int, re.findall(r"\d+", row["case"]))
        cases.append(f"{batch} x ({prefix:,} + {own}), {queries} token{'s' * (queries > 1)}")
    panel = Bars(
        "requests x (common keys + own keys), query tokens",
        "us, less is better",
        cases,
        {"ours": [r["us"] for r in rows], "ours, without sharing": [r["decode us"] for r in rows]},
        ("its bytes at 4.8 TB/s", [r["GB/s"] * r["us"] / _HBM for r in rows]),
        log=True,
    )
    return Picture("Decoding behind a shared prefix, bfloat16", _source(record), [panel], 1, 3.2)


_SAMPLED = {
    "greedy": "greedy",
    "top_k_top_p": "top_k 50, top_p 0.9",
    "cool_top_p": "temperature 0.6, top_p 0.95",
    "top_p_90": "top_p 0.9",
    "plain": "no filter",
    "cool_top_p, logits x 3": "logits x 3, temperature 0.6, top_p 0.95",
}
_SMALL = re.compile(r"^\(1, 1024\)|^\(64, 4096\)|^\(1, 4864\)|^\(64, 4864\)|T (1|64),")


def _sample_elementwise() -> Picture:
    record = _load("sample_elementwise")
    rows = [row for row in record["rows"] if row["op"] != "sample"]

    def name(row: dict[str, Any]) -> str:
        return f"{row['op']} {row['case']}".replace(", D 128", "").replace(" with residual", "")

    small = [row for row in rows if _SMALL.search(row["case"])]
    large = [row for row in rows if row["GB/s"] > 2700]

    def best(row: dict[str, Any], key: str) -> float:
        return row.get(f"fbe39b8 {key}", row[key])

    peers = [r.get("take us") for r in small]
    panels = [
        Bars("one row or 64: latency", "us, less is better", [name(r) for r in small],
             {"ours": [best(r, "us") for r in small],
              "ours, separate ops": [r.get("separate ops us") for r in small],
              "CuPy take()": peers},
             ("an empty node of a graph, 0.98 us", 0.98), digits=".2f"),
        Bars("many rows: bandwidth", "GB/s", [name(r) for r in large],
             {"ours": [best(r, "GB/s") for r in large],
              "ours, separate ops": [r["GB/s"] * r["us"] / r["separate ops us"]
                                     if "separate ops us" in r else None for r in large],
              "CuPy take()": [r["GB/s"] * r["us"] / r["take us"] if "take us" in r else None
                              for r in large]},
             ("memory, 4,800 GB/s", _HBM)),
    ]  # fmt: skip
    drawn = [r for r in record["rows"] if r["op"] == "sample" and "151936)" in r["case"]]
    panels += [
        Bars(f"sample, {rows_} row{'s' * (rows_ > 1)} of 151,936 logits", "us, less is better",
             [_SAMPLED[r["case"].split(") ")[1]] for r in part], {"ours": [r["us"] for r in part]},
             ("logits read once at 4.8 TB/s", 4 * 151936 * rows_ / _HBM * 1e-3), digits=".1f")
        for rows_ in (1, 128)
        if (part := [r for r in drawn if r["case"].startswith(f"({rows_},")])
    ]  # fmt: skip
    source = _source(record, f"{record['commit']}; other commits: in the data")
    return Picture("Sampling and the ops around the products, bfloat16", source, panels, 2, 3.2)


def _host() -> Picture:
    record = _load("host")
    rows = {r["case"]: r for r in record["rows"]}
    kinds = {
        "ids at the end": "decode, final output only 256",
        "text at the end": "decode, final output only, text at the end 256",
        "4 end and 4 begin a step": "decode, 4 come and go a step 256",
        "streamed as ids": "decode, deltas 256",
        "streamed as text": "decode, deltas with text 256",
    }
    sizes = (1, 16, 64, 256)
    device = next(
        row for row in _load("gemm_sm90")["in_a_step_2026_11_22"]["rows"]
        if row["model"] == "qwen3-0.6b" and row["sequences"] == [16, 32, 64, 256]
    )  # fmt: skip
    step = 1e3 * device["rehearsed"][-1]
    panels = [
        Bars("256 decodes, by what is handed out", "us a step, less is better", list(kinds),
             {"ours": [rows[case]["median us"] for case in kinds.values()]},
             ("the device's step, Qwen3-0.6B, 256 sequences", step)),
        Bars("ids at the end, by running requests", "us a step, less is better",
             [str(n) for n in sizes],
             {"ours": [rows[f"decode, final output only {n}"]["median us"] for n in sizes]}),
    ]  # fmt: skip
    return Picture("What the host does in a step", _source(record), panels, 2, 2.4)


def _swap() -> Picture:
    record = _load("swap")
    rows = [row for row in record["rows"] if row["op"] == "swap"]
    packed = [row for row in record["rows"] if row["op"] == "kv_swap"]
    panels = [
        Bars("pages to host memory and back", "GB/s",
             [row["case"].replace(" blocks", "") for row in rows],
             {"ours": [row["GB/s"] for row in rows]},
             ("the link: one plain copy", [row["link GB/s"] for row in rows]), digits=".1f"),
        Bars("the packing kernel alone", "GB/s read and written",
             [row["case"].replace(" blocks, K 8, D 128", "").replace(" layers,", " layers x")
              for row in packed],
             {"ours": [row["GB/s"] for row in packed],
              "CuPy's indexing": [r["GB/s"] * r["us"] / r["indexing us"] for r in packed]},
             ("memory, 4,800 GB/s", _HBM)),
    ]  # fmt: skip
    return Picture("Swapping pages, bfloat16", _source(record), panels, 2, 3.0)


def _decode_loop() -> Picture:
    record = _load("decode_loop")
    beside = record["beside_vllm_2026_11_23"]
    now = {row["model"]: dict(row) for row in beside["rows"]}
    for row in beside["ours_alone"]:
        now.setdefault(row["model"], {}).update(row)
    before = {row["model"]: row for row in record["peers_2026_11_21"]["rows"]}
    limits = {row["model"]: row for row in record["limits"]["rows"]}
    models = ["qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b"]

    def panel(title: str, unit: str, key: str, models: list[str], digits: str) -> Bars:
        series = {
            "ours": [now[m].get(key) for m in models],
            "vLLM": [now[m].get(f"vllm_{key}", before[m].get(f"vllm_{key}")) for m in models],
            "llama.cpp": [before[m].get(f"llama_cpp_{key}") for m in models],
            "transformers": [before[m].get(f"transformers_{key}") for m in models],
        }
        series = {name: values for name, values in series.items() if any(values)}
        bound = ("weights, keys and products at their limits", [limits[m][key] for m in models])
        return Bars(title, unit, models, series, bound, digits=digits)

    pair = ["qwen3-0.6b", "llama-3.1-8b"]
    panels = [
        panel("one request", "ms a token, less is better", "ms_per_token", models, ".2f"),
        panel("256 requests", "output tokens/s", "output_tokens_per_s", pair, ".0f"),
        panel("16 prompts of 4,096", "prompt tokens/s", "prompt_tokens_per_s", pair, ".0f"),
    ]
    source = f"{_source(beside)}; peers of other models and llama.cpp: 2026-11-21"
    return Picture("Whole models, bfloat16", source, panels, 3, 2.9)


def _decode_batches() -> Picture:
    record = _load("decode_loop")
    swapped, packed = record["swapped_tiles_2026_11_29"], record["packed_products_2026_11_28"]
    rows = [*swapped["steps"]["rows"], *packed["steps"]["rows"]]

    def panel(form: str) -> Bars:
        found = [r for r in rows if r[:2] == ["llama-3.1-8b", form] and 8 <= r[2] <= 64]
        series = {"ours": [row[5] for row in found], "ours, before": [row[4] for row in found]}
        cases = [f"{row[2]} requests" for row in found]
        return Bars(form, "ms a step, less is better", cases, series, digits=".2f")

    source = f"{_source(swapped)}; int4_g128: {packed['date']}, {packed['commit']}"
    title = "Steps of 8 to 64 requests, Llama-3.1-8B, 640 keys"
    panels = [panel(form) for form in ("bfloat16", "fp8", "int8", "int4_g128")]
    return Picture(title, source, panels, 4, 2.9)


def _all_reduce() -> Picture:
    record = _load("all_reduce")
    rows = [row for row in record["rows"] if row["op"] == "all_reduce"]
    small, large = [[r for r in rows if (r["bytes"] <= 1 << 20) == is_small] for is_small in (1, 0)]
    keys = {"ours": "one_shot us", "ours, in two shots": "two_shot us", "NCCL": "NCCL us"}
    panels = [
        Bars(title, "us, less is better", [r["case"] for r in part],
             {name: [r[key] for r in part] for name, key in keys.items()},
             ("the link: 450 GB/s", [r["bytes"] / 450e3 for r in part]), log=is_log, digits=".1f")
        for title, part, is_log in (("to 1 MB", small, False), ("2 MB and more", large, True))
    ]  # fmt: skip
    return Picture("Sum over two GPUs, bfloat16", _source(record), panels, 2, 3.0)


def _sent_rows() -> Picture:
    record = _load("all_reduce")["sent_rows"]
    rows, limits = [], []
    for row in record["rows"]:
        form, _, shape = row["case"].split(" ", 2)
        m, n, k = map(int, re.findall(r"\d+", shape))
        if m in (2048, 8192):
            rows.append(row)
            rate = _E4M3 if form == "fp8" else _BF16
            limits.append(max(2e-6 * m * n * k / rate, 2 * m * n / 450e3))
    names = [re.sub(r"\((\d+).*", r"\1", row["case"]) for row in rows]
    series = {"ours": [row["us"] for row in rows]}
    series["ours, in turn"] = [row["in turn us"] for row in rows]
    panel = Bars("", "us, less is better", names, series, ("tensor cores or the link", limits))
    title = "A product, and its sum over two GPUs: Llama-3.1-8B, layer and rows"
    return Picture(title, f"{record['card']}, {record['date']}", [panel], 1, 3.4)


def _deterministic() -> Picture:
    record = _load("deterministic")
    steps = record["steps_in_parts_2026_11_30"]["rows"]
    attention = record["few_tokens_2026_11_29"]["rows"]
    int4 = record["int4_steps_2026_11_30"]["rows"]
    panels = [
        Bars("a decode step", "ms, less is better",
             [f"{model}, {n} after {prompt:,} tokens" for model, n, prompt, _, _ in steps],
             {"ours": [row[3] for row in steps],
              "ours, deterministic=True": [row[4] for row in steps]}, log=True, digits=".2f"),
        Bars("attention", "us, less is better",
             [f"{n} request{'s' * (n > 1)}, {keys:,} keys" for n, keys, *_ in attention],
             {"ours": [row[2] for row in attention],
              "ours, deterministic=True": [row[5] for row in attention],
              "ours, before": [row[3] for row in attention]}, log=True, digits=".1f"),
        Bars("a step of the 8B in int4", "ms, less is better",
             [f"{row[0]} request{'s' * (row[0] > 1)}" for row in int4],
             {"ours": [row[1] for row in int4],
              "ours, deterministic=True": [row[3] for row in int4],
              "ours, before": [row[2] for row in int4]}, digits=".2f"),
    ]  # fmt: skip
    source = f"{record['card']}, 2026-11-30, attention 2026-11-29"
    return Picture("What deterministic=True costs", source, panels, 3, 4.6)


def _intensities(stem: str, peer: str | None = None) -> list[tuple[float, float]]:
    """Return (operations per byte, TFLOP/s) for a file's cases, of ours or a peer."""
    points = []
    for row in _load(stem)["rows"]:
        if "TFLOP/s" in row and (peer is None or f"{peer} us" in row):
            rate = row["TFLOP/s"] * (1 if peer is None else row["us"] / row[f"{peer} us"])
            points.append((row["TFLOP/s"] / row["GB/s"] * 1e3, rate))
    return points


def _roofline() -> Picture:
    decode = _load("attention_decode")
    group = 4  # query heads per key/value head: operations per byte for one query token
    decoding = []
    for row in decode["rows"]:
        if row["version"] == "09bf3f6" and "splits" not in row["case"]:
            intensity = group * int(row["case"].rpartition("Q")[2])
            decoding.append((intensity, intensity * row["GB/s"] * 1e-3))
    panel = Roofline(
        "every case of the four pages",
        {
            "ours: decoding": decoding,
            "ours: forward": _intensities("attention_prefill_sm90"),
            "ours: backward": _intensities("attention_backward"),
            "ours: forward, e4m3": _intensities("attention_prefill_fp8"),
            "cuDNN: forward": _intensities("attention_prefill_sm90", "cudnn"),
            "cuDNN: backward": _intensities("attention_backward", "cudnn"),
        },
        [("4.8 TB/s; bfloat16, 989 TFLOP/s", _BF16), ("e4m3, 1,979 TFLOP/s", _E4M3)],
        _HBM / 1e3,
    )
    source = "NVIDIA H200, 2026-11-22; commits: on the four pages"
    return Picture("Attention under the card's roofs", source, [panel], 1, 4.4)


def _quantization() -> Picture:
    record = _load("quantization")
    first, *rows = record["rows"]
    base = next(row for row in record["rows"] if row["format"] == "bfloat16")
    names = [row["format"] for row in record["rows"]]
    beside = [100 * (row["perplexity"] / base["perplexity"] - 1) for row in record["rows"]]
    kl = [1e3 * row["kl_mean"] for row in rows]
    panels = [
        Bars("perplexity beside bfloat16", "%, less is better", names, {"ours": beside},
             digits=".3f"),
        Bars(f"KL divergence from {first['format']}", "0.001 nats, less is better", names,
             {"ours": [None, *kl]}, log=max(kl) > 30 * min(kl), digits=".2f"),
        Bars("another most probable token", "% of the tokens, less is better", names,
             {"ours": [None, *(100 * (1 - row["top1_agreement"]) for row in rows)]},
             digits=".2f"),
    ]  # fmt: skip
    height = 1.2 + 0.22 * len(names)
    return Picture("What formats of weights cost, SmolLM2-135M", _source(record), panels, 3, height,
                   shared_cases=True)  # fmt: skip


def _numerics(stem: str) -> Picture:
    record = _load(stem)
    rows = [
        row
        for row in record["rows"]
        if row["implementation"] == "ours" and row["mode"] == "1 request" and "ratio" in row
    ]
    cases = [f"{row['model']}, {row['path']}" for row in rows]
    panels = [
        Bars(title, "of transformers' distance, less is better", cases,
             {"ours": [row["ratio"][metric] for row in rows]},
             ("transformers in bfloat16", 1.0), digits=".2f")
        for title, metric in (
            ("logits, relative RMS error", "rms"),
            ("KL divergence, mean", "kl_mean"),
            ("KL divergence, median", "kl_median"),
        )
    ]  # fmt: skip
    return Picture("Distance from float64, decode steps of one request", _source(record), panels, 3,
                   1.2 + 0.2 * len(cases), shared_cases=True)  # fmt: skip


def _whole_models() -> Picture:
    record = _load("whole_models")

    def panel(card: str, title: str, unit: str, key: str, digits: str) -> Bars:
        rows = [row for row in (record["h200"] if card == "H200" else record)["rows"] if key in row]
        series = {
            "ours": [row[key] for row in rows],
            "vLLM": [row.get(f"vllm_{key}") for row in rows],
        }
        cases = [f"{row['model']}, {row['weights']}" for row in rows]
        return Bars(f"{title}, {card}", unit, cases, series, digits=digits)

    panels = [
        panel(card, *what)
        for card in ("H100", "H200")
        for what in (
            ("one request", "ms a token, less is better", "ms_per_token", ".2f"),
            ("256 requests", "output tokens/s", "output_tokens_per_s", ".0f"),
            ("16 prompts of 4,096", "prompt tokens/s", "prompt_tokens_per_s", ".0f"),
        )
    ]
    source = f"{_source(record)}; {_source(record['h200'])}"
    return Picture("Whole models beside vLLM 0.24", source, panels, 3, 3.6)


def _hybrid_model() -> Picture:
    record = _load("hybrid_model")
    rows = {row["case"]: row for row in record["rows"]}
    former = {row["case"]: row for row in record["former"]["rows"]}

    def beside(title: str, unit: str, case: str, key: str, digits: str,
               limit: tuple[str, float] | None = None) -> Bars:  # fmt: skip
        series = {
            "ours": [rows[case][key], former[case][key]],
            "vLLM": [record["vllm"][key], None],
        }
        return Bars(title, unit, [record["commit"], record["former"]["commit"]], series, limit,
                    digits=digits)  # fmt: skip

    def kernels(title: str, case: str) -> Bars:
        step = rows[case]
        ms = {name: step[f"{name} us"] * step[f"{name} a step"] / 1e3
              for key in step if (name := key.removesuffix(" a step")) != key
              and f"{name} us" in step and not name.startswith("Memcpy")}  # fmt: skip
        names = sorted(ms, key=lambda name: -ms[name])[:10]
        return Bars(title, "ms, all launches of a kernel", names,
                    {"ours": [ms[name] for name in names]}, digits=".2f")  # fmt: skip

    floor = sum(record["floor"]["one request, GB a step"].values()) * 1e3 / _H100_HBM
    panels = [
        beside("one request", "ms a token, less is better", "latency", "ms_per_token", ".2f",
               ("bytes at 3.35 TB/s", floor)),
        beside("256 requests", "output tokens/s", "throughput", "output_tokens_per_s", ".0f"),
        beside("16 prompts of 4,096", "prompt tokens/s", "prefill", "prompt_tokens_per_s", ".0f"),
        kernels("a step of one request", "decode 1 x 500"),
        kernels("a step of 256 requests", "decode 256 x 500"),
        kernels("a step of 8,192 prompt tokens", "prefill step"),
    ]  # fmt: skip
    title = "Qwen3.6-35B-A3B's shape in fp8 blocks, beside vLLM 0.24"
    return Picture(title, _source(record), panels, 3, 2.9, 14.0)


def _answer_formats() -> Picture:
    record = _load("answer_formats")
    rates = {row["case"]: row["tokens/s"] for row in record["rows"]}
    bound = ("98 % of plain", 0.98 * max(rates.values()))
    panel = Bars("a server of gpt-oss-20b's shape", "tokens/s", list(rates),
                 {"ours": list(rates.values())}, bound)  # fmt: skip
    return Picture("Answers read as harmony and as plain text", _source(record), [panel], 1, 1.4)


def _sleep() -> Picture:
    record = _load("sleep")
    copies = [row for row in record["rows"] if "% of link" in row]
    link = [100 * row["GB/s"] / row["% of link"] for row in copies]
    adapters = [row for row in record["rows"] if "median_step_ms" in row]
    panels = [
        Bars("weights to the host and back", "GB/s", [row["case"] for row in copies],
             {"ours": [row["GB/s"] for row in copies]}, ("the link: one plain copy", link),
             digits=".1f"),
        Bars("an adapter while 64 requests decode", "ms, less is better",
             [row["case"].partition(",")[0] for row in adapters],
             {"ours": [row["ms"] for row in adapters],
              "ours, longest step meanwhile": [
                  row["longest_step_while_read_ms"] for row in adapters],
              "ours, median step before": [row["median_step_ms"] for row in adapters]}),
    ]  # fmt: skip
    return Picture("Sleep and adapters, an 8B model in bfloat16", _source(record), panels, 2, 2.6)


def _lora() -> Picture:
    record, of_kernels = _load("lora"), _load("lora_kernels")
    cases = [
        f"{count} of {matrices}"
        for matrices in ("q, k and v", "all matrices")
        for count in ("1 adapter", "16 adapters")
    ]

    def of_engine(title: str, work: str, seconds: Callable[[dict[str, Any]], float]) -> Bars:
        found = {row["case"]: seconds(row) for row in record["rows"] if row["case"][:4] == work[:4]}
        series = {
            label: [
                100 * found[f"{work}, {dtype}, {case.replace('1 adapter ', '1 adapters ')}"]
                / found[f"{work}, {dtype}, no adapter"] - 100
                for case in cases
            ]
            for label, dtype in (
                ("ours", "bfloat16"),
                ("ours, fp8", "fp8"),
                ("ours, int4", "int4"),
            )
        }  # fmt: skip
        limit = ("10 %", 10.0)
        return Bars(title, "% more time, less is better", cases, series, limit, digits=".1f")

    def of_kernel(op: str) -> Bars:
        rows = [row for row in of_kernels["rows"] if row["op"] == op]
        series = {"ours": [row["GB/s"] for row in rows]}
        limit = ("memory, 3,350 GB/s", _H100_HBM)
        return Bars(f"{op}, H100", "GB/s", [row["case"] for row in rows], series, limit)

    panels = [
        of_engine("64 requests decode", "decode", lambda row: row["ms_per_token"]),
        of_engine("16 prompts of 2,048", "prefill", lambda row: 1 / row["prompt_tokens_per_s"]),
        of_kernel("lora_shrink"),
        of_kernel("lora_expand"),
    ]
    return Picture("LoRA adapters of rank 16, an 8B model in bfloat16 unless named",
                   _source(record), panels, 2, 2.6, 11.0)  # fmt: skip


def _gated_delta() -> Picture:
    record = _load("gated_delta")
    prefill = record["prefill"]
    cases = ["1 x 4096", "1 x 16384", "32 x 512", "16 x 4096"]
    rows = {row["case"]: row for row in prefill["rows"]}
    steps = {row["batch"]: row["us"] for row in record["decode_h200"]["rows"][:4]}
    state_mb = 2 * 16 * 128 * 128 * 2 / 1e6
    panels = [
        Bars("prompts, 16 and 32 heads", "tokens per us", cases,
             {"ours": [_tokens(case) / rows[case]["us"] for case in cases],
              "flash-linear-attention": [_tokens(case) / rows[case]["fla_us"] for case in cases]},
             digits=".1f"),
        Bars("decode steps, 8 and 16 heads", "GB/s of states", [str(n) for n in steps],
             {"ours": [n * state_mb / us * 1e3 for n, us in steps.items()]},
             ("memory, 4,800 GB/s", _HBM)),
    ]  # fmt: skip
    return Picture("Gated delta rule, bfloat16", _source(prefill), panels, 2, 3.0)


def _tokens(case: str) -> int:
    """Return the tokens of "16 x 4096"."""
    return math.prod(int(number) for number in case.split(" x "))


def _serve() -> Picture:
    record = _load("serve")
    rows, steps = record["rows"], record["structured"]["rows"]
    served = [row for row in rows if "ttft_ms" in row]
    panels = [
        Bars("256 streams", "output tokens/s", [row["case"] for row in rows],
             {"ours": [max(row["output_tokens_per_s"]) for row in rows]}),
        Bars("one stream", "first token, ms, less is better", [row["case"] for row in served],
             {"ours": [min(row["ttft_ms"]) for row in served]}, digits=".1f"),
        Bars("256 requests with a schema", "ms a step, less is better",
             [row["case"] for row in steps], {"ours": [row["step_ms"] for row in steps]},
             digits=".2f"),
    ]  # fmt: skip
    source = _source(record, "8a856f7, schemas 6a7a02c")
    return Picture("The server, Qwen3-0.6B's shape", source, panels, 1, 1.6)


def _speculative(name: str, title: str) -> Picture:
    record = _load(name)
    tasks = list(dict.fromkeys(row["task"] for row in record["rows"]))
    times = {(row["task"], row["config"]): row["x plain"] for row in record["rows"]}
    panels = [
        Bars(name, "times as fast as without drafts", tasks,
             {"ours": [times[task, name] for task in tasks]}, digits=".2f")
        for name in ("ngram 4", "ngram 8", "ngram 15", "suffix 15")
    ]  # fmt: skip
    return Picture(f"Speculative decoding on {title}", _source(record), panels, 2, 1.6)


def _best_of(rows: list[dict[str, Any]], gpus: int, key: str, **wanted: Any) -> float | None:
    """Return the best result among the feasible rows with this many GPUs."""
    found = [
        row[key]
        for row in rows
        if row["gpus"] == gpus
        and key in row
        and row["division"].startswith(wanted["way"])
        and row["sums"] == wanted["sums"]
    ]
    best = min if key.startswith("ms") else max
    return best(found) if found else None


def _scaling() -> Picture:
    record = _load("scaling")["predicted"]
    models = (("llama-3.1-8b", ""), ("llama-3.1-70b", ", fp8"),
              ("qwen3-235b-a22b", ", fp8_block"), ("gpt-oss-120b", ", mxfp4"))  # fmt: skip
    latencies, rates = [], []
    for name, form in models:
        rows = [row for row in record["over_gpus"] if row["model"] == name]
        gpus = sorted({row["gpus"] for row in rows if "ms_per_token" in row})

        def line(key: str, sums: str, ways: tuple[str, ...] = ("tp", "1 GPU"),
                 rows: list[Any] = rows, gpus: list[int] = gpus) -> list[float | None]:  # fmt: skip
            found = [[_best_of(rows, n, key, way=way, sums=sums) for way in ways] for n in gpus]
            return [next((value for value in each if value), None) for each in found]

        other = "ours, with NCCL's sums"
        latencies.append(
            Lines(f"{name}{form}: one request", "ms a token", "GPUs that share each layer", gpus,
                  {"ours": line("ms_per_token", "ours"), other: line("ms_per_token", "NCCL")})
        )  # fmt: skip
        found = {
            "ours": line("output_tokens_per_s", "ours"),
            other: line("output_tokens_per_s", "NCCL"),
            "ours, replicas": line("output_tokens_per_s", "ours", ("dp", "1 GPU")),
        }
        shown = {series: values for series, values in found.items() if any(values)}
        rates.append(Lines(f"{name}: 256 requests", "output tokens/s", "GPUs", gpus, shown))
    source = (
        "H200s; constants of one H200; sums: ours on two H100s, NCCL 2.28 on two H200s; 2026-11-24"
    )
    return Picture("Predicted, not measured: from 1 to 8 GPUs", source, [*latencies, *rates], 4,
                   2.6, 12.5)  # fmt: skip


PICTURES: dict[str, Callable[[], Picture]] = {
    "gemm_sm90": _gemm_sm90,
    "gemm_skinny": _gemm_skinny,
    "make_it_fast": _make_it_fast,
    "attention_prefill_sm90": _attention_prefill,
    "attention_prefill_fp8": _attention_prefill_fp8,
    "attention_backward": _attention_backward,
    "attention_decode": _attention_decode,
    "mla_decode": _mla_decode,
    "torch_ops": _torch_ops,
    "moe_gemm": _moe_gemm,
    "shared_prefix": _shared_prefix,
    "sample_elementwise": _sample_elementwise,
    "host": _host,
    "serve": _serve,
    "speculative": partial(_speculative, "speculative_cpu", "two CPU cores"),
    "speculative_h100": partial(_speculative, "speculative_h100", "an H100"),
    "swap": _swap,
    "decode_loop": _decode_loop,
    "decode_batches": _decode_batches,
    "deterministic": _deterministic,
    "all_reduce": _all_reduce,
    "all_reduce_sent": _sent_rows,
    "attention_roofline": _roofline,
    "quantization": _quantization,
    "numerics": partial(_numerics, "numerics_cpu"),
    "numerics_h200": partial(_numerics, "numerics_h200"),
    "whole_models": _whole_models,
    "hybrid_model": _hybrid_model,
    "answer_formats": _answer_formats,
    "sleep": _sleep,
    "lora": _lora,
    "gated_delta": _gated_delta,
    "scaling": _scaling,
}


def main() -> None:
    """Draw the figures named on the command line, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.plot", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; none: all")
    names = parser.parse_args().names or list(PICTURES)
    unknown = [name for name in names if name not in PICTURES]
    if unknown:
        parser.error(f"no picture is called {unknown[0]!r}; there are {', '.join(PICTURES)}")
    for name in names:
        target = draw(name, PICTURES[name]())
        print(f"{target.name}  {target.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
