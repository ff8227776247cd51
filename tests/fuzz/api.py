"""Calls with arguments of every wrong type and size.

A call returns or raises one of the engine's own errors. Afterwards the engine gives a known prompt
the tokens it gave at the start, nothing is queued, and no block is held.
"""

from __future__ import annotations

import random
from dataclasses import fields
from pathlib import Path
from typing import Any

from engine import LLM, LLMEngine, SamplingParams, load
from engine.engine_config import EngineConfig
from engine.errors import EngineError
from engine.tasks.beam_search import BeamSearchParams
from tests.fuzz.api_values import VALUES, CallersError
from tests.fuzz.limits import Limits, outcome_of
from tests.fuzz.tokenizer import BASES
from tests.loading.tiny import write_model

LIMITS = Limits()
VOCAB = 620
PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
NAMES = list(VALUES)
FIELDS = [field.name for field in fields(SamplingParams)]
BEAM_FIELDS = [field.name for field in fields(BeamSearchParams)]
OPTIONS = [field.name for field in fields(EngineConfig)]
ARGUMENTS: dict[str, list[str]] = {
    "params": FIELDS,
    "beam": ["prompts", *BEAM_FIELDS],
    "add_request": [
        "request_id",
        "prompt",
        "params",
        "priority",
        "cache_salt",
        "timeout",
        "parent",
    ],
    "abort": ["ids"],
    "forget": ["ids"],
    "generate": ["prompts", "sampling_params", "priority", "progress"],
    "chat": ["messages", "tools", "add_generation_prompt", "x", "chat_template", "sampling_params"],
    "stream": ["prompt", "sampling_params"],
    "tokenizer": ["value"],
    "step": ["token_ids", "cache", "logits"],
    "new_cache": ["batch_size", "max_tokens", "block_size"],
    "engine": OPTIONS,
    "load": ["model", "dtype", "load_format", "max_model_len", "deterministic", "config", "device"],
}
_WEIGHTS = [6, 1, 5, 1, 1, 5, 3, 2, 3, 1, 1, 1, 1]


def make(rng: random.Random) -> dict[str, Any]:
    """Make a case: one to three calls."""
    calls = []
    for call in rng.choices(list(ARGUMENTS), _WEIGHTS, k=rng.choice([1, 2, 3])):
        names = ARGUMENTS[call]
        chosen = rng.sample(names, min(rng.choice([1, 1, 1, 2, 3]), len(names)))
        calls.append([call, {name: rng.choice(NAMES) for name in chosen}])
    return {"calls": calls}


class Runner:
    """Makes the calls on one engine, which must stay as it was."""

    def __init__(self, folder: Path) -> None:
        root = folder / "model"
        write_model(
            root, "llama", vocab_size=VOCAB, max_position_embeddings=64, num_hidden_layers=1
        )
        for name, data in BASES["plain"].items():
            (root / name).write_bytes(data)
        self._root = root
        self._llm = LLM(
            str(root), device="cpu", dtype="float32", num_blocks=16, max_num_seqs=4, debug=True
        )
        self._engine = self._llm.llm_engine
        self._cache = self._engine.model.new_cache(1, 64)
        [output] = self._llm.generate([PROMPT], GREEDY)
        self._want = list(output.outputs[0].token_ids)
        self.run({"calls": []})

    def run(self, case: dict[str, Any]) -> str:
        """Return how each call ended."""
        ends = []
        for call, names in case["calls"]:
            values = {name: VALUES[value]() for name, value in names.items()}
            try:
                getattr(self, f"_call_{call}")(values)
                ends.append(f"{call} returned")
            except EngineError as error:
                ends.append(f"{call} {outcome_of(error)}")
            except CallersError:
                ends.append(f"{call} raised what its argument raised")
        self._check()
        return " | ".join(ends)[:200]

    def _check(self) -> None:
        engine = self._engine
        for _ in range(400):
            if not engine.has_unfinished_requests():
                break
            engine.step()
            engine.check_integrity()
        assert not engine.has_unfinished_requests(), "not drained after 400 steps"
        engine.check_integrity()
        assert engine.scheduler.blocks.num_available == engine.config.scheduler.num_blocks
        assert not engine._streams.groups and not len(engine.runner._table)
        assert not self._llm._shared.inbox and self._llm._shared.is_idle
        [output] = self._llm.generate([PROMPT], GREEDY)
        assert list(output.outputs[0].token_ids) == self._want, output
        if self._cache.lengths[0] > 32:
            self._cache = engine.model.new_cache(1, 64)

    def _served(self, outputs: Any) -> None:
        for output in outputs:
            assert output.finished
            for one in output.outputs:
                assert one.finish_reason in ("stop", "length", "error", "abort")
                assert all(0 <= token < VOCAB for token in one.token_ids)
                assert isinstance(one.text, str)

    def _call_params(self, values: dict[str, Any]) -> None:
        self._served(self._llm.generate([PROMPT, "Hello"], SamplingParams(**values)))

    def _call_beam(self, values: dict[str, Any]) -> None:
        prompts = values.pop("prompts", PROMPT)
        given = {"beam_width": 2, "max_tokens": 3} | values
        self._llm.beam_search(prompts, BeamSearchParams(**given))

    def _call_add_request(self, values: dict[str, Any]) -> None:
        given = {"request_id": "r0", "prompt": PROMPT, "params": GREEDY} | values
        self._engine.add_request(**given)
        outputs = {}
        for _ in range(100):
            outputs |= {output.request_id: output for output in self._engine.step()}
            if not self._engine.has_unfinished_requests():
                break
        self._served(outputs.values())

    def _call_abort(self, values: dict[str, Any]) -> None:
        self._engine.add_request("r0", PROMPT, GREEDY)
        self._engine.abort_request(values["ids"])

    def _call_forget(self, values: dict[str, Any]) -> None:
        self._engine.add_request("r0", PROMPT, GREEDY)
        self._engine.abort_request("r0")
        self._engine.forget_aborted(values["ids"])

    def _call_generate(self, values: dict[str, Any]) -> None:
        given = {"prompts": [PROMPT], "sampling_params": GREEDY} | values
        given["progress"] = False
        self._served(self._llm.generate(**given))

    def _call_chat(self, values: dict[str, Any]) -> None:
        messages = values.pop("messages", [{"role": "user", "content": "Hi"}])
        self._served(self._llm.chat(messages, **({"sampling_params": GREEDY} | values)))

    def _call_stream(self, values: dict[str, Any]) -> None:
        given = {"prompt": PROMPT, "sampling_params": GREEDY} | values
        stream = self._llm.stream(**given)
        next(stream)
        stream.close()

    def _call_tokenizer(self, values: dict[str, Any]) -> None:
        tokenizer = self._llm.tokenizer
        for method in ("encode", "decode", "token_bytes", "id_to_token", "token_to_id"):
            try:
                getattr(tokenizer, method)(values["value"])
            except EngineError as error:
                outcome_of(error)

    def _call_step(self, values: dict[str, Any]) -> None:
        self._engine.model.step(**({"token_ids": [PROMPT], "cache": self._cache} | values))

    def _call_new_cache(self, values: dict[str, Any]) -> None:
        self._engine.model.new_cache(**({"batch_size": 1, "max_tokens": 8} | values))

    def _call_engine(self, values: dict[str, Any]) -> None:
        given = {"num_blocks": 8, "max_num_seqs": 2} | values
        with LLMEngine(self._engine.model, **given) as engine:
            engine.add_request("r0", PROMPT, GREEDY)
            engine.step()

    def _call_load(self, values: dict[str, Any]) -> None:
        load(**({"model": self._root, "device": "cpu"} | values))
