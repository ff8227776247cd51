"""Tokens with drafts have the model's distribution: chi-square tests over 10^5 draws each.

The model is a table: its logits depend on the last token and its position. The distribution of each
draw is computed from the table by a formula of its own, given all tokens before it. Draws are
grouped by the last token and by the draft that was proposed for the draw, as a wrong rule of
acceptance makes the token depend on that. All seeds are fixed.

`ENGINE_TEST_DRAWS=100000` takes as many for every way of sampling; by default some get fewer.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from engine import LLMEngine, SamplingParams
from engine.drafts import Drafts
from engine.models.mock_model import MockModel

VOCAB = 8
EOS = 0
MANY_DRAWS = 100_000
FEW_DRAWS = int(os.environ.get("ENGINE_TEST_DRAWS", "20000"))
PERIOD = 3
TABLE = np.random.default_rng(20).normal(size=(PERIOD, VOCAB, VOCAB)).astype(np.float32) * 1.7
LETTERS = "?abcdefg"
NUM_TOKENS = 4


class Letters:
    """A tokenizer with one letter for each id but that of the end."""

    special_ids = frozenset({EOS})
    strip_left = 0
    max_token_chars = 1
    bos_token_id = None
    eos_token_ids = (EOS,)

    def encode(self, text, add_special_tokens=True):
        """Return the ids of a text; of a space, none."""
        return [LETTERS.index(c) for c in text.strip()]

    def token_bytes(self, token_id):
        """Return the letter."""
        return LETTERS[token_id].encode() if token_id else b""


class TableModel(MockModel):
    """Logits are TABLE[position % PERIOD, token]; it allows trees unless it is deterministic."""

    has_tokenizer = True
    tokenizer = Letters()

    def __init__(self, *, trees):
        super().__init__(VOCAB, 2048, (EOS,))
        self.deterministic = not trees

    def hidden_states(self, batch, kv_pages):
        """Return ids and positions; of a tree's drafts, the positions at which they would be."""
        rows = batch.logits_indices
        return np.stack([batch.token_ids[rows], batch.rope_positions[rows]], axis=1)

    def logits(self, hidden):
        """Return the logits of tokens and positions, (R, 2)."""
        return TABLE[hidden[:, 1] % PERIOD, hidden[:, 0]]


class Guess:
    """Proposes likely tokens and others at random; never knows what will be sampled.

    `proposed[request_id][n]` are the last drafts for after n output tokens.
    """

    def __init__(self, *, trees):
        self._rng = np.random.default_rng(5)
        self._trees = trees
        self._noise = iter(())
        self.proposed = {}

    def propose(self, wanted):
        """Return a chain or a tree for each."""
        return [self._drafts(request, count) for request, count in wanted]

    def _next(self):
        value = next(self._noise, None)
        if value is None:
            self._noise = iter(self._rng.random(4096).tolist())
            value = next(self._noise)
        return value

    def _drafts(self, request, count):
        known = request.num_known_tokens
        last = request.token_ids(known - 1, known)[0]
        ids, parents, depths = [], [], []
        for index in range(count):
            parent = index - 1
            if self._trees:
                parent = int(self._next() * (index + 1)) - 1
            depth = depths[parent] + 1 if parent >= 0 else 0
            row = _ORDER[(known - 1 + depth) % PERIOD][ids[parent] if parent >= 0 else last]
            rank = int(self._next() ** 7 * VOCAB)
            siblings = {i for i, p in zip(ids, parents, strict=True) if p == parent}
            token = next((t for t in row[rank:] + row[:rank] if t not in siblings), None)
            if token is None:
                break
            ids.append(token)
            parents.append(parent)
            depths.append(depth)
        drafts = Drafts(tuple(ids), tuple(parents) if self._trees else None)
        self.proposed.setdefault(request.request_id, {})[request.num_output_tokens] = drafts
        return drafts

    def forget(self, request):
        """Keep what was proposed."""

    def cost(self, num_sequences, num_tokens):
        """Return 0.0."""
        return 0.0

    def close(self):
        """Do nothing."""


_ORDER = np.argsort(-TABLE, axis=2).tolist()


def draw(params, length, num_draws, *, trees):
    """Return prompts (N,), output ids of N requests, and what was proposed."""
    config = {"proposer": print, "num_speculative_tokens": NUM_TOKENS, "adaptive": False}
    guess = Guess(trees=trees)
    count = num_draws // length
    engine = LLMEngine(
        TableModel(trees=trees), max_num_seqs=128, num_blocks=128 * 128, max_model_len=2048,
        max_num_batched_tokens=2048, speculative_config=config, enable_prefix_caching=False,
    )  # fmt: skip
    engine.speculation._proposer._proposer = guess
    prompts = np.random.default_rng(1).integers(1, VOCAB, count).tolist()
    outputs = {}
    for index, token in enumerate(prompts):
        one = SamplingParams(
            **({"max_tokens": length, "ignore_eos": True, "detokenize": False} | params),
            seed=index,
        )
        engine.add_request(f"r{index}", [token], one)
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
    stats = engine.stats().speculation
    assert stats.num_proposer_failures == 0
    assert 0.05 < stats.acceptance_rate < 0.9
    assert stats.num_drafts > 0.1 * num_draws
    ids = [list(outputs[f"r{index}"].outputs[0].token_ids) for index in range(count)]
    return prompts, ids, [guess.proposed.get(f"r{index}", {}) for index in range(count)]


def drafted(ids, proposed):
    """Return, for each token, the first draft in its place when it was sampled; VOCAB: none."""
    result, start = [], 0
    while start < len(ids):
        drafts, parent = proposed.get(start, Drafts(())), -1
        while True:
            parents = drafts.parents or range(-1, len(drafts) - 1)
            children = [i for i, p in enumerate(parents) if p == parent]
            token = ids[start]
            result.append(drafts.token_ids[children[0]] if children else VOCAB)
            start += 1
            parent = next((i for i in children if drafts.token_ids[i] == token), None)
            if parent is None or start == len(ids):
                break
    return result


def softmax(x):
    x = np.exp(x - x.max(axis=1, keepdims=True))
    return x / x.sum(axis=1, keepdims=True)


def probabilities(prompts, ids, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias=None,
                  repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
                  allowed=None, **_):  # fmt: skip
    """Return the last token and the distribution of each draw, (N,) and (N, VOCAB) float64.

    `allowed(history)` is the mask of the tokens that may come after prompt and output so far.
    """
    last, logits, used, seen, masks = [], [], [], [], []
    for prompt, output in zip(prompts, ids, strict=True):
        history = np.array([prompt, *output])
        one_hot = np.eye(VOCAB)[history]
        last.append(history[:-1])
        logits.append(TABLE[np.arange(len(output)) % PERIOD, history[:-1]].astype(np.float64))
        counts = np.cumsum(one_hot, axis=0)[:-1]  # of the tokens before each draw
        seen.append(counts > 0)
        used.append(counts - one_hot[0])
        if allowed is not None:
            masks += [allowed(history[: i + 1].tolist()) for i in range(len(output))]
    x, used, seen = np.concatenate(logits), np.concatenate(used), np.concatenate(seen)
    for token, bias in (logit_bias or {}).items():
        x[:, token] += bias
    if masks:
        x[~np.array(masks)] = -np.inf
    repeated = np.where(x > 0, x / repetition_penalty, x * repetition_penalty)
    x = np.where(seen, repeated, x)
    x = x - presence_penalty * (used > 0) - frequency_penalty * used
    p = softmax(x / temperature)
    p[p < min_p * p.max(axis=1, keepdims=True)] = 0
    if top_k:
        p[p < np.sort(p, axis=1)[:, [-top_k]]] = 0
    order = np.argsort(-p, axis=1)
    falling = np.take_along_axis(p, order, 1)
    before = np.cumsum(falling, axis=1) - falling
    falling[before >= top_p * falling.sum(axis=1, keepdims=True)] = 0
    np.put_along_axis(p, order, falling, 1)
    return np.concatenate(last), p / p.sum(axis=1, keepdims=True)


def z_value(cells, p, tokens):
    """Return the chi-square statistic as the equivalent standard normal value.

    Given what came before it, a token's expectation is its row of `p`. So in each cell the counts
    less their expectations are asymptotically normal, with the sum of diag(p) - p p^T as their
    covariance, although the rows differ and depend on earlier tokens.
    """
    assert (p[np.arange(len(tokens)), tokens] > 0).all(), "a token of probability 0 was sampled"
    total, degrees = 0.0, 0
    for cell in np.unique(cells):
        rows = p[cells == cell]
        expected = rows.sum(axis=0)
        counts = np.bincount(tokens[cells == cell], minlength=VOCAB)
        kept = expected >= 5
        covariance = (np.diag(expected) - rows.T @ rows)[np.ix_(kept, kept)]
        off = (counts - expected)[kept]
        rank = np.linalg.matrix_rank(covariance, tol=1e-6 * expected.sum(), hermitian=True)
        total += off @ np.linalg.pinv(covariance, rcond=1e-6, hermitian=True) @ off
        degrees += int(rank)
    assert degrees > 20
    width = 2 / (9 * degrees)
    return ((total / degrees) ** (1 / 3) - (1 - width)) / np.sqrt(width)


def z_of(params, length, num_draws, *, trees, wanted=None, allowed=None):
    """Draw with `params`; return the z value against the formula for `wanted`, or the same."""
    prompts, ids, proposed = draw(params, length, num_draws, trees=trees)
    tokens = np.concatenate(ids)
    assert len(tokens) >= 0.95 * num_draws
    drafts = np.concatenate([drafted(*pair) for pair in zip(ids, proposed, strict=True)])
    assert (drafts < VOCAB).mean() > 0.5
    last, p = probabilities(prompts, ids, **(wanted or params), allowed=allowed)
    return z_value(last * (VOCAB + 1) + drafts, p, tokens)


def _only(*token_ids):
    mask = np.isin(np.arange(VOCAB), token_ids)
    return lambda history: mask


def _not_b_after_a(history):
    return np.arange(VOCAB) != (2 if len(history) > 1 and history[-1] == 1 else -1)


def _first_ac_then_bg(history):
    """The expression ([a-d][b-g])*, whose end waits."""
    return _MASKS[len(history) % 2]


_MASKS = np.isin(np.arange(VOCAB), [2, 3, 4, 5, 6, 7]), np.isin(np.arange(VOCAB), [1, 2, 3, 4])


def _no_end_before_9(history):
    return np.arange(VOCAB) >= (1 if len(history) < 10 else 0)


CASES = {
    "plain": ({}, 1000, None),
    "temperature": ({"temperature": 0.7}, 1000, None),
    "hot": ({"temperature": 1.9}, 1000, None),
    "top_k": ({"top_k": 3}, 1000, None),
    "top_p": ({"top_p": 0.75}, 1000, None),
    "min_p": ({"min_p": 0.2}, 1000, None),
    "all filters": (
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05}, 1000, None
    ),
    "repetition": ({"repetition_penalty": 1.5}, 25, None),
    "presence": ({"presence_penalty": 0.9}, 25, None),
    "frequency": ({"frequency_penalty": 0.4}, 25, None),
    "penalties and filters": (
        {
            "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.1,
            "top_k": 5, "top_p": 0.95, "temperature": 0.9,
        },
        25,
        None,
    ),
    "bias": ({"logit_bias": {2: 1.5, 5: -2.0, 7: 0.4}}, 1000, None),
    "allowed ids": ({"allowed_token_ids": [1, 2, 4, 7]}, 1000, _only(1, 2, 4, 7)),
    "bad words": ({"bad_words": ["ab"]}, 200, _not_b_after_a),
    "min_tokens": (
        {"min_tokens": 9, "ignore_eos": False, "logit_bias": {EOS: -2.0}}, 12, _no_end_before_9
    ),
    "grammar": (
        {"structured": {"regex": "([a-d][b-g])*"}, "min_tokens": 100}, 100, _first_ac_then_bg
    ),
}  # fmt: skip


WITH_MANY = {("plain", False), ("all filters", True)}  # (name, trees)


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_tokens_have_the_models_distribution(name, trees):
    params, length, allowed = CASES[name]
    num_draws = MANY_DRAWS if (name, trees) in WITH_MANY else FEW_DRAWS
    assert abs(z_of(params, length, num_draws, trees=trees, allowed=allowed)) < 3.5


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.slow
def test_a_biased_acceptance_is_found(monkeypatch, trees):
    """A draft that differs from its token is accepted in one case of five."""
    accepted_rows, rng = Drafts.accepted_rows, np.random.default_rng(3)

    def biased(self, sampled):
        rows = accepted_rows(self, sampled)
        return rows if len(rows) > 1 or rng.random() > 0.2 else [0, 1]

    monkeypatch.setattr(Drafts, "accepted_rows", biased)
    assert z_of({}, 1000, FEW_DRAWS, trees=trees) > 5


def test_a_token_that_depends_on_the_draft_is_found(monkeypatch):
    """The draft replaces its token in one case of 25."""
    rng, read = np.random.default_rng(4), Drafts.accepted_rows

    def biased(self, sampled):
        if len(self) and rng.random() < 0.04:
            sampled[0] = self.token_ids[0]
        return read(self, sampled)

    monkeypatch.setattr(Drafts, "accepted_rows", biased)
    assert z_of({}, 1000, FEW_DRAWS, trees=False) > 5


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"temperature": 0.8}, {"temperature": 1.0}),
        ({"frequency_penalty": 0.4}, {"frequency_penalty": 0.1}),
        ({"logit_bias": {2: 1.5}}, {"logit_bias": {2: 1.0}}),
    ],
)
@pytest.mark.slow
def test_another_distribution_is_found(params, wanted):
    length = 25 if "frequency_penalty" in params else 1000
    assert z_of(params, length, FEW_DRAWS, trees=False, wanted=wanted) > 5
