"""N-gram drafts on copying tasks with SmolLM2's real weights: tokens per second, vs plain decoding."""  # noqa: E501

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import engine
from engine import SamplingParams
from engine.device import Device
from engine.llm_engine import LLMEngine

_CODE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        if amount > self.balance:
            raise ValueError("there is not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))
        return self.balance
"""
_LETTER = """Dear Ms. Meyer,

thank you for your letter of the fourth of May. We are sory that the lamp that you ordered arrived \
with a broken shade. A new shade will be sent to you within five working days, free of charge. \
Please keep the old one until the new one has arrived; our driver will take it back. If you would \
rather return the whole lamp, please write to us, and we will refund the full price of 84 euros.

Yours sincerely,
Anna Becker"""
_ARTICLE = """The town of Elmsford lies between two rivers. For a hundred years its people lived \
from the mill, which ground the grain of the whole valley. When the railway came in 1871, flour \
from the city was cheaper, and the mill closed. Many families left. Those who stayed planted apple \
trees on the slopes above the town, as the soil was poor but the sun was good. Today Elmsford is \
known for its cider, and every October thirty thousand visitors come to the harvest festival. The \
old mill is a museum now. Its wheel still turns, driven by the northern river."""

TASKS = {
    "code edit": f"Here is a Python class:\n\n```python\n{_CODE}```\n\nRewrite the class. "
    "Rename the method `deposit` to `add_money`, and change nothing else. Reply with all of it.",
    "correction": "Correct the spelling of this letter, and reply with the whole letter:\n\n"
    + _LETTER,
    "excerpt": f"{_ARTICLE}\n\nCopy the sentences of the text that are about the mill.",
    "summary": f"{_ARTICLE}\n\nSummarize the text above. Use sentences of the text.",
}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    **{f"ngram {k}": {"method": "ngram", "num_speculative_tokens": k} for k in (4, 8, 15)},
    **{f"suffix {k}": {"method": "suffix", "num_speculative_tokens": k} for k in (8, 15)},
}
_ROUNDS = 5
_MAX_TOKENS = 160


def decode(llm: LLMEngine, ids: list[int], max_tokens: int = _MAX_TOKENS) -> dict[str, float]:
    """Serve one request; return the time of its decode steps, and its draft counts."""
    before = llm.stats().speculation
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    llm.add_request("r", ids, params)
    start, num_steps, first, last = 0.0, 0, 0, 0
    while llm.has_unfinished_requests():
        for output in llm.step():
            last = len(output.outputs[0].token_ids)
        if first:
            num_steps += 1
        elif last:
            start, first = time.perf_counter(), last
    seconds, after = time.perf_counter() - start, llm.stats().speculation
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return {
        "acceptance": accepted / drafted if drafted else 0.0,
        "drafts": float(drafted),
        "tokens/step": (last - first) / num_steps,
        "tokens/s": (last - first) / seconds,
    }


def compare(
    model: Any,
    configs: Mapping[str, Mapping[str, Any] | None],
    tasks: Mapping[str, str],
    rounds: int = _ROUNDS,
) -> list[dict[str, Any]]:
    """Return a row for each task and config, interleaved so that all see the same machine load."""
    options = {"max_num_seqs": 1, "max_model_len": 1024, "num_blocks": 128}
    engines = {n: LLMEngine(model, speculative_config=c, **options) for n, c in configs.items()}
    rows = []
    for task, prompt in tasks.items():
        ids = model.tokenizer.encode_chat(
            [{"role": "user", "content": prompt}], add_generation_prompt=True
        )
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for round_ in range(1 + rounds):  # the first round is warm-up
            for name, llm in engines.items():
                result = decode(llm, ids)
                if round_:
                    runs[name].append(result)
        plain = [run["tokens/s"] for run in runs["plain"]]
        for name, results in runs.items():
            row = {"op": "speculative", "task": task, "config": name} | {
                key: statistics.median(run[key] for run in results) for key in results[0]
            }
            pairs = zip(results, plain, strict=True)
            row["x plain"] = statistics.median(run["tokens/s"] / other for run, other in pairs)
            rows.append(row)
            _print(row)
    for llm in engines.values():
        llm.close()
    return rows


def _print(row: Mapping[str, Any]) -> None:
    figures = [f"{key} {value:.3g}" for key, value in row.items() if isinstance(value, float)]
    print(f"{row['task']:12} {row['config']:10} {'  '.join(figures)}", flush=True)


def main(device: Device) -> list[dict[str, Any]]:
    """Measure on `device`, print, and return the rows."""
    with engine.load("smollm2", device=device) as model:
        return compare(model, CONFIGS, TASKS)
