"""The fast path of plain streams gives exactly the outputs of the slow path, step by step."""

from __future__ import annotations

import dataclasses
import random

import pytest

from engine import SamplingParams
from engine.core.output_processor import OutputStream
from engine.sampling_params import RequestOutputKind
from tests.e2e.tiny import EOS, make_engine, swap_gb, tiny_model

TEXT = "naïve 😀 — ключ, 鍵, x".encode()  # one byte per id: most characters need several


class _Bytes:
    """A tokenizer whose tokens are the bytes of a text; the last ones are special."""

    special_ids = frozenset({EOS, 90, 91})
    strip_left = 1
    max_token_chars = 4
    eos_token_ids = (EOS,)

    def encode(self, text, add_special_tokens=True):
        return [5, 6, 7]

    def token_bytes(self, token_id):
        return TEXT[token_id % len(TEXT) :][:1] if token_id % 7 else b" "


@pytest.fixture
def worded(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(type(model), "has_tokenizer", True)
    monkeypatch.setitem(model.__dict__, "tokenizer", _Bytes())
    return model


def _requests(rng):
    extras = [{}, {}, {}, {"stop": "x"}, {"logprobs": 1}, {"n": 2}, {"prompt_logprobs": 0}]
    extras += [{"detokenize": False}, {"skip_special_tokens": False}, {"n": 1, "best_of": 2}]
    for index in range(14):
        extra = dict(rng.choice(extras))
        if extra.get("best_of") is None:
            extra["output_kind"] = rng.choice(list(RequestOutputKind))
        params = SamplingParams(max_tokens=rng.randint(1, 30), seed=index, **extra)
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 40))]
        yield str(index), prompt, params, rng.randint(0, 15), rng.randint(10, 40)


def _serve(model, seed):
    """Return every output of every step, and the metrics that are not times."""
    rng = random.Random(seed)
    engine = make_engine(
        model,
        max_num_seqs=6,
        num_blocks=rng.choice([6, 40]),
        max_model_len=80,
        watermark=0.0,
        swap_space_gb=swap_gb(4),
        recompute_us_per_token=50.0,  # otherwise measured, and timing would affect choices
        swap_us_per_block=100.0,
        async_scheduling=rng.random() < 0.7,
    )
    waiting, steps = sorted(_requests(rng), key=lambda r: r[3]), []
    aborts = {r[0]: r[4] for r in waiting if rng.random() < 0.2}
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][3] <= len(steps):
            name, prompt, params, *_ = waiting.pop(0)
            engine.add_request(name, prompt, params)
        for name in [n for n, at in aborts.items() if at == len(steps)]:
            engine.abort_request(name)
        outputs = [dataclasses.asdict(o) for o in engine.step()]
        for output in outputs:
            metrics = output.pop("metrics")
            output |= {n: v for n, v in metrics.items() if n.startswith("num_")}
            if not (output["finished"] or all(metrics[n] for n in ("first_token_time",))):
                assert not any(c["token_ids"] for c in output["outputs"])
        steps.append(outputs)
    return steps


@pytest.mark.parametrize("seed", range(16))
def test_fast_path_and_slow_path_agree(worded, monkeypatch, seed):
    short = _serve(worded, seed)
    monkeypatch.setattr(OutputStream, "next_output", lambda self, token_ids, now: None)
    assert _serve(worded, seed) == short


def test_the_fast_path_is_taken(worded, monkeypatch):
    taken, original = [], OutputStream.next_output

    def counted(self, token_ids, now):
        taken.append(self.group.request_id)
        return original(self, token_ids, now)

    monkeypatch.setattr(OutputStream, "next_output", counted)
    engine = make_engine(worded)
    for kind in RequestOutputKind:
        params = SamplingParams(max_tokens=5, ignore_eos=True, output_kind=kind)
        engine.add_request(kind.name, [5, 6, 7], params)
    while engine.has_unfinished_requests():
        engine.step()
    assert sorted(taken) == ["CUMULATIVE"] * 4 + ["DELTA"] * 4  # all but the last token
