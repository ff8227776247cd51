"""sample: the kernels against the mirror, the mirror against plain formulas, and the statistics."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.sample import Config, choose_config
from engine.reference import _exact_math as exact
from engine.reference._philox import gumbel, gumbel_all, philox4x32
from engine.testing import cases_sample
from engine.testing.cases_sample import parameters
from engine.testing.tolerances import assert_close


def _run(xp, logits, **args):
    """Run the op in module `xp`; return its result as NumPy arrays."""
    moved = {k: xp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    result = kernels.sample(xp.asarray(logits), **moved)
    return result._replace(**{k: to_numpy(v) for k, v in result._asdict().items() if v is not None})


def _check(xp, logits, **args):
    """Compare with the mirror: chosen tokens and kept counts must be identical."""
    got, want = _run(xp, logits, **args), reference.sample(logits, **args)
    for name in ("status", "num_kept", "token_ids", "top_ids"):
        if getattr(want, name) is None:
            assert getattr(got, name) is None
        else:
            assert_close(getattr(got, name), getattr(want, name), name=name)
    for name in ("logprobs", "top_logprobs"):
        if getattr(want, name) is None:
            assert getattr(got, name) is None
        else:
            vocab_size = logits.shape[1]
            assert_close(getattr(got, name), getattr(want, name), reduction=vocab_size, name=name)
    return want


# --- the kernels against the mirror ------------------------------------------------------------


@pytest.mark.grid("kind", cases_sample.LOGITS)
@pytest.mark.grid("vocab_size", [1, 63, 1000, 4097, 49152])
def test_matches_mirror(xp, kind, vocab_size):
    names = list(cases_sample.FILTERS)
    logits = cases_sample.logits(kind, len(names), vocab_size)
    columns = {
        name: [cases_sample.FILTERS[case].get(name, default) for case in names]
        for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    args = parameters(len(names), **columns, seeds=np.arange(len(names)), positions=17)
    want = _check(xp, logits, **args, num_logprobs=min(5, vocab_size))
    assert (want.status == 0).all()


@pytest.mark.parametrize("filters", ["plain", "top_k_top_p", "top_p_90"])
def test_matches_mirror_on_a_large_vocabulary(xp, filters):
    logits = cases_sample.logits("normal", 3, 151936)
    args = parameters(3, **cases_sample.FILTERS[filters], seeds=[1, 2, 2**64 - 1], positions=2**40)
    _check(xp, logits, **args, num_logprobs=20)


# More candidates than a list holds, slightly fewer, both kinds of rows, and ties at the cut.
_WALKED = {
    "top_p": {"top_p": [0.9, 0.5, 0.99, 0.7]},
    "cool": {"temperature": [0.6, 0.4, 0.8, 0.5], "top_p": 0.95},
    "min_p": {"min_p": [1e-4, 1e-3, 1e-5, 0.01]},
    "both": {"top_p": 0.97, "min_p": 1e-5},
    "top_k": {"top_k": [1025, 1500, 900, 0], "top_p": [1.0, 0.99, 0.8, 0.9]},
    "few": {"top_p": [0.9, 1.0, 1.0, 0.1], "top_k": [0, 5, 0, 3], "temperature": [1, 0, 1, 0.7]},
}


@pytest.mark.grid("filters", list(_WALKED))
@pytest.mark.grid("kind", ["normal", "rounded", "equal", "sorted"])
@pytest.mark.grid(("num_rows", "vocab_size"), [(1, 60000), (7, 30000), (140, 9000)])
def test_rows_that_are_walked(xp, num_rows, vocab_size, kind, filters):
    logits = cases_sample.logits(kind, num_rows, vocab_size, seed=11)
    columns = {name: np.resize(x, num_rows) for name, x in _WALKED[filters].items()}
    args = parameters(num_rows, **columns, seeds=np.arange(num_rows), positions=5)
    for _ in range(1 if xp is np else 3):  # any assignment of chunks to blocks
        _check(xp, logits, **args, num_logprobs=3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [133, 700])
def test_more_rows_than_are_walked_together(cp, num_rows):
    logits = cases_sample.logits("normal", num_rows, 5000, seed=12) / np.float32(3)
    args = parameters(num_rows, top_p=0.97, seeds=np.arange(num_rows))
    assert (_check(cp, logits, **args).num_kept > 1024).all()


@pytest.mark.grid("filters", ["greedy", "top_k_top_p", "plain"])
@pytest.mark.grid("kind", cases_sample.PROCESSING)
@pytest.mark.grid("vocab_size", [33, 5000])
def test_processing_matches_mirror(xp, kind, filters, vocab_size):
    logits = cases_sample.logits("normal", 9, vocab_size, seed=3)
    before = logits.copy()
    args = parameters(9, **cases_sample.FILTERS[filters], seeds=np.arange(9))
    _check(xp, logits, **args, **cases_sample.processing(kind, 9, vocab_size), num_logprobs=3)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("offset", [0, 1])
def test_padded_rows(xp, offset):
    """The view's rows are padded, aligned or not; the NaN padding is never read."""
    buffer = np.full((4, 1010), np.nan, np.float32)
    logits = cases_sample.logits("normal", 4, 1000)
    buffer[:, offset : offset + 1000] = logits
    args = parameters(4, top_k=[0, 5, 0, 0], top_p=[1, 1, 0.9, 1], temperature=[1, 1, 1, 0])
    view = xp.asarray(buffer)[:, offset : offset + 1000]
    moved = {name: xp.asarray(value) for name, value in args.items()}
    got = kernels.sample(view, **moved, num_logprobs=2)
    want = reference.sample(logits, **args, num_logprobs=2)
    np.testing.assert_array_equal(to_numpy(got.token_ids), want.token_ids)
    np.testing.assert_array_equal(to_numpy(got.top_ids), want.top_ids)


def test_empty_batch(xp):
    got = _run(xp, np.zeros((0, 7), np.float32), **parameters(0), num_logprobs=2)
    assert got.token_ids.shape == got.status.shape == got.logprobs.shape == (0,)
    assert got.top_ids.shape == got.top_logprobs.shape == (0, 2)


# --- rejected and reported inputs --------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_rows_without_a_candidate_are_reported(xp, temperature, top_k):
    logits = cases_sample.logits("normal", 7, 5000)
    logits[0] = np.nan
    logits[1] = -np.inf
    logits[2, 4999] = np.nan
    logits[3, 0] = np.inf
    logits[4, 1:] = -np.inf
    logits[5, 7] = np.nan
    allowed = np.full((7, 157), -1, np.int32)
    allowed[5, 0] &= ~(1 << 7)  # NaN hidden by the mask
    allowed[6] = 0
    args = parameters(7, temperature=temperature, top_k=top_k)
    want = _check(xp, logits, **args, allowed=allowed, num_logprobs=2)
    assert want.status.tolist() == [1, 1, 1, 1, 0, 1, 1]
    assert want.token_ids.tolist() == [-1, -1, -1, -1, 0, -1, -1]
    assert np.isnan(want.logprobs[want.status != 0]).all()
    assert (want.top_ids[want.status != 0] == -1).all()
    _check(xp, logits, **args)


def test_parameters_out_of_range_are_reported(xp):
    bad = [
        {"temperature": np.nan}, {"temperature": -1.0}, {"temperature": np.inf}, {"top_p": 0.0},
        {"top_p": 1.5}, {"top_p": np.nan}, {"min_p": -0.1}, {"min_p": 2.0}, {},
    ]  # fmt: skip
    args = parameters(len(bad))
    for row, values in enumerate(bad):
        for name, value in values.items():
            args[name][row] = value
    want = _check(xp, cases_sample.logits("normal", len(bad), 50), **args)
    assert want.status.tolist() == [2] * 8 + [0]
    history = {"history": np.zeros((3, 1), np.int32), "prompt_lens": np.ones(3, np.int32)}
    history["history_lens"] = np.ones(3, np.int32)
    penalties = np.array([0.0, np.nan, 1.0], np.float32)
    logits = cases_sample.logits("normal", 3, 50)
    want = _check(xp, logits, **parameters(3), **history, repetition_penalty=penalties)
    assert want.status.tolist() == [2, 2, 0]


def test_contract(xp):
    logits = np.zeros((2, 40), np.float32)
    good = parameters(2)
    with pytest.raises(DTypeError, match=r"logits: must be float32; got float64"):
        _run(xp, logits.astype(np.float64), **good)
    with pytest.raises(ShapeError, match=r"top_k: must have shape \(B,\); B = 2 from logits; got"):
        _run(xp, logits, **(good | {"top_k": np.zeros(3, np.int32)}))
    with pytest.raises(DTypeError, match="seeds: must be uint64; got int64"):
        _run(xp, logits, **(good | {"seeds": np.zeros(2, np.int64)}))
    with pytest.raises(ContractError, match="logits: must be of V in 1"):
        _run(xp, logits[:, :0], **good)
    with pytest.raises(ContractError, match=r"num_logprobs: must be None or a whole .* 0\.\.20"):
        _run(xp, logits, **good, num_logprobs=21)
    with pytest.raises(ContractError, match="num_logprobs: must be None or a whole"):
        _run(xp, logits, **good, num_logprobs=True)
    with pytest.raises(ContractError, match="repetition_penalty: must be None without history"):
        _run(xp, logits, **good, repetition_penalty=np.ones(2, np.float32))
    with pytest.raises(ContractError, match="prompt_lens: must be given exactly when history is"):
        _run(xp, logits, **good, history=np.zeros((2, 1), np.int32), history_lens=good["top_k"])
    with pytest.raises(ShapeError, match=r"allowed: must have shape \(B, 2\)"):
        _run(xp, logits, **good, allowed=np.zeros((2, 1), np.int32))
    with pytest.raises(ContractError, match="allowed_rows: must be None without allowed"):
        _run(xp, logits, **good, allowed_rows=np.zeros(2, np.int32))
    with pytest.raises(ShapeError, match=r"allowed_rows: must have shape \(B,\)"):
        masks = np.zeros((3, 2), np.int32)
        _run(xp, logits, **good, allowed=masks, allowed_rows=np.zeros(3, np.int32))


def test_contract_checks_values_on_the_host():
    logits, good = np.zeros((1, 40), np.float32), parameters(1)
    bias = {"logit_bias_values": np.ones(1, np.float32)}
    for bad in (-1, 40):
        with pytest.raises(ContractError, match=r"logit_bias_ids: must be in \[0, 40\)"):
            ids = np.array([bad], np.int32)
            cu = np.array([0, 1], np.int32)
            kernels.sample(logits, **good, **bias, logit_bias_ids=ids, cu_logit_bias=cu)
    with pytest.raises(ContractError, match="cu_logit_bias: must be rising from 0 to 1; got"):
        cu = np.array([0, 2**30, -(2**31), -1, 1], np.int32)  # int32 does not hold the fall
        ids = np.zeros(1, np.int32)
        four = np.zeros((4, 40), np.float32)
        kernels.sample(four, **parameters(4), **bias, logit_bias_ids=ids, cu_logit_bias=cu)
    with pytest.raises(ContractError, match=r"history_lens: must be in 0\.\.1"):
        two, one = np.full(1, 2, np.int32), np.ones((1, 1), np.int32)
        kernels.sample(logits, **good, history=one, history_lens=two, prompt_lens=one[0])


# --- the mirror against plain formulas ---------------------------------------------------------


def _kept_by_formula(logits, temperature, top_k, top_p, min_p):
    """Return the kept ids in order, applying each filter's textbook definition in float64."""
    ids = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    x = np.array([float(logits[i]) for i in ids]) / temperature
    p = np.exp(x - x[0])
    keep = int(np.count_nonzero((p >= min_p) & (p >= 2.0**-40)))
    keep = min(keep, top_k) if top_k > 0 else keep
    share = np.cumsum(p[:keep]) / p[:keep].sum()
    return ids[: int(np.count_nonzero(share < top_p - 1e-12)) + 1][:keep]


@pytest.mark.parametrize("kind", ["normal", "sharp", "rounded", "equal", "sparse"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1, 0, 1, 0), (1, 7, 1, 0), (0.5, 0, 0.75, 0), (2, 0, 1, 0.3), (1.5, 30, 0.9, 0.001)],
)
def test_kept_is_the_formula(kind, temperature, top_k, top_p, min_p):
    logits = cases_sample.logits(kind, 8, 300, seed=5)
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    got = reference.sample(logits, **parameters(8, **filters, seeds=np.arange(8)))
    for row, token, num_kept in zip(logits, got.token_ids, got.num_kept, strict=True):
        want = _kept_by_formula(row, **filters)
        assert num_kept == len(want)
        assert token in want


def test_draw_is_the_largest_noisy_logit():
    logits = cases_sample.logits("normal", 6, 500)
    seeds, positions = np.arange(6, dtype=np.uint64) << np.uint64(40), np.arange(6) + 2**33
    got = reference.sample(logits, **parameters(6, seeds=seeds, positions=positions)).token_ids
    for b in range(6):
        words = [
            philox4x32(
                tuple(np.uint64([n]) for n in (i // 4, int(positions[b]) % 2**32, 2, 0)),
                (np.uint64([0]), seeds[b : b + 1] >> np.uint64(32)),
            )[i % 4][0]
            for i in range(500)
        ]
        u = (np.array(words, np.float64) + 0.5) / 2**32
        assert got[b] == np.argmax(logits[b] - np.log(-np.log(u)))


def test_processing_is_the_formula():
    logits = cases_sample.logits("normal", 6, 70)
    args = cases_sample.processing("everything", 6, 70, seed=1)
    got = reference.sample(logits, **parameters(6, temperature=0), **args)
    for b in range(6):
        row = logits[b].astype(np.float64)
        begin, end = args["cu_logit_bias"][b : b + 2]
        entries = zip(args["logit_bias_ids"], args["logit_bias_values"], strict=True)
        for i, value in list(entries)[begin:end]:
            row[i] += value
        ids = args["history"][b, : args["history_lens"][b]].tolist()
        output = ids[args["prompt_lens"][b] :]
        mask_row = args["allowed_rows"][b]
        for i in range(70):
            if mask_row >= 0 and not args["allowed"][mask_row, i // 32] >> (i % 32) & 1:
                row[i] = -np.inf
            r = float(args["repetition_penalty"][b]) if i in ids else 1.0
            row[i] = row[i] / r if row[i] > 0 else row[i] * r
            row[i] -= float(args["frequency_penalty"][b]) * output.count(i)
            row[i] -= float(args["presence_penalty"][b]) * (i in output)
        assert got.token_ids[b] == np.argmax(row)


def test_logprobs_are_those_of_the_raw_logits(xp):
    logits = cases_sample.logits("normal", 4, 2000)
    args = parameters(4, temperature=0.3, top_k=40, seeds=np.arange(4))
    args |= cases_sample.processing("everything", 4, 2000)
    got = _run(xp, logits, **args, num_logprobs=20)
    x = logits.astype(np.float64)
    want = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(got.logprobs, want[np.arange(4), got.token_ids], rtol=1e-5)
    order = np.argsort(-x, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(want, order, 1), rtol=1e-5)


# Known answers from the authors' Random123 distribution (tests/kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_known_answers(counter, key, want):
    counter, key = ([np.uint64([int(w, 16)]) for w in text.split()] for text in (counter, key))
    words = philox4x32(tuple(counter), tuple(key))
    assert " ".join(f"{int(w[0]):08x}" for w in words) == want


def test_noise_is_gumbel_and_finite():
    seeds, positions = np.array([3, 2**64 - 1], np.uint64), np.array([5, 2**62])
    every = gumbel_all(seeds, positions, 1001)
    ids = np.arange(1001)
    for b in (0, 1):
        each = gumbel(np.full(1001, seeds[b]), np.full(1001, positions[b]), ids)
        np.testing.assert_array_equal(each, every[b])
    sample = gumbel_all(np.arange(500, dtype=np.uint64), np.zeros(500, np.int64), 2000) * np.log(2)
    sample = sample.astype(np.float64) - np.log(np.log(2))  # a standard Gumbel variable
    assert abs(sample.mean() - np.euler_gamma) < 0.005
    assert abs(sample.var() - np.pi**2 / 6) < 0.02


def test_exact_math_is_close_to_the_functions():
    x = -np.random.default_rng(0).random(100_000, np.float32) * np.float32(45)
    want = np.where(x >= -40, 2.0 ** x.astype(np.float64), 0)
    np.testing.assert_allclose(exact.mass(x) * 2.0**-40, want, rtol=2e-7, atol=2.0**-40)
    ends = np.array([0, -1e-20, -1, -40, -40.001, -np.inf], np.float32)
    assert exact.mass(ends).tolist() == [2**40, (2**24 - 1) << 16, 2**39, 1, 0, 0]
    y = np.exp2(x)
    np.testing.assert_allclose(exact.log2(y), np.log2(y.astype(np.float64)), rtol=4e-7, atol=1e-7)


# --- distribution and independence -------------------------------------------------------------


def _chi_square(xp, logits, num_draws, **filters):
    """Return the normalised chi-square statistic, (statistic - df) / sqrt(2 df), of draws at
    positions 0.. against the filters' exact distribution: about standard normal if correct."""
    counts = np.zeros(len(logits), np.int64)
    chunk = 1 << 16
    for start in range(0, num_draws, chunk):
        n = min(chunk, num_draws - start)
        args = parameters(n, **filters, seeds=12345, positions=np.arange(start, start + n))
        result = _run(xp, np.broadcast_to(logits, (n, len(logits))).copy(), **args)
        counts += np.bincount(result.token_ids, minlength=len(logits))
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    kept = _kept_by_formula(logits, **full)
    p = np.exp(logits[kept].astype(np.float64) / full["temperature"])
    want = num_draws * p / p.sum()
    assert counts.sum() == counts[kept].sum() == num_draws
    assert want.min() > 5
    degrees = len(kept) - 1
    return (((counts[kept] - want) ** 2 / want).sum() - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.7}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}]
)
def test_frequencies_are_the_probabilities(xp, filters):
    logits = cases_sample.logits("normal", 1, 24, seed=2)[0] / np.float32(2)
    num_draws = 1 << 17 if xp is np else 1 << 20
    assert abs(_chi_square(xp, logits, num_draws, **filters)) < 4


def test_frequencies_over_seeds(xp):
    """The same position under many seeds is as random as many positions under one."""
    n = 1 << 16
    args = parameters(n, seeds=np.arange(n) * 2**45 + 7, positions=3)
    counts = np.bincount(_run(xp, np.zeros((n, 16), np.float32), **args).token_ids, minlength=16)
    assert ((counts - n / 16) ** 2 / (n / 16)).sum() < 15 + 4 * np.sqrt(30)


def test_a_row_does_not_see_its_neighbours(xp):
    logits = cases_sample.logits("normal", 12, 3000)
    filters = {"top_k": [0, 20, 0] * 4, "top_p": [1, 1, 0.9] * 4, "temperature": [1, 0.5, 2, 1] * 3}
    args = parameters(12, **filters, seeds=np.arange(12), positions=np.arange(12) * 7)
    together = _run(xp, logits, **args).token_ids
    order = np.random.default_rng(0).permutation(12)
    shuffled = _run(xp, logits[order], **{k: v[order] for k, v in args.items()}).token_ids
    np.testing.assert_array_equal(shuffled, together[order])
    for b in range(12):
        alone = {k: v[b : b + 1] for k, v in args.items()}
        assert _run(xp, logits[b : b + 1], **alone).token_ids[0] == together[b]


def test_the_same_seed_and_position_give_the_same_token(xp):
    logits = np.repeat(cases_sample.logits("flat", 1, 4000), 6, axis=0)
    args = parameters(6, seeds=[1, 1, 2, 1, 1, 1], positions=[5, 5, 5, 6, 2**32 + 5, 5])
    tokens = _run(xp, logits, **args).token_ids.tolist()
    assert tokens[0] == tokens[1] == tokens[5]
    assert len(set(tokens[1:5])) == 4


# --- edges -------------------------------------------------------------------------------------


def test_ties_are_cut_in_the_order_of_ids(xp):
    logits = np.zeros((64, 5000), np.float32)
    logits[:, [4000, 30, 7]] = 1.0
    args = parameters(64, top_k=5, seeds=np.arange(64))
    want = _check(xp, logits, **args)
    assert set(want.token_ids.tolist()) <= {7, 30, 4000, 0, 1}
    assert (want.num_kept == 5).all()
    greedy = _check(xp, logits, **parameters(64, temperature=0))
    assert (greedy.token_ids == 7).all()


def test_top_p_takes_what_reaches_it_and_no_more(xp):
    """Four equally likely tokens: top-p 0.5 keeps exactly two, slightly more keeps three."""
    logits = np.full((3, 2100), -np.inf, np.float32)
    logits[:, [5, 6, 2000, 2099]] = -3.0
    above = np.nextafter(np.float32(0.5), np.float32(1))
    want = _check(xp, logits, **parameters(3, top_p=[0.5, above, 0.25], seeds=[1, 2, 3]))
    assert want.num_kept.tolist() == [2, 3, 1]


def test_extreme_filters(xp):
    logits = cases_sample.logits("normal", 4, 700)
    best = logits.argmax(axis=1)
    for filters in ({"top_p": 1e-30}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e-5}):
        want = _check(xp, logits, **parameters(4, **filters, seeds=np.arange(4)))
        np.testing.assert_array_equal(want.token_ids, best)
    same = parameters(4, top_k=10**9, top_p=1.0, seeds=np.arange(4))
    plain = parameters(4, seeds=np.arange(4))
    want = _check(xp, logits, **same)
    np.testing.assert_array_equal(want.token_ids, _check(xp, logits, **plain).token_ids)


def test_equal_logits_stay_equal_when_cold(xp):
    logits = np.full((4096, 9), -5.0, np.float32)
    logits[:, [2, 8]] = 30.0
    tokens = _run(xp, logits, **parameters(4096, temperature=1e-5, positions=np.arange(4096)))
    counts = np.bincount(tokens.token_ids, minlength=9)
    assert counts[2] + counts[8] == 4096
    assert abs(int(counts[2]) - 2048) < 4 * 32


def test_log_probabilities_of_logits_as_far_apart_as_can_be():
    """The difference overflows float32; the mirror returns -inf without a warning."""
    logits = np.array([[3e38, -3e38, 3e38]], np.float32)
    result = reference.sample(logits, **parameters(1, temperature=0), num_logprobs=3)
    assert result.top_ids.tolist() == [[0, 2, 1]]
    half = -np.log(np.float32(2))
    np.testing.assert_allclose(result.top_logprobs, [[half, half, -np.inf]], rtol=1e-6)


def test_masks_of_rows_outside_the_array_allow_every_id(xp):
    logits = cases_sample.logits("normal", 5, 3000, seed=4)
    allowed = np.zeros((2, 94), np.int32)
    allowed[0, 3], allowed[1, 93] = 1 << 5, 1 << 23  # ids 101 and 2999
    rows = np.array([1, -1, 0, 2, -(2**31)], np.int32)
    args = parameters(5, temperature=0)
    got = _check(xp, logits, **args, allowed=allowed, allowed_rows=rows).token_ids
    free = np.argmax(logits, axis=1)
    np.testing.assert_array_equal(to_numpy(got), [2999, free[1], 101, free[3], free[4]])


def test_a_single_allowed_id_is_taken(xp):
    logits = cases_sample.logits("normal", 3, 4099)
    allowed = np.zeros((3, 129), np.int32)
    allowed[:, 128] = 1 << 2  # id 4098
    for filters in ({"temperature": 0}, {"top_k": 3, "top_p": 0.5}, {}):
        want = _check(xp, logits, **parameters(3, **filters), allowed=allowed, num_logprobs=4)
        assert (want.token_ids == 4098).all()


@pytest.mark.parametrize("bias", [100.0, np.inf, np.nan])
def test_a_bias_does_not_allow_a_masked_id(xp, bias):
    """Nor does one that is no number spoil the row of an id that is not allowed."""
    logits = cases_sample.logits("normal", 2, 3000, seed=6)
    allowed = np.full((2, 94), -1, np.int32)
    allowed[:, 3] = ~(1 << 5)  # all but id 101
    biases = {
        "logit_bias_ids": np.array([101, 101, 7], np.int32),
        "logit_bias_values": np.array([bias, bias, 50], np.float32),
        "cu_logit_bias": np.array([0, 1, 3], np.int32),
    }
    got = _check(xp, logits, **parameters(2, temperature=0), **biases, allowed=allowed)
    assert (got.status == 0).all()
    logits[:, 101] = -np.inf
    assert got.token_ids.tolist() == [np.argmax(logits[0]), 7]


def test_config_is_a_pure_function():
    assert choose_config(1, 151936, num_sms=132) == Config(149, 0, 1187, 75)
    assert choose_config(128, 151936, num_sms=132) == Config(149, 0, 1187, 1)
    assert choose_config(500, 5, num_sms=132) == Config(1, 0, 1, 1)
    assert choose_config(1, 262144, num_sms=132) == Config(256, 0, 2048, 128)
    assert choose_config(1, 1 << 21, num_sms=132) == Config(2048, 3, 2048, 132)
