"""Random operations on the scheduler, and random load on the engine.

After every operation all invariants hold, and each output is a prefix of what the request gets
alone; the machine and the mock are those of `tests.scheduler`. One case in forty serves requests
with the tiny model of `tests.e2e`, whose tokens must be those of each request alone, and one in
forty carries out operations on an engine with speculation.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.scheduler.config import SchedulerConfig
from tests.e2e import test_oracle
from tests.e2e.tiny import tiny_model
from tests.fuzz.limits import Limits
from tests.scheduler.paged_mock import VOCAB
from tests.scheduler.test_scheduler_machine import SchedulerMachine
from tests.speculative import test_random_load

LIMITS = Limits(cpu_seconds=60.0, wall_seconds=300.0)
_CHOICES: dict[str, list[Any]] = {
    "num_blocks": [3, 4, 5, 6, 8],
    "max_num_seqs": [1, 2, 3, 6],
    "max_num_batched_tokens": [6, 17, 64],
    "max_prefill_chunk": [0, 5],
    "watermark": [0.0, 0.1],
    "policy": ["fcfs", "lpm"],
    "lpm_window": [1, 3],
    "priority_window": [0, 2],
    "prefix_caching": [True, True, True, False],
    "max_blocks_per_salt": [None, 1, 3],
    "num_host_blocks": [1, 4, 12],
    "preemption": ["auto", "recompute", "swap"],
    "max_num_queued_requests": [None, 6],
    "max_num_queued_tokens": [None, 100],
}
_WEIGHTS = {
    "add_some": 6, "steps": 4, "dispatch": 5, "dispatch_without": 2, "commit_one": 4,
    "commit_all": 2, "fail": 1, "abort_one": 2, "finish_one": 1, "fork_one": 3, "propose_for": 4,
    "evict": 1, "preempt": 2, "reset": 1,
}  # fmt: skip


def _options(rng: random.Random) -> dict[str, Any]:
    return {
        "max_tokens": rng.choice([30, 20, 7, 1]),
        "ignore_eos": rng.random() < 0.7,
        "priority": rng.randint(-1, 1),
        "cache_salt": rng.choice([None, None, "a"]),
        "short_rope_len": rng.choice([0, 0, 20, 38]),
        "reuse_prefix": rng.random() < 0.7,
    }


def _arrival(rng: random.Random) -> list[Any]:
    prompt = [rng.randint(0, 1)] * rng.choice([15, 16, 17, 32, 40, 0])
    prompt += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))]
    return [prompt, _options(rng), rng.choice([0, 0, 0, 1, 3])]


def _drafts(rng: random.Random) -> dict[str, Any]:
    lengths = {"length": rng.choice([1, 3, 4, 20]), "wrong": rng.randint(0, 20)}
    return lengths | {"is_tree": rng.random() < 0.5}


def _operation(rng: random.Random) -> list[Any]:
    """Return [name, keywords]; "which" in them chooses among the requests at hand."""
    name = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    which = {"which": rng.random()}
    made: dict[str, Any] = {
        "add_some": {"arrivals": [_arrival(rng) for _ in range(rng.randint(1, 6))]},
        "steps": {"turns": rng.choice([10, 3]), **_drafts(rng), "length": rng.choice([0, 0, 1, 4])},
        "dispatch_without": {"share": rng.random()} | which,
        "fail": {"num_run": rng.randint(0, 4)},
        "abort_one": which,
        "finish_one": which | {"reason": rng.choice(["stop", "error"])},
        "fork_one": which | {"kept": rng.random(), "token": rng.randrange(VOCAB)},
        "propose_for": which | _drafts(rng),
        "evict": {"count": rng.randint(1, 4), "on_host": rng.random() < 0.5},
        "preempt": {"swap": rng.random() < 0.5},
    }
    if name == "fork_one":
        made[name]["options"] = _options(rng)
    return [name, made.get(name, {})]


def make(rng: random.Random) -> dict[str, Any]:
    """Make a case."""
    kind = rng.random()
    if kind < 0.05:
        name = "engine_seed" if kind < 0.025 else "speculation_seed"
        return {name: rng.randrange(2**32)}
    config = {name: rng.choice(values) for name, values in _CHOICES.items()}
    return {"config": config, "operations": [_operation(rng) for _ in range(rng.choice([10, 40]))]}


class Runner:
    """Carries out operations, or serves random requests."""

    def __init__(self, folder: Path) -> None:
        self._model = tiny_model()

    def run(self, case: dict[str, Any]) -> str:
        """Return which kinds of work the case has reached."""
        if "engine_seed" in case:
            test_oracle.test_tokens_do_not_depend_on_random_other_requests(
                self._model, case["engine_seed"]
            )
            return "engine"
        if "speculation_seed" in case:
            reached = test_random_load.drive(self._model, case["speculation_seed"])
            return " ".join(["speculation", *(name for name, count in reached.items() if count)])
        try:
            config = SchedulerConfig(
                max_model_len=120, max_draft_tokens=20, debug=True, **case["config"]
            )
        except ConfigError:
            return "no such configuration"
        machine = SchedulerMachine()
        machine.start(config)
        for name, keywords in case["operations"]:
            _apply(machine, name, dict(keywords))
            machine.holds()
        machine.drain()
        stats = machine.scheduler.stats()
        names = ("num_preemptions", "num_swaps", "num_retries", "prefix_cache_hits")
        reached = [name for name in names if getattr(stats, name)]
        reached += ["drafts"] if machine.mock.num_accepted else []
        return " ".join(["operations", *reached])


def _apply(machine: Any, name: str, keywords: dict[str, Any]) -> None:
    """Call one operation, if it is possible now."""
    unfinished = list(machine.scheduler.unfinished_requests())
    if name in ("dispatch", "dispatch_without", "preempt") and len(machine.in_flight) > 2:
        return
    if name == "preempt" and not machine.scheduler.num_running:
        return
    if name == "dispatch_without":
        count = int(keywords["share"] * len(unfinished))
        machine.dispatch_without(set(unfinished[:count]))
        return
    if name == "add_some":
        keywords["arrivals"] = [(p, dict(o), n) for p, o, n in keywords["arrivals"]]
    if "which" in keywords:
        known = list(machine.requests) if name == "propose_for" else unfinished
        if not known:
            return
        chosen = known[int(keywords.pop("which") * len(known))]
        if name == "fork_one":
            kept = int(keywords["kept"] * (chosen.num_output_tokens + 1))
            keywords |= {"kept": kept, "options": dict(keywords["options"])}
        getattr(machine, name)(chosen, **keywords)
        return
    getattr(machine, name)(**keywords)
