"""superconductors: the screen of the example, candidates a second beside torch.compile, by part.

Compositions are sequences of 8 tokens; crystals have up to 4,000. Both networks are trained first,
on SuperCon's table if `SUPERCON_CSV` names it, so that the loss of accuracy of a pattern and of FP8
is measured in kelvin and in eV. torch, if it is installed, runs the same weights in bfloat16 with
dense attention of cuDNN. Times are those of the host's clock, batches included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from engine import kernels
from engine.dtypes import np_dtype
from examples.superconductors import compositions, crystals, data, ops, screen, study
from examples.superconductors.inference import FastNetwork
from examples.superconductors.network import Adam, Config, Network, packed
from examples.superconductors.training import Step
from tests.bench.screen_torch import TorchPeer, has_torch

DENSITY = 0.25
_PEROVSKITE = crystals.PROTOTYPES[:1]  # 5 sites: every length below is a whole number of cells
_RECIPE = study.Recipe(num_neighbours=0)
_CRYSTAL = Config(num_heads=2)


@dataclass(frozen=True)
class Sizes:
    """What is measured: counts of candidates, tokens, and training."""

    compositions: int = 1 << 20
    sequences: int = 1 << 17  # compositions per batch
    lengths: tuple[int, ...] = (200, 1000, 2000, 4000)
    crystals: int = 100_000
    tokens: int = 1 << 20  # of crystals per batch
    recipe: study.Recipe = _RECIPE
    crystal: Config = _CRYSTAL
    known: int = 768  # crystals to train on; a quarter as many are tested
    known_length: int = 400
    epochs: int = 20
    attention: int = 100_000  # sequences of 8 tokens


CPU = Sizes(
    *(400, 200, (100, 200), 8, 400),
    recipe=study.Recipe(num_epochs=1, num_neighbours=0, hidden=32, num_heads=2, ffn=48),
    crystal=Config(hidden=32, num_heads=2, ffn=48),
    known=32,
    known_length=60,
    epochs=2,
    attention=200,
)


def main(device: Any) -> list[dict[str, Any]]:
    """Measure everything; on a CPU on a few small candidates."""
    bench = Bench(device, Sizes() if device.is_cuda else CPU)
    rows = []
    for part in (bench.tiny_attention, bench.compositions, bench.crystals, bench.training):
        for row in part():
            rows.append(row)
            print("  ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)
    return rows


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


class Bench:
    """The parts of the benchmark on one device; each yields rows."""

    def __init__(self, device: Any, sizes: Sizes) -> None:
        self.xp = device.xp
        self.sizes = sizes
        self.is_cuda = device.is_cuda
        self.dtype = np_dtype("bfloat16" if device.is_cuda else "float32")

    def tiny_attention(self) -> Iterator[dict[str, Any]]:
        """The attention op alone on sequences of 8 tokens, packed and one by one: GB/s."""
        count, heads, head_dim = self.sizes.attention, 4, 32
        shape = (8 * count, 3, heads, head_dim)
        values = np.random.default_rng(0).standard_normal(shape, np.float32)
        rows = self.xp.asarray(values).astype(self.dtype)
        q, k, v = (rows[:, i] for i in range(3))
        out = self.xp.empty(q.shape, self.dtype)
        results = {}
        for name, room in (("packed", 128), ("one by one", 8)):
            bounds = packed(0, count, 8, self.xp, room).bounds

            def run(bounds: dict[str, Any] = bounds) -> None:
                kernels.attention_prefill(q, k, v, **bounds, out=out)

            seconds = self._seconds(run)
            results[name] = out.astype(np.float32)
            nbytes = 4 * q.size * q.dtype.itemsize
            yield {
                "op": "attention of 8 tokens",
                "method": f"ours, {name}",
                "sequences": count,
                "seconds": seconds,
                "gb_per_second": nbytes / seconds * 1e-9,
            }
        if self.is_cuda:
            heads_of = rows.reshape(count, 8, *rows.shape[1:])
            of_op = self.xp.empty((count, 8, heads, head_dim), self.dtype)
            seconds = self._seconds(lambda: ops.short_attention(heads_of, out=of_op))
            results["of the example"] = of_op.reshape(out.shape).astype(np.float32)
            yield {
                "op": "attention of 8 tokens",
                "method": "ours, the example's op",
                "sequences": count,
                "seconds": seconds,
                "gb_per_second": 4 * q.size * q.dtype.itemsize / seconds * 1e-9,
            }
        for result in results.values():
            assert abs(results["packed"] - result).max() < 0.05

    def compositions(self) -> Iterator[dict[str, Any]]:
        """A million compositions of seven elements; errors of the fold that was left out."""
        table = data.load()
        test = data.folds(table) == 0
        trained = self.sizes.recipe.train(
            *(table.compositions[~test], table.tc[~test], 0, self.xp, self.dtype)
        )
        pool = screen.candidates(self.sizes.compositions)
        methods = self._methods(trained.network)
        wanted = table.compositions[test]
        dense: Any = None
        for name, (network, _) in methods.items():
            size = self.sizes.sequences
            outputs, seconds = _screened(network, pool, size=size)
            tested, _ = screen.screen(network, wanted, size=size)
            found = np.maximum(tested, 0) * compositions.SCALE
            dense = outputs if dense is None else dense
            batch, _ = compositions.batch_of(pool[:size], self.xp)
            yield {
                "op": f"compositions ({table.source})",
                "method": name,
                **self._rate(len(pool), seconds),
                **_differences(outputs, dense),
                "error_kelvin": float(np.abs(found - table.tc[test]).mean()),
                **self._parts(network, batch),
            }

    def crystals(self) -> Iterator[dict[str, Any]]:
        """Crystals of several lengths: dense, with a pattern, in FP8; errors in eV per atom."""
        sizes = self.sizes
        known = crystals.generate(sizes.known * 5 // 4, 1, length=sizes.known_length)
        energies = np.array([crystals.energy(crystal) for crystal in known])
        train, test = known[: sizes.known], known[sizes.known :]
        networks = {}
        for name, density in (("dense", 1.0), ("pattern", DENSITY)):
            trained = crystals.train(
                *(train, energies[: sizes.known]),
                config=sizes.crystal,
                num_epochs=sizes.epochs,
                density=density,
                xp=self.xp,
                dtype=self.dtype,
            )
            networks[name] = trained
            for method, (network, run) in self._methods(trained.network, DENSITY).items():
                found, _ = screen.screen(network, test, density=run, size=16)
                found = found * trained.deviation + trained.mean
                error = float(np.abs(found - energies[sizes.known :]).mean())
                yield {
                    "op": "accuracy on crystals",
                    "trained": name,
                    "method": method,
                    "error_ev": error,
                    "median_error_ev": float(
                        np.abs(energies[sizes.known :] - np.median(energies[: sizes.known])).mean()
                    ),
                }
        for length in sizes.lengths:
            yield from self._screened(networks["dense"].network, length)

    def _screened(self, network: Network, length: int) -> Iterator[dict[str, Any]]:
        sizes = self.sizes
        size = max(1, sizes.tokens // length)
        # About as many tokens for each length as 100,000 crystals of the shortest have, and whole
        # batches: torch would compile again for a part of one.
        count = max(1, sizes.crystals * sizes.lengths[0] // length // size) * size
        pool = crystals.generate(min(64, count), 2, length=length, prototypes=_PEROVSKITE)
        pool = (pool * -(-count // len(pool)))[:count]
        dense: Any = None
        for name, (method, density) in self._methods(network, DENSITY).items():
            outputs, seconds = _screened(method, pool, density=density, size=size)
            dense = outputs if dense is None else dense
            batch, _ = crystals.batch_of(pool[:size], density, self.xp)
            yield {
                "op": f"crystals of {length} tokens",
                "method": name,
                **self._rate(count, seconds),
                **_differences(outputs, dense),
                **self._parts(method, batch),
            }

    def training(self) -> Iterator[dict[str, Any]]:
        """A step of training on crystals: forward pass, backward pass and optimizer."""
        for share in (32, 4):
            yield from self._steps(max(1, self.sizes.tokens // share // self.sizes.lengths[-2]))

    def _steps(self, count: int) -> Iterator[dict[str, Any]]:
        length = self.sizes.lengths[-2]
        some = crystals.generate(count, 3, length=length, prototypes=_PEROVSKITE)
        wanted = self.xp.zeros((count, 1), np.float32)
        config = replace(self.sizes.crystal, num_features=crystals.NUM_FEATURES)
        for name, density in (("ours", 1.0), ("ours, pattern", DENSITY)):
            step = Step(Network(config, self.xp, self.dtype), Adam(1e-3, 1000))
            batch, _ = crystals.batch_of(some, density, self.xp)
            yield self._step(name, partial(step, batch, wanted), length, count)
        if self.is_cuda and has_torch():
            peer = TorchPeer(Network(config, self.xp, self.dtype))
            yield self._step("torch", partial(peer.train, batch, wanted), length, count)

    def _step(self, name: str, step: Callable[[], None], length: int, count: int) -> dict[str, Any]:
        return {
            "op": f"training step, {count} crystals of {length} tokens",
            "method": name,
            "seconds": self._seconds(step),
        }

    def _methods(self, network: Network, density: float = 1.0) -> dict[str, tuple[Any, float]]:
        """Return networks and densities by name; the first is what the others are compared with."""
        methods: dict[str, tuple[Any, float]] = {}
        if self.is_cuda and has_torch():
            methods["torch"] = (TorchPeer(network), 1.0)
        methods["ours"] = (FastNetwork(network), 1.0)
        fast = [("", methods["ours"][0])]
        if self.dtype.itemsize == 2:
            fast.append((", FP8", FastNetwork(network, "fp8")))
            methods["ours, FP8"] = (fast[1][1], 1.0)
        if density < 1:
            methods |= {f"ours, pattern{name}": (each, density) for name, each in fast}
        return methods

    def _rate(self, count: int, seconds: dict[str, float]) -> dict[str, Any]:
        return {"count": count, "per_second": count / seconds["all"], "seconds": seconds}

    def _parts(self, network: Any, batch: Any) -> dict[str, Any]:
        """Return the time of the parts of a pass, of the engine's networks."""
        is_ours = isinstance(network, FastNetwork)
        return {"parts": screen.parts(network, batch)} if is_ours else {}

    def _seconds(self, call: Callable[[], None], times: int = 5) -> float:
        """Return the median seconds of a call by the host's clock, after two calls to warm up."""
        taken = []
        for _ in range(times + 2):
            screen.synchronize(self.xp)
            start = time.perf_counter()
            call()
            screen.synchronize(self.xp)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[2:])


def _screened(network: Any, pool: Any, **options: Any) -> tuple[Any, dict[str, float]]:
    """Screen four times, the first to compile; return the outputs, and the median of the others."""
    passes = [screen.screen(network, pool, **options) for _ in range(4)][1:]
    return sorted(passes, key=lambda each: each[1]["all"])[1]


def _differences(outputs: Any, dense: Any) -> dict[str, float]:
    """Return how far outputs are from the dense ones, in standard deviations of those."""
    difference = (outputs - dense) / dense.std()
    return {
        "rms_difference": float(np.sqrt((difference**2).mean())),
        "max_difference": float(np.abs(difference).max()),
    }
