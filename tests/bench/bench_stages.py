"""Stages of one decode step at one request: dependent kernel launches a token, and us a stage.

The kernels of a step run one after another, so a token takes the bytes of the weights over the
memory's rate, and for each launch a time in which memory idles: the us a stage. Launches are
counted while the step's CUDA graph is captured. Without a GPU only the ops are counted: a step of
the same layers with small matrices runs the same ops, and most ops are one kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine import load
from engine.cards import CARDS
from engine.commands._bench_models import built_in_config
from engine.commands._bench_workloads import Work, latency, serve
from engine.config import ModelConfig
from engine.device import Device
from engine.kernels._launch import Kernel
from engine.kernels._override.dispatch import count
from engine.llm_engine import LLMEngine
from engine.scaling.constants import Constants

MODELS: tuple[tuple[str, str | None], ...] = (
    ("qwen2.5-0.5b", None),
    ("qwen3-0.6b", None),
    ("llama-3.2-1b", None),
    ("llama-3.1-8b", None),
    ("llama-3.1-8b", "fp8"),
    ("llama-3.1-8b", "int4"),
    ("llama-3.1-8b", "q4_k"),
    ("qwen3-30b-a3b", None),
    ("qwen3-30b-a3b", "fp8_block"),
    ("gpt-oss-20b", "mxfp4"),
)
"""Built-in configuration, and the format of its weights. gpt-oss quantizes attention, too, unlike
the published checkpoint."""
PROMPT_LEN, OUTPUT_LEN, REPEATS = 128, 512, 3
_COUNTED = (8, 24)  # output lengths whose difference is counted
_CALL = "()"  # after the entry point of a kernel in the counts
_VOCABULARY = 512  # the small copy's ids


@dataclass(frozen=True)
class Counts:
    """Runs per token in steady decoding.

    Attributes
    ----------
    ops, launches : dict of str to float
        Op, and entry point of a kernel -> runs. There are no launches on the CPU.
    """

    ops: Mapping[str, float]
    launches: Mapping[str, float]

    @property
    def num_ops(self) -> float:
        """Number of ops a token."""
        return sum(self.ops.values())

    @property
    def num_launches(self) -> float:
        """Number of kernel launches a token."""
        return sum(self.launches.values())


@contextlib.contextmanager
def counted_launches() -> Iterator[None]:
    """Count each launch in the runs of the model that makes it, by entry point.

    Launch plans and CUDA graphs repeat these counts with the launches, if they are recorded within
    the block.
    """
    launch = Kernel.launch

    def counted(self: Kernel, spec: Any, grid: Any, *args: Any, **options: Any) -> None:
        if 0 not in grid:
            count(self.entry + _CALL)
        launch(self, spec, grid, *args, **options)

    Kernel.launch = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Kernel.launch = launch  # type: ignore[method-assign]


def count_runs(engine: LLMEngine, prompt_len: int) -> Counts:
    """Serve one request, twice, and return the runs that one more token takes."""
    runs = engine.model.kernels.runs
    max_id = engine.model.config.vocab_size - 1
    served = []
    for length in _COUNTED:
        before = dict(runs)
        serve(engine, Work.same(1, prompt_len, length, max_id=max_id))
        served.append({name: number - before.get(name, 0) for name, number in runs.items()})
    fewer, more = served
    tokens = _COUNTED[1] - _COUNTED[0]
    each = {name: (number - fewer.get(name, 0)) / tokens for name, number in more.items()}
    found = {name: number for name, number in each.items() if number}
    return Counts(
        {name: number for name, number in found.items() if not name.endswith(_CALL)},
        {name: number for name, number in found.items() if name.endswith(_CALL)},
    )


def small_copy(config: ModelConfig) -> ModelConfig:
    """Return a configuration of the same layers with small matrices."""
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
    moe = config.moe
    return replace(
        config,
        **heads,
        **sizes,
        vocab_size=_VOCABULARY,
        rope=replace(config.rope, rotary_dim=64),
        moe=None if moe is None else replace(moe, num_experts=8, top_k=4, intermediate_size=256),
    )


def read_rate(device: Device) -> float:
    """Return the TB/s at which the device's products read weights; 0.0 if the card is unknown."""
    name = device.xp.cuda.runtime.getDeviceProperties(device.index)["name"].decode()
    rates = [card.memory_rate for card in CARDS.values() if name in card.devices]
    return Constants().read * rates[0] if rates else 0.0


def row_of(
    case: str, counts: Counts, timed: Mapping[str, float] | None = None, rate: float = 0.0
) -> dict[str, Any]:
    """Return a row: counts, and with the result of `latency` the times; `rate` is in TB/s."""
    row: dict[str, Any] = {"op": "stages", "case": case, "ops a token": counts.num_ops}
    if timed is None:
        return row | {"ops": dict(counts.ops)}
    row |= {"stages a token": counts.num_launches, "ms a token": timed["ms_per_token"]}
    row["weights GB"] = timed["weight_GB_per_step"]
    if rate:
        reading = timed["weight_GB_per_step"] / rate  # ms
        row["ms of reading"] = reading
        row["us a stage"] = 1e3 * (timed["ms_per_token"] - reading) / counts.num_launches
    return row | {"ops": dict(counts.ops), "launches": dict(counts.launches)}


def _line(row: Mapping[str, Any]) -> str:
    cells = [f"{row['case']:26}"]
    for name, value in row.items():
        if isinstance(value, float):
            cells.append(f"{name} {value:.4g}")
    kernels = row.get("launches", row["ops"])
    most = sorted(kernels.items(), key=lambda item: -item[1])
    return "  ".join([*cells, ", ".join(f"{name} {number:g}" for name, number in most)])


def main(device: Device) -> list[dict[str, Any]]:
    """Measure every model, print, and return the rows."""
    rate = read_rate(device) if device.is_cuda else 0.0
    rows = []
    for name, form in MODELS:
        config = built_in_config(name)
        model = load(
            config=config if device.is_cuda else small_copy(config),
            load_format="dummy",
            device=device,
            dtype="bfloat16",
            quantization=form,
            max_model_len=1024 if device.is_cuda else 128,
        )
        case = f"{name} {form or 'bfloat16'}"
        with counted_launches(), LLMEngine(model, max_num_seqs=1) as engine:
            if device.is_cuda:
                counts = count_runs(engine, PROMPT_LEN)
                timed = latency(engine, Work.same(1, PROMPT_LEN, OUTPUT_LEN), REPEATS)
                row = row_of(case, counts, timed, rate)
            else:
                row = row_of(case, count_runs(engine, 16))
        model.close()
        print(_line(row), flush=True)
        rows.append(row)
    return rows
