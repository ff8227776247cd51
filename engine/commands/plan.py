"""`engine plan`: predict a model's memory and speed on GPUs that need not be present."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.cache.kv_cache import KVGeometry
from engine.checks import shown
from engine.commands._bench_models import named_config
from engine.commands._parallel import PARALLEL_OPTIONS
from engine.commands._parser import add_positional_model, chosen_model
from engine.commands._quantization import add_quantization_argument, planned_quantization
from engine.config import ModelConfig
from engine.device import Device
from engine.errors import ConfigError
from engine.loading.load_config import resolve_load_config
from engine.model_files import excerpt
from engine.scaling import (
    CARDS,
    Card,
    Constants,
    Division,
    StepModel,
    Workload,
    divisions,
    find_card,
)
from engine.scaling.card_table import CardTable, Planner, card_table
from engine.scaling.plan import ScalingPlan, plan_scaling
from engine.weights import Stage, stage_sizes

__all__ = ["add_arguments", "run"]

_LENGTHS = 100, 1024
_PROMPT_LEN = 4096
_WAYS = {
    "tensor": "GPUs per tensor-parallel group",
    "pipeline": "pipeline stages",
    "data": "replicas",
}
_MOST = 10**6
_MOST_GPUS = 1024
_MOST_GIGABYTES = 10000
_PAGES = ("auto", "fp8", "int8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_positional_model(parser, "a folder, a .gguf file, a name, or a built-in configuration of "
                         "engine bench (default: smollm2)")  # fmt: skip
    parser.add_argument("--model", help="the same")
    parser.add_argument("--gpu", help=f"kind of GPU: {', '.join(CARDS)} (default: a table of all)")
    parser.add_argument("--memory", type=float, metavar="GB",
                        help="a table of cards with this memory (default: of all)")  # fmt: skip
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs")
    parser.add_argument("--gpus-per-host", type=int, default=8, help="number of GPUs per host")
    for name, meaning in _WAYS.items():
        option = f"{name}_parallel_size"
        short = [PARALLEL_OPTIONS[option][0]] if option in PARALLEL_OPTIONS else []
        parser.add_argument(*short, f"--{name}-parallel-size", type=int, metavar="N",
                            help=f"only plans with N {meaning}")  # fmt: skip
    parser.add_argument("--pipeline-layers", metavar="N,N",
                        help="only plans with stages of these layers, such as 17,15")  # fmt: skip
    parser.add_argument("--enable-expert-parallel", action="store_true",
                        help="only plans with expert parallelism")  # fmt: skip
    add_quantization_argument(parser)
    parser.add_argument("--dtype", default="auto", help="float16, bfloat16 or auto")
    parser.add_argument("--kv-cache-dtype", default="auto", help=f"{', '.join(_PAGES)}")
    parser.add_argument("--max-model-len", type=int, help="longest sequence (default: the model's)")
    parser.add_argument("--max-num-seqs", type=int, default=256,
                        help="maximum running requests per replica")  # fmt: skip
    parser.add_argument("--num-requests", type=int, default=256, help="total requests")
    parser.add_argument("--prompt-len", type=int, help="tokens per prompt (default: 100 to "
                        "1024, and 4096 for prompt tokens/s)")  # fmt: skip
    parser.add_argument("--output-len", type=int, help="tokens per output (default: 100 to 1024)")
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with a breakdown of each time"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; return 0 if any division of the model fits."""
    arguments.model = chosen_model(arguments.named_model, arguments.model)
    plan = _planner(arguments)
    found: ScalingPlan | CardTable
    if arguments.gpu is None:
        found = card_table(plan, *_cards(arguments.memory))
        fits = any(row.fits for row in found.rows)
    elif arguments.memory is not None:
        raise ConfigError("give --gpu or --memory, not both")
    else:
        found = plan(find_card(arguments.gpu))
        fits = bool(found.possible)
    if arguments.json:
        print(json.dumps({"model": arguments.model, **found.as_dict()}))
    else:
        print(f"{_title(arguments, found)}\n{found}")
    if not fits:
        where = "in no way" if arguments.gpu else "on none of these cards"
        print(f"engine plan: the model fits {where}", file=sys.stderr)
        return 1
    return 0


def _cards(gigabytes: float | None) -> tuple[list[Card], Card | None]:
    """Return the cards of a table, and one that stands for any card of this memory."""
    if gigabytes is None:
        return list(CARDS.values()), None
    if not 1 <= gigabytes <= _MOST_GIGABYTES:
        raise ConfigError(f"--memory must be from 1 to {_MOST_GIGABYTES} GB; got {gigabytes:g}")
    memory = round(gigabytes * 1e9)
    title = f"any card of {gigabytes:g} GB"
    known = [card for card in CARDS.values() if card.memory == memory]
    return known, replace(CARDS["h200"], name="", title=title, memory=memory)


def _planner(arguments: argparse.Namespace) -> Planner:
    """Return a function that plans the model on a card, in the given format or its own."""
    for name in ("gpus", "gpus_per_host", "max_num_seqs", "num_requests", "prompt_len",
                 "output_len", *(f"{way}_parallel_size" for way in _WAYS)):  # fmt: skip
        _check_positive(name, getattr(arguments, name))
    if arguments.kv_cache_dtype not in _PAGES:
        raise ConfigError(
            f"--kv-cache-dtype must be one of {', '.join(_PAGES)}; "
            f"got {shown(arguments.kv_cache_dtype)}"
        )
    config, source = named_config(arguments.model)
    stored = planned_quantization(arguments.quantization, source)
    KVGeometry.of_model(config, "bfloat16", kv_cache_dtype=arguments.kv_cache_dtype)
    page_itemsize = 2 if arguments.kv_cache_dtype == "auto" else 1

    def plan(card: Card, quantization: str | None = None) -> ScalingPlan:
        how = resolve_load_config(
            config,
            source,
            (Device("cuda", 0), ""),
            arguments.dtype,
            "dummy",  # no weights are loaded, so the load format does not matter
            arguments.max_model_len,
            quantization or stored,
        )
        form = None if how.quantization == "none" else how.quantization
        return plan_scaling(
            StepModel(config, how.dtype, page_itemsize, form, card, Constants()),
            _ways(arguments, config),
            _workload(arguments, how.max_model_len),
            max_model_len=how.max_model_len,
            prompt_len=arguments.prompt_len or min(_PROMPT_LEN, how.max_model_len),
            max_num_seqs=arguments.max_num_seqs,
            gpus_per_host=arguments.gpus_per_host,
            fastest_only=arguments.gpu is None,
        )

    return plan


def _check_positive(name: str, number: int | None) -> None:
    most = _MOST_GPUS if "gpus" in name or "parallel" in name else _MOST
    if number is not None and not 1 <= number <= most:
        raise ConfigError(
            f"--{name.replace('_', '-')} must be from 1 to {most}; got {shown(number)}"
        )


def _ways(arguments: argparse.Namespace, config: ModelConfig) -> list[Division]:
    """Return the parallelism configurations that the options allow."""
    wanted = {way: getattr(arguments, f"{way}_parallel_size") for way in _WAYS}
    layers = stage_sizes(arguments.pipeline_layers)
    if layers is not None:
        _check_layers(layers, wanted["pipeline"], arguments.gpus, config.num_layers)
        wanted["pipeline"] = len(layers)
    for way, size in wanted.items():
        if size is not None and arguments.gpus % size:
            raise ConfigError(
                f"--{way}-parallel-size must divide --gpus {arguments.gpus}; got {size}"
            )
    if arguments.enable_expert_parallel and config.moe is None:
        raise ConfigError("--enable-expert-parallel needs a model with experts")
    if arguments.enable_expert_parallel and 1 in (arguments.gpus, wanted["tensor"]):
        size = "--gpus" if arguments.gpus == 1 else "--tensor-parallel-size"
        raise ConfigError(f"--enable-expert-parallel needs {size} of at least 2; got 1")
    found = [
        replace(way, layers=layers)
        for way in divisions(config, arguments.gpus)
        if all(size in (None, getattr(way, name)) for name, size in wanted.items())
        and (way.expert or not arguments.enable_expert_parallel)
    ]
    if not found:
        given = ", ".join(f"{way} {size}" for way, size in wanted.items() if size is not None)
        raise ConfigError(
            f"parallel sizes must multiply to --gpus {arguments.gpus}"
            f"{', and share layers for expert parallel' * arguments.enable_expert_parallel}; "
            f"got {given or 'no sizes'}"
        )
    return found


def _check_layers(
    layers: Sequence[int], num_stages: int | None, gpus: int, num_layers: int
) -> None:
    """Check --pipeline-layers against the other options and the model."""
    given = ",".join(map(str, layers))
    count = len(layers)
    if count < 2 or num_stages not in (None, count):
        wanted = "two numbers or more" if num_stages is None else f"{num_stages} numbers"
        raise ConfigError(
            f"--pipeline-layers must be {wanted} (--pipeline-parallel-size); got {given}"
        )
    if gpus % count:
        raise ConfigError(
            f"--pipeline-layers must be of a number of stages that divides --gpus {gpus}; got "
            f"{given}, {count} stages"
        )
    Stage.of(0, count, num_layers, layers)


def _workload(arguments: argparse.Namespace, max_model_len: int) -> Workload:
    if max_model_len < 2:
        raise ConfigError(
            f"--max-model-len must be at least 2, a token and the next one; got {max_model_len}"
        )
    given = {name: getattr(arguments, name) for name in ("prompt_len", "output_len")}
    total = sum(each or 1 for each in given.values())
    if total > max_model_len:
        raise ConfigError(
            f"--prompt-len plus --output-len must be at most --max-model-len {max_model_len}; got "
            f"{given['prompt_len'] or 1} + {given['output_len'] or 1}"
        )

    def lengths(name: str, other: int | None) -> tuple[int, int]:
        if (length := given[name]) is not None:
            return length, length
        longest = min(_LENGTHS[1], max_model_len - other if other else max_model_len // 2)
        return min(_LENGTHS[0], longest), longest

    prompt = lengths("prompt_len", given["output_len"])
    output = lengths("output_len", given["prompt_len"])
    return Workload(arguments.num_requests, prompt, output)


def _title(arguments: argparse.Namespace, found: ScalingPlan | CardTable) -> str:
    plan = found.plan if isinstance(found, CardTable) else found
    model = plan.model
    work = plan.work
    names: dict[str, Any] = {"prompts": work.prompt, "outputs": work.output}
    lengths = " and ".join(
        f"{name} of {low if low == high else f'{low} to {high}'}"
        for name, (low, high) in names.items()
    )
    measured = "constants measured on H100s and H200s, scaled by the data sheets"
    place = f"{plan.num_gpus} x {model.card.title}"
    if isinstance(found, CardTable):
        place = "one card" if plan.num_gpus == 1 else f"{plan.num_gpus} cards of a kind"
    elif model.card.is_measured:
        measured = "constants measured on this kind of card"
    pages = "16-bit" if model.page_itemsize == 2 else "8-bit"
    return (
        f"{excerpt(arguments.model)} in {model.quantization or model.dtype}, {pages} pages, on "
        f"{place}. Predicted, not measured ({measured}).\n"
        f"{work.num_requests} requests with {lengths} tokens; prompt/s: prompts of "
        f"{plan.prompt_len} tokens; one request: {work.mean_prompt + work.mean_output / 2:.0f} keys"
    )
