"""structured_masks: host time per step in which each of 256 requests follows a grammar.

Time of `AllowedMasks.build`, from the last step's ids to the masks, for a synthetic vocabulary of
151,936 tokens. "texts": plausible output, different for each request; "same": one text for all;
"random": any allowed token, as from a model with random weights; "drafts": texts, three tokens
verified per step. "core us" is CPU time over all threads.
Then the number of steps to write one text if forced tokens are drafts.
"""

from __future__ import annotations

import json
import random
import time
from types import SimpleNamespace

import numpy as np

from engine import SamplingParams
from engine.device import CPU
from engine.request import Request
from engine.runner.allowed_masks import AllowedMasks
from engine.runner.sampling import SamplingSpec
from engine.structured.grammar import GrammarCompiler
from engine.structured.spec import StructuredOutput
from tests.bench.made_vocabulary import EOS, NUM_WORDS, SYLLABLES, VOCAB_SIZE, MadeTokenizer

DEVICE = "CPU"
_NUM_REQUESTS, _NUM_STEPS = 256, 60
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_NAME = {"type": "string", "maxLength": 40}
_LIMITED = _PERSON | {"properties": {**_PERSON["properties"], "name": _NAME}}


def _text(rng):
    def words(count):
        return " ".join("".join(rng.choices(SYLLABLES, k=2)) for _ in range(count))

    tags = [words(rng.randint(1, 5)) for _ in range(12)]
    return json.dumps({"name": words(3), "age": rng.randrange(100), "tags": tags})


def _requests(grammars, masks):
    requests = []
    for row in range(_NUM_REQUESTS):
        params = SamplingParams(max_tokens=1000)
        request = Request(f"r{row}", [1], params)
        grammar = grammars[row % len(grammars)].new_state()
        request.row, request.spec = row, SamplingSpec(params, row, grammar=grammar)
        masks.assign(request)
        requests.append(request)
    return requests


def _append_random(requests, built, rng):
    for request, row in zip(requests, built["allowed_rows"], strict=True):
        bits = np.unpackbits(built["allowed"][row].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:NUM_WORDS])
        request.output_token_ids.append(int(rng.choice(allowed)) if len(allowed) else EOS)


def _measure(name, grammars, texts=None, num_drafts=0):
    masks, rng = AllowedMasks(_NUM_REQUESTS, VOCAB_SIZE, [EOS], CPU), np.random.default_rng(0)
    requests = _requests(grammars, masks)
    count = 1 + num_drafts
    sampled = [SimpleNamespace(request=r) for r in requests for _ in range(count)]
    rows, seconds, nums = np.repeat(np.arange(_NUM_REQUESTS), count), [], []
    for step in range(_NUM_STEPS // count):
        start, paths = step * count, None
        if num_drafts:
            paths = [tuple(ids[start : start + i]) for ids in texts for i in range(count)]
        positions = 1 + start + np.tile(np.arange(count, dtype=np.int32), _NUM_REQUESTS)
        before = time.perf_counter(), time.process_time()
        built = masks.build(sampled, rows, positions, paths)
        after = time.perf_counter(), time.process_time()
        seconds.append([b - a for a, b in zip(before, after, strict=True)])
        nums.append(len(built["allowed"]))
        if texts is None:
            _append_random(requests, built, rng)
            continue
        for request, ids in zip(requests, texts, strict=True):
            request.output_token_ids += ids[start : start + count]
    assert not any(request.spec.grammar.error for request in requests)
    row = {
        "op": "structured_masks",
        "case": f"{name} {_NUM_REQUESTS}",
        "median us": float(np.median(seconds, axis=0)[0]) * 1e6,
        "median core us": float(np.median(seconds, axis=0)[1]) * 1e6,
        "mean core us": float(np.mean(seconds, axis=0)[1]) * 1e6,
        "masks a step": float(np.mean(nums)),
    }
    _print(row)
    return row


def _forced(compiler, name, structured, text, tokenizer):
    """Count the steps of one request that writes `text`, with forced tokens as drafts."""
    state, ids = compiler.compile(structured).new_state(), tokenizer.encode(text)
    num_known = num_steps = 0
    while num_known < len(ids):
        state.follow(ids[:num_known])
        forced = state.forced_tokens(8)
        while forced and num_known < len(ids) - 1 and ids[num_known] == forced[0]:
            num_known += 1
            forced.pop(0)
        num_known += 1
        num_steps += 1
    row = {
        "op": "structured_masks",
        "case": f"forced tokens, {name}",
        "tokens": float(len(ids)),
        "steps": float(num_steps),
    }
    _print(row)
    return row


def _print(row):
    print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else v for k, v in row.items()))


def main():
    tokenizer, rng = MadeTokenizer(), random.Random(0)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    plain, limited = StructuredOutput(json=_PERSON), StructuredOutput(json=_LIMITED)
    numbers = StructuredOutput(json={"type": "array", "items": {"type": "number"}})
    kinds = [plain, limited, StructuredOutput(json_object=True), numbers]
    texts = [tokenizer.encode(_text(rng)) for _ in range(_NUM_REQUESTS)]
    assert min(map(len, texts)) > _NUM_STEPS
    rows = []
    for name, structured in (("schema", plain), ("schema with maxLength", limited)):
        grammars = [compiler.compile(structured)]
        rows.append(_measure(f"{name}, same", grammars, [texts[0]] * _NUM_REQUESTS))
        rows.append(_measure(f"{name}, texts", grammars, texts))
        rows.append(_measure(f"{name}, random", grammars))
        rows.append(_measure(f"{name}, drafts", grammars, texts, num_drafts=2))
    rows.append(_measure("four grammars, random", [compiler.compile(each) for each in kinds]))
    rows.append(_forced(compiler, "schema", plain, _text(rng)[:60], tokenizer))
    tags = StructuredOutput(regex="<name>[a-z]{3,9}</name><is_member>(true|false)</is_member>")
    text = "<name>banda</name><is_member>true</is_member>"
    return [*rows, _forced(compiler, "tags", tags, text, tokenizer)]
