"""Draft-verifying steps: time relative to a plain step, and the overhead of speculation.

Drafts are random, or exactly what the model generates, so acceptance is known in advance. See
`bench_speculative` for real text.
"""

from __future__ import annotations

import random
import statistics
import time
from unittest import mock

from engine import llm_engine, load
from engine.commands._bench_models import built_in_config
from engine.commands._bench_workloads import Work, serve
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from engine.speculative.costs import graph_seconds

_MODELS = {"cuda": ("qwen3-0.6b", "llama-3.1-8b"), "cpu": ("qwen2.5-0.5b",)}
_STEPS = {"cuda": 60, "cpu": 4}
_PROMPT = {"cuda": 500, "cpu": 50}
_REQUESTS, _ROUNDS = 64, 3
_DRAFTS = 4
_MAX_ID = 9999


def _random_drafts(num_drafts):
    rng = random.Random(0)

    def propose(token_ids, num_tokens):
        return [rng.randint(0, _MAX_ID) for _ in range(num_drafts)]

    return {"proposer": propose, "num_speculative_tokens": num_drafts, "adaptive": False}


def _step_seconds(model, num_drafts, device):
    """Return the seconds of a step that verifies this many drafts of one request.

    Also return the part from the previous step's result to the launch; 0 if steps never overlap.
    """
    config = _random_drafts(num_drafts) if num_drafts else None
    with LLMEngine(model, max_num_seqs=1, speculative_config=config) as engine:
        seconds = _rounds_seconds(engine, device)
        return seconds, engine.speculation._controller._host_seconds if num_drafts else 0.0


def _rounds_seconds(engine, device):
    """Return the seconds of a step of one request."""
    steps = _STEPS[device.kind]
    prompt = Work.same(1, _PROMPT[device.kind], 1).prompts[0]
    # Stops at 1,024 tokens if all drafts are accepted.
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=(steps + 8) * (1 + _DRAFTS))
    engine.add_request("a", prompt, params)
    for _ in range(4):
        engine.step()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return (time.perf_counter() - start) / steps


def _verify_rows(name, model, device):
    rows = []
    for num_tokens in (1, 2, 4, 8, 16):
        seconds, host = _step_seconds(model, num_tokens - 1, device)
        plain = rows[0]["step us"] if rows else seconds * 1e6
        row = {"op": "verify_steps", "case": f"{name} 1 sequence, {num_tokens} tokens"}
        row |= {"step us": seconds * 1e6, "x plain": seconds * 1e6 / plain}
        rows.append(row | {"result to launch us": host * 1e6} if host else row)
    return rows


def _random_text_row(name, model, device):
    """Return the cost of n-gram drafting on text with hardly any repeats."""
    count, length = (_REQUESTS, 400) if device.is_cuda else (2, 16)
    rates = {"plain": [], "ngram": []}
    for _ in range(_ROUNDS):  # interleaved, since the GPU clock drifts
        for method, found in rates.items():
            config = {"method": "ngram"} if method == "ngram" else None
            with LLMEngine(model, max_num_seqs=count, speculative_config=config) as engine:
                work = Work.same(count, _PROMPT[device.kind], length)
                work = Work(work.prompts, work.lengths, temperature=1.0)
                serve(engine, Work.same(2, 64, 8))
                seconds, _ = serve(engine, work)
                found.append(work.num_output_tokens / seconds)
    plain, ngram = (statistics.median(found) for found in rates.values())
    row = {"op": "verify_steps", "case": f"{name} {count} requests, random text"}
    return row | {"plain tokens/s": plain, "ngram tokens/s": ngram, "x plain": ngram / plain}


def _own_draft_row(name, model, device):
    """Return the time of a 4-draft round, excluding graphs; the model is its own draft model."""
    given = {"config": built_in_config(name), "load_format": "dummy"}
    draft = load(**given, max_model_len=1024, device=str(device))
    config = {"method": "draft_model", "model": name, "adaptive": False}
    config["num_speculative_tokens"] = _DRAFTS
    with (
        mock.patch.object(llm_engine, "load_draft", lambda config, target: draft),
        LLMEngine(model, max_num_seqs=1, speculative_config=config) as engine,
    ):
        seconds = _rounds_seconds(engine, device)
        proposer = engine.speculation._proposer._proposer
        first, later = (graph_seconds(proposer.runner, 1, length) for length in (2, 1))
        verify = graph_seconds(engine.runner, 1, 1 + _DRAFTS)
        graphs = first + (_DRAFTS - 1) * later + verify
        accepted = engine.stats().speculation.acceptance_rate
    draft.close()
    row = {"op": "verify_steps", "case": f"{name} 1 sequence, {_DRAFTS} drafts of itself"}
    row |= {"round us": seconds * 1e6, "graphs us": graphs * 1e6, "accepted": accepted}
    return row | {"overhead %": 100 * (seconds / graphs - 1)}


def main(device):
    """Measure, print, and return the rows."""
    rows = []
    for name in _MODELS[device.kind]:
        config = built_in_config(name)
        model = load(config=config, load_format="dummy", max_model_len=1024, device=str(device))
        rows += [*_verify_rows(name, model, device), _random_text_row(name, model, device)]
        if device.is_cuda:
            rows.append(_own_draft_row(name, model, device))
        model.close()
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else v for k, v in row.items()))
    return rows
