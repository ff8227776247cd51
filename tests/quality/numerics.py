"""`python -m tests.quality.numerics [MODEL ...]`: distance of logits from float64, beside peers.

Every implementation computes the same tokens with the same bfloat16 weights, as prompts and as
decode steps, and is compared with `tests.quality.float64`. Ours runs with its fused kernels, and
with each kind of them taken apart (`engine.kernels.override`). The last lines say whether one of
these paths is farther from float64 than transformers in bfloat16; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine import kernels
from engine.commands._record import check_output_file, conditions
from engine.device import Device, resolve_device, to_numpy
from engine.errors import ConfigError, DeviceError
from engine.kernels._chip import is_hopper
from engine.model import Model
from tests.quality import float64
from tests.quality.distances import METRICS, Distance, compare
from tests.quality.made_models import MODELS, SIZES, Made, make
from tests.quality.numerics_peers import Transformers, find_transformers, read_vllm

__all__ = ["PARTS", "Plan", "conclusion", "farther", "measure", "table"]

Array = np.ndarray[Any, Any]

PARTS: Mapping[str, tuple[str, ...]] = {
    "norms apart": ("rmsnorm",),
    "residual additions apart": ("residual_add",),
    "activations apart": ("swiglu",),
    "rope and KV store apart": ("rope", "kv_store"),
    "routing apart": ("moe_route",),
    "experts' sum apart": ("moe_combine",),
}
"""Path -> the ops that its kernels do not fuse: each is a kernel of its own."""
EVERYTHING = "everything apart"
DEFAULT, DETERMINISTIC, PORTABLE = "default", "deterministic", "portable kernels"
WIDE_LOGITS = "float32 logits"  # transformers rounds its logits to bfloat16, ours does not

PROMPTS, ONE = "prompts", "1 request"
BASELINE = "transformers"
_SANE = 0.1  # largest distance of float32, as a share of that of bfloat16
_TIER = "ENGINE_KERNEL_TIER"


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes
    ----------
    models : tuple of str
        Names in MODELS.
    size : str
        Size of the random models, in SIZES.
    num_sequences, length : int
        Sequences, and tokens of each.
    first : int
        The first token of a sequence that is compared; the ones before it are its prompt.
    keep : Path, optional
        Folder to keep the checkpoints in, with their tokens.
    vllm : Path, optional
        Folder with vLLM's log-probabilities, `<model>.npz`.
    """

    models: tuple[str, ...] = MODELS
    size: str = "1b"
    num_sequences: int = 4
    length: int = 192
    first: int = 16
    keep: Path | None = None
    vllm: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.first < self.length:
            raise ValueError(f"first must be in 1 to {self.length - 1}; got {self.first}")
        if self.num_sequences < 2:
            raise ValueError(f"num_sequences must be at least 2; got {self.num_sequences}")

    @property
    def many(self) -> str:
        """The mode that decodes all sequences together."""
        return f"{self.num_sequences} requests"


def measure(plan: Plan, device: Device) -> Iterator[dict[str, Any]]:
    """Yield a row for each model, mode and path."""
    with contextlib.ExitStack() as stack:
        parent = plan.keep
        if parent is None:
            parent = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in plan.models:
            made = make(name, plan.size, parent / name, plan.num_sequences, plan.length)
            if plan.keep is not None:
                np.save(made.folder / "token_ids.npy", made.token_ids)
            yield from _Measurement(plan, made, device).rows()


class _Measurement:
    """One model: the reference, and every implementation's distance from it."""

    def __init__(self, plan: Plan, made: Made, device: Device) -> None:
        self._plan = plan
        self._made = made
        self._device = device
        self._reference = self._scored(float64.logits(made.folder, made.token_ids))
        self._peers: dict[str, Distance] = {}  # mode -> transformers in bfloat16

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the peers' rows, then ours."""
        yield from self._transformers()
        yield from self._vllm()
        yield from self._ours()

    def _scored(self, logits: Array) -> Array:
        """Return the compared tokens (N, V) of all tokens' logits (S, L, V)."""
        return logits[:, self._plan.first :].reshape(-1, logits.shape[-1])

    def _transformers(self) -> Iterator[dict[str, Any]]:
        if not find_transformers():
            return
        folder = self._made.folder
        with Transformers(folder, "bfloat16", self._device) as peer:
            for mode in self._modes():
                logits = self._logits(mode, peer.prompts, peer.decoded)
                self._peers[mode] = Distance.of(logits, self._reference)
                yield self._row(BASELINE, "bfloat16", mode, DEFAULT, logits, self._peers[mode])
            found = self._scored(peer.prompts(self._made.token_ids, wide_logits=True))
            yield self._row(BASELINE, "bfloat16", PROMPTS, WIDE_LOGITS, found)
        with Transformers(folder, "float32", self._device) as peer:
            found = self._scored(peer.prompts(self._made.token_ids))
            yield self._sane(self._row(BASELINE, "float32", PROMPTS, DEFAULT, found))

    def _vllm(self) -> Iterator[dict[str, Any]]:
        if self._plan.vllm is not None:
            file = self._plan.vllm / f"{self._made.folder.name}.npz"
            found = self._scored(read_vllm(file, self._made.token_ids))
            yield self._row("vLLM", "bfloat16", PROMPTS, DEFAULT, found)

    def _ours(self) -> Iterator[dict[str, Any]]:
        with self._loaded(dtype="float32") as model:
            found = self._scored(_prompts(model, self._made.token_ids))
            yield self._sane(self._row("ours", "float32", PROMPTS, DEFAULT, found))
        with self._loaded() as model:
            for name in (DEFAULT, EVERYTHING, *PARTS):
                yield from self._path(model, name)
        with self._loaded(deterministic=True) as model:
            yield from self._path(model, DETERMINISTIC)
        if self._device.is_cuda and is_hopper("bfloat16"):
            with _portable_tier(), self._loaded() as model:
                yield from self._path(model, PORTABLE)

    def _loaded(self, **options: Any) -> Model:
        given = {"dtype": "bfloat16", "max_model_len": self._plan.length, **options}
        return engine.load(self._made.folder, device=self._device, progress=False, **given)

    def _path(self, model: Model, name: str) -> Iterator[dict[str, Any]]:
        """Yield a row for each mode; if `name` takes ops apart, only where there are some."""
        for mode, ids in self._modes().items():
            first = None if mode == PROMPTS else self._plan.first
            with _apart(name):
                ops = _ops(model, ids, first)
            if name in (*PARTS, EVERYTHING) and ops == _ops(model, ids, first):
                continue
            with _apart(name):
                logits = self._logits(mode, partial(_prompts, model), partial(_decoded, model))
            yield self._row("ours", "bfloat16", mode, name, logits) | {"ops": sorted(ops)}

    def _modes(self) -> dict[str, Array]:
        """Return the tokens that are computed together, by mode."""
        ids = self._made.token_ids
        return {PROMPTS: ids, ONE: ids[:1], self._plan.many: ids}

    def _logits(
        self, mode: str, prompts: Callable[[Array], Array], decoded: Callable[[Array, int], Array]
    ) -> Array:
        """Return the logits (N, V) of the compared tokens, computed as `mode` says."""
        ids, first = self._made.token_ids, self._plan.first
        if mode == PROMPTS:
            return self._scored(prompts(ids))
        groups = ids[:, None] if mode == ONE else ids[None]
        found = np.concatenate([decoded(group, first) for group in groups])
        return found.reshape(-1, found.shape[-1])

    def _row(
        self,
        who: str,
        dtype: str,
        mode: str,
        path: str,
        logits: Array,
        distance: Distance | None = None,
    ) -> dict[str, Any]:
        """Return a row: the distance from float64, and its ratio to transformers in bfloat16."""
        found = distance or Distance.of(logits, self._reference)
        everything = np.arange(len(found.kl))
        row = {
            "model": self._made.name,
            "implementation": who,
            "dtype": dtype,
            "mode": mode,
            "path": path,
            "tokens": len(everything),
            **{name: float(metric(found, everything)) for name, metric in METRICS.items()},
            "max_of_all": float(found.largest_error.max()),
        }
        if who == BASELINE:
            row["version"] = find_transformers()
        if (peers := self._peers.get(mode)) is None or found is peers:
            return row
        compared = compare(found, peers)
        return row | {
            "ratio": {name: one.ratio for name, one in compared.items()},
            "resolution": {name: one.resolution for name, one in compared.items()},
            "farther": [name for name, one in compared.items() if one.is_farther],
        }

    def _sane(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row of float32, after checking that it is near float64."""
        if (peers := self._peers.get(PROMPTS)) is not None:
            most = _SANE * METRICS["rms"](peers, np.arange(len(peers.kl)))
            if row["rms"] > most:
                raise RuntimeError(
                    f"{row['model']}: {row['implementation']} in float32 must be within {most:.1e} "
                    f"of float64 (relative RMS), or the models differ; got {row['rms']:.1e}"
                )
        return row


def _prompts(model: Model, token_ids: Array) -> Array:
    """Return the logits (S, L, V) of sequences (S, L) computed in one step."""
    cache = model.new_cache(*token_ids.shape)
    return to_numpy(model.step(token_ids, cache, logits="all"))


def _decoded(model: Model, token_ids: Array, first: int) -> Array:
    """Return the logits (S, L - first, V) of the tokens from `first` on, one a step."""
    cache = model.new_cache(*token_ids.shape)
    model.step(token_ids[:, :first], cache)
    columns = range(first, token_ids.shape[1])
    return np.stack([to_numpy(model.step(token_ids[:, [t]], cache)) for t in columns], axis=1)


def _ops(model: Model, token_ids: Array, first: int | None) -> dict[str, int]:
    """Return how often each op runs: in a step of prompts, or in one decode step."""
    cache = model.new_cache(*token_ids.shape)
    given = token_ids
    if first is not None:
        model.step(token_ids[:, :first], cache)
        given = token_ids[:, first : first + 1]
    before = dict(model.kernels.runs)
    model.step(given, cache, logits="all")
    runs = {op: count - before.get(op, 0) for op, count in model.kernels.runs.items()}
    # An overridden op counts twice: as "op=op", and as the op that it calls.
    return {op: count for op, count in runs.items() if count and "=" not in op}


@contextlib.contextmanager
def _apart(path: str) -> Iterator[None]:
    """Let the ops of a path run as kernels of their own.

    An op that is overridden, if only by itself, takes the fused ops that contain it apart.
    """
    names = PARTS.get(path, ())
    if path == EVERYTHING:
        names = tuple(name for part in PARTS.values() for name in part)
    with contextlib.ExitStack() as stack:
        if names:
            given = {name: getattr(kernels, name) for name in names}
            stack.enter_context(kernels.override(**given))
        yield


@contextlib.contextmanager
def _portable_tier() -> Iterator[None]:
    before = os.environ.get(_TIER)
    os.environ[_TIER] = "portable"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TIER]
        else:
            os.environ[_TIER] = before


# ---- results

_HEADS = dict(
    zip(METRICS, ("RMS", "max", "KL mean", "KL median", "KL 99 %", "other top 1"), strict=True)
)


def table(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str] = tuple(METRICS)) -> str:
    """Return the rows as a table in Markdown: distances, and in brackets ours over transformers'.

    A ratio that is larger by more than chance is bold.
    """
    heads = " | ".join(_HEADS[name] for name in metrics)
    lines = [f"| model | mode | implementation | {heads} |", "|---" * (3 + len(metrics)) + "|"]
    return "\n".join([*lines, *(_line(row, metrics) for row in rows)])


def _line(row: Mapping[str, Any], metrics: Sequence[str] = tuple(METRICS)) -> str:
    cells = [row["model"], row["mode"], _named(row)]
    for name in metrics:
        text = f"{100 * row[name]:.2f} %" if name == "top1_other" else f"{row[name]:.2e}"
        if "ratio" in row and row["dtype"] == "bfloat16":
            ratio = f"{row['ratio'][name]:.2f}"
            text += f" (**{ratio}**)" if name in row["farther"] else f" ({ratio})"
        cells.append(text)
    return f"| {' | '.join(cells)} |"


def _named(row: Mapping[str, Any]) -> str:
    name = row["implementation"]
    if row["dtype"] != "bfloat16":
        name += f", {row['dtype']}"
    return name if row["path"] == DEFAULT else f"{name}, {row['path']}"


def farther(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], str]]:
    """Return (row, metric) wherever ours in bfloat16 is farther from float64 than transformers."""
    return [(row, name) for row in _judged(rows) for name in row["farther"]]


def _judged(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        row
        for row in rows
        if row["implementation"] == "ours" and row["dtype"] == "bfloat16" and "ratio" in row
    ]


def conclusion(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the verdict: a line for each model and metric, and whether a path is farther."""
    judged = _judged(rows)
    if not judged:
        return "no verdict: transformers is not installed"
    lines = []
    for model in dict.fromkeys(row["model"] for row in judged):
        of_model = [row for row in judged if row["model"] == model]
        for name, head in _HEADS.items():
            ratios = [row["ratio"][name] for row in of_model]
            worst = of_model[int(np.argmax(ratios))]
            lines.append(
                f"{model}, {head}: {min(ratios):.2f} to {max(ratios):.2f} of transformers' distance"
                f" (largest: {worst['mode']}, {worst['path']}; an excess of "
                f"{100 * max(row['resolution'][name] for row in of_model):.0f} % would show)"
            )
    found = farther(rows)
    total = f"{len(judged)} paths by {len(METRICS)} metrics"
    if not found:
        lines.append(f"no fused path is farther from float64 than transformers in bf16: {total}")
        return "\n".join(lines)
    lines.append(f"{len(found)} of {total} are farther from float64 than transformers in bf16:")
    for row, name in found:
        lines.append(
            f"  {row['model']}, {row['mode']}, {row['path']}, {name}: {row['ratio'][name]:.3f}"
        )
    return "\n".join(lines)


def report(plan: Plan, device: Device) -> list[dict[str, Any]]:
    """Measure, print each row as it comes and the conclusion, and return the rows."""
    rows = []
    print(table([]))
    for row in measure(plan, device):
        print(_line(row), flush=True)
        rows.append(row)
    print(conclusion(rows))
    return rows


def main() -> None:
    """Measure, write the file, and print the table and the conclusion."""
    parser = argparse.ArgumentParser(prog="python -m tests.quality.numerics", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--size", choices=SIZES, default=Plan.size, help="of the random models")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sequences", type=int, default=Plan.num_sequences)
    parser.add_argument("--length", type=int, default=Plan.length, help="tokens of each sequence")
    parser.add_argument("--first", type=int, default=Plan.first, help="first token compared")
    parser.add_argument("--keep", type=Path, help="folder to keep the checkpoints in")
    parser.add_argument("--vllm", type=Path, help="folder with vLLM's <model>.npz")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--print", type=Path, help="only print the table of this file")
    options = parser.parse_args()
    if options.print:
        rows = json.loads(options.print.read_text())["rows"]
        print(f"{table(rows)}\n{conclusion(rows)}")
        return
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        parser.error(f"no model is called {unknown[0]!r}; there are {', '.join(MODELS)}")
    try:
        device, _ = resolve_device(options.device)
        if options.json is not None:
            check_output_file(options.json)
        plan = Plan(
            tuple(options.models) or MODELS,
            *(options.size, options.sequences, options.length, options.first),
            *(options.keep, options.vllm),
        )
    except (ConfigError, DeviceError, ValueError) as error:
        parser.error(str(error))
    device.activate()
    rows = report(plan, device)
    if options.json is not None:
        command = "python -m tests.quality.numerics " + " ".join(sys.argv[1:])
        record = {**conditions(device), "command": command, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(1 if farther(rows) else 0)


if __name__ == "__main__":
    main()
