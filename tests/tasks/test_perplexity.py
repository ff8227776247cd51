"""Perplexity and KL divergence against a loop over tokens, and the command around them."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from engine import cli
from engine.errors import ConfigError, RequestError
from engine.tasks import evaluation
from engine.tasks.evaluation import compare, compare_all, perplexity, text_ids
from tests.e2e.tiny import CONFIG, VOCAB, tiny_model

IDS = np.random.default_rng(7).integers(0, VOCAB, 100).tolist()


def random_model(noise=0.0, where="cpu"):
    """Return a model that is far from uniform, the same but for noise in its weights."""
    model, rng = tiny_model(where), np.random.default_rng(3)
    for weight in model.decoder.weights.values():
        if len(weight.shape) == 2:
            drawn = model.device.xp.asarray(noise * rng.standard_normal(weight.shape), "float32")
            weight.data[...] = 8.0 * weight.data + drawn
    return model


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(scope="module")
def other():
    return random_model(noise=0.01)


def log_probs(model, window):
    """Return log-probabilities of the token after each of a window, computed one by one."""
    cache, rows = model.new_cache(1, len(window)), []
    for token in window:
        logits = np.asarray(model.step([[token]], cache)[0], np.float64)
        rows.append(logits - np.log(np.sum(np.exp(logits))))
    return np.array(rows)


def by_hand(model, windows):
    """Return log-probabilities (R, V) and tokens (R,) of each (window, indices scored)."""
    found = [(log_probs(model, window), window, scored) for window, scored in windows]
    rows = [logs[i - 1] for logs, _, scored in found for i in scored]
    return np.array(rows), [window[i] for _, window, scored in found for i in scored]


def nll(model, windows):
    """Return the negative log-likelihoods of the scored tokens."""
    rows, tokens = by_hand(model, windows)
    return -rows[range(len(tokens)), tokens]


def halves(ids, context, bos=None):
    """Return the windows that do not overlap, and the indices of their scored tokens."""
    windows = [ids[i : i + context] for i in range(0, len(ids) - context + 1, context)]
    if bos is not None:
        windows = [[bos, *window[1:]] for window in windows]
    return [(window, range(context // 2 + 1, context)) for window in windows]


def check(result, nll):
    """Compare with the mean and the standard error of these."""
    mean = nll.mean()
    assert result.num_tokens == len(nll)
    assert result.mean_nll == pytest.approx(mean, abs=1e-5)
    assert result.perplexity == pytest.approx(math.exp(mean), rel=1e-5)
    error = math.exp(mean) * np.sqrt(((nll - mean) ** 2).sum() / (len(nll) - 1) / len(nll))
    assert result.standard_error == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize("context", [4, 7, 16, 33, 100])
def test_windows_are_scored_as_a_loop_over_tokens_scores_them(model, context):
    result = perplexity(model, IDS, context)
    check(result, nll(model, halves(IDS, context)))
    assert (result.num_windows, result.context) == (100 // context, context)


def test_the_smallest_windows(model):
    for context, tokens in ((2, 50), (3, 33)):
        result = perplexity(model, IDS, context)
        assert (result.num_windows, result.num_tokens) == (tokens, tokens)
    windows = [(IDS[i : i + 2], [1]) for i in range(0, 100, 2)]
    check(perplexity(model, IDS, 2), nll(model, windows))


def test_a_single_scored_token_has_no_standard_error(model):
    result = perplexity(model, IDS[:2], 2)
    assert result.num_tokens == 1 and math.isnan(result.standard_error)
    assert result.mean_nll == pytest.approx(nll(model, [(IDS[:2], [1])])[0], abs=1e-5)


def test_tokens_after_the_last_whole_window_are_left_out(model):
    assert perplexity(model, IDS[:47], 16) == perplexity(model, IDS[:32], 16)


def test_bos_replaces_the_first_token_of_each_window(model):
    check(perplexity(model, IDS, 16, bos_token_id=5), nll(model, halves(IDS, 16, bos=5)))


@pytest.mark.parametrize(("context", "stride"), [(16, 5), (16, 15), (16, 1), (100, 20), (128, 64)])
def test_with_a_stride_every_token_but_the_first_is_scored_once(model, context, stride):
    windows: dict[int, list[int]] = {}
    for token in range(1, len(IDS)):  # each in the first window that has it
        first = max(0, math.ceil((token - context + 1) / stride)) * stride
        windows.setdefault(first, []).append(token - first)
    pairs = [(IDS[first : first + context], scored) for first, scored in windows.items()]
    check(perplexity(model, IDS, context, stride=stride), nll(model, pairs))


def test_parts_of_a_window_do_not_change_the_result(model, other, monkeypatch):
    whole = compare(model, other, IDS, 33)
    monkeypatch.setattr(evaluation, "_MAX_LOGITS", 3 * VOCAB)
    monkeypatch.setattr(evaluation, "_MAX_FLOAT64", 2 * VOCAB)
    parts = compare(model, other, IDS, 33)
    for name in ("kl_mean", "kl_p99", "ratio", "top1_agreement"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-4), name


def test_a_comparison_is_what_a_loop_over_tokens_finds(model, other):
    result, windows = compare(other, model, IDS, 16), halves(IDS, 16)
    check(result.model, nll(other, windows))
    check(result.reference, nll(model, windows))
    difference = nll(other, windows) - nll(model, windows)
    assert result.ratio == pytest.approx(math.exp(difference.mean()), rel=1e-5)
    error = result.ratio * difference.std(ddof=1) / math.sqrt(len(difference))
    assert result.ratio_error == pytest.approx(error, rel=1e-3)
    (ours, _), (theirs, _) = by_hand(other, windows), by_hand(model, windows)
    kl = (np.exp(theirs) * (theirs - ours)).sum(axis=1)
    assert kl.min() > 1e-5
    assert result.kl_mean == pytest.approx(kl.mean(), rel=1e-3)
    assert result.kl_error == pytest.approx(kl.std(ddof=1) / math.sqrt(len(kl)), rel=1e-3)
    assert result.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-3)
    same = np.mean(ours.argmax(axis=1) == theirs.argmax(axis=1))
    assert 0.5 < same < 1.0 and result.top1_agreement == same


def test_several_models_are_compared_as_each_is(model, other):
    both = compare_all([model, other], model, IDS, 16)
    assert both == [compare(model, model, IDS, 16), compare(other, model, IDS, 16)]
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of"):
        compare(model, model, IDS, 16, kv_cache_dtype="fp9")


def test_pages_of_codes_are_the_models_own(model):
    """The scored half reads the first half from pages: only there do codes differ."""
    result = compare(model, model, IDS, 32, kv_cache_dtype="fp8")
    assert result.reference == perplexity(model, IDS, 32)
    assert result.model == perplexity(model, IDS, 32, kv_cache_dtype="fp8")
    assert 1e-7 < result.kl_mean < 0.01 and result.ratio != 1.0
    both = compare_all([model, model], model, IDS, 32, kv_cache_dtypes=["auto", "fp8"])
    assert both[0].kl_mean == 0.0 and both[1] == result


def test_a_model_is_at_no_distance_from_itself(model):
    result = compare(model, model, IDS, 16)
    assert (result.kl_mean, result.kl_p99, result.kl_error) == (0.0, 0.0, 0.0)
    assert (result.top1_agreement, result.ratio, result.ratio_error) == (1.0, 1.0, 0.0)
    assert result.model == result.reference == perplexity(model, IDS, 16)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "token_ids must have at least 16, a whole window .context.; got 0"),
        ([1], {"stride": 4}, "token_ids must have at least 2, a token to score; got 1"),
        (IDS[:15], {}, "token_ids must have at least 16, .*; got 15"),
        (IDS, {"context": 1}, r"context must be a whole number in \[2, 256\], .*max_model_len; g"),
        (IDS, {"context": 257}, r"context must be a whole number in \[2, 256\], .*; got 257"),
        (IDS, {"context": True}, "context must be a whole number"),
        (IDS, {"stride": 0}, r"stride must be a whole number in \[1, 15\]"),
        (IDS, {"stride": 16}, r"stride must be a whole number in \[1, 15\], less than context"),
        (IDS, {"bos_token_id": VOCAB}, r"bos_token_id must be a whole number in \[0, 96\]"),
        ([*IDS, VOCAB], {}, r"token_ids\[100\] must be in \[0, 97\), the vocabulary; got 97"),
        ("text", {}, "token_ids must be a sequence of token ids; got 'text'"),
    ],
)
def test_bad_arguments_are_named(model, ids, options, message):
    with pytest.raises(RequestError, match=message):
        perplexity(model, ids, **({"context": 16} | options))


def test_a_reference_must_have_the_vocabulary(model):
    larger = tiny_model(config=dataclasses.replace(CONFIG, vocab_size=101))
    with pytest.raises(RequestError, match=r"vocabulary of 101 tokens; .* has 97"):
        compare(model, larger, IDS, 16)


class _Tokenizer:
    bos_token_id = 1

    def __init__(self, adds):
        self.adds = adds

    def encode(self, text, add_special_tokens=True):
        ids = [1 if c == "^" else ord(c) for c in text]
        return [1, *ids] if self.adds and add_special_tokens and text[:1] != "^" else ids


@pytest.mark.parametrize(
    ("adds", "text", "found"),
    [
        (True, "xy", ([1, 120, 121], 1)),
        (True, "^xy", ([1, 120, 121], 1)),
        (False, "xy", ([120, 121], None)),
        (True, "", ([1], 1)),
        (False, "", ([], None)),
    ],
)
def test_texts_begin_with_bos_where_the_tokenizer_adds_it(adds, text, found):
    class Model:
        tokenizer = _Tokenizer(adds)

    assert text_ids(Model(), text) == found


@pytest.mark.gpu
def test_on_a_gpu(cp, model):
    there = random_model(where="cuda")
    expected = perplexity(model, IDS, 16)
    assert perplexity(there, IDS, 16).perplexity == pytest.approx(expected.perplexity, rel=1e-3)
    for ours, theirs in ((there, model), (model, there), (there, there)):
        result = compare(ours, theirs, IDS, 16)
        assert abs(result.kl_mean) < 1e-5 and result.ratio == pytest.approx(1.0, abs=1e-3)


# ------------------------------------------------------------------------------ the command


def _run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", "perplexity", "--device", "cpu", *map(str, arguments)])
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 12)
    return file


def test_the_command_prints_and_writes_the_figures(capsys, text_file, tmp_path):
    out = tmp_path / "result.json"
    options = ["--file", text_file, "--context", 32, "--max-tokens", 70, "--json", out]
    status, text, error = _run(capsys, *options)
    assert status == 0, error
    record = json.loads(out.read_text())
    assert {"card", "date", "version", "commit", "command"} <= set(record)
    [row] = record["rows"]
    assert (row["num_windows"], row["num_tokens"], row["num_text_tokens"]) == (2, 30, 70)
    assert row["loaded"] == {"model": "smollm2", "dtype": "float32", "kv_cache_dtype": "auto"}
    assert f"perplexity {row['perplexity']:.4f} +/- {row['standard_error']:.4f}" in text
    assert "of 30 tokens in 2 windows of 32" in text and "on cpu, float32" in text
    assert 1 < row["perplexity"] < 20  # a sentence said twelve times


def test_the_command_compares_with_other_options_of_the_model(capsys, text_file, tmp_path):
    out = tmp_path / "result.json"
    options = ["--file", text_file, "--context", 32, "--max-tokens", 33, "--json", out]
    status, text, error = _run(capsys, *options, "--compare", "dtype=bfloat16")
    assert status == 0, error
    [row] = json.loads(out.read_text())["rows"]
    assert 0 < row["kl_mean"] < 0.01 and 0.9 < row["ratio"] < 1.1
    assert row["model"]["num_tokens"] == row["reference"]["num_tokens"] == 15
    for word in ("reference  ", "ratio  ", "KL divergence 0.00", "99th percentile", "the same for"):
        assert word in text


def test_the_command_compares_with_a_model(capsys, text_file):
    options = ["--file", text_file, "--context", 32, "--max-tokens", 33, "--stride", 31]
    status, text, error = _run(capsys, *options, "--compare", "smollm2")
    assert status == 0, error
    assert "KL divergence 0.000000 +/- 0.000000 nats, 99th percentile 0.000000" in text
    assert "the same for 100.00 %" in text and "of 32 tokens in 2 windows" in text


def test_the_command_refuses_another_tokenizer(capsys, text_file, monkeypatch):
    from engine.commands import eval as command

    encoded = iter([([1] * 40, None), ([2] * 40, None)])
    monkeypatch.setattr(command, "text_ids", lambda model, text: next(encoded))
    status, _, error = _run(capsys, "--file", text_file, "--compare", "smollm2")
    assert status == 2 and "tokenizer gives the same token ids" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--file", "/no/such/file"), "/no/such/file: cannot be read (No such file or directory)"),
        (("--file", "BAD"), "must be UTF-8; invalid start byte at byte 2"),
        (("--file", "EMPTY"), "empty must have at least 512 tokens, a whole window (--context); "),
        (("--file", "TEXT"), "must have at least 512 tokens, a whole window (--context); got "),
        (("--file", "EMPTY", "--stride", "8"), "empty must have at least 2 tokens, one to score; "),
        (
            ("--file", "TEXT", "--context", "64", "--max-tokens", "9"),
            "--max-tokens must be at least 64, a whole window (--context); got 9",
        ),
        (("--file", "TEXT", "--context", "1"), "context must be a whole number in [2, 8192]"),
        (("--file", "TEXT", "--context", "8193"), "context must be a whole number in [2, 8192]"),
        (("--file", "TEXT", "--max-tokens", "0"), "--max-tokens must be at least 1; got 0"),
        (("--file", "TEXT", "--json", "/no/folder/x"), "--json must name a file in an existing"),
        (("--file", "TEXT", "--compare", "dtype=int3"), "dtype must be one of auto"),
        (("--file", "TEXT", "--compare", "dtype="), "--compare must be a model, or options of"),
        (
            ("--file", "TEXT", "--compare", "kv_cache_dtype=fp8"),
            "--compare must be a model, or options of model=, dtype=, quantization=, device=",
        ),
        (("--file", "TEXT", "--compare", "dtype=float16,x=1"), "got 'x=1'"),
        (("--file", "TEXT", "-q", "int3"), "int3"),
    ],
)
def test_the_command_names_a_bad_option(arguments, message, capsys, tmp_path, text_file):
    (tmp_path / "bad").write_bytes(b"ab\xff")
    (tmp_path / "empty").write_bytes(b"")
    names = {"BAD": tmp_path / "bad", "EMPTY": tmp_path / "empty", "TEXT": text_file}
    status, _, error = _run(capsys, *(names.get(each, each) for each in arguments))
    assert status == 2 and message in error and "Traceback" not in error


def test_the_command_needs_a_text(capsys):
    status, _, error = _run(capsys)
    assert status == 2 and "required: --file" in error
