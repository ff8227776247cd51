"""`python -m tests.quality.numerics`: the reference, the metrics, the paths, and the verdict."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import engine
from engine import kernels
from engine.device import CPU
from tests.quality import float64, numerics
from tests.quality.distances import METRICS, Distance, compare
from tests.quality.made_models import make
from tests.quality.numerics import Plan


def _values(distance):
    return {name: metric(distance, np.arange(len(distance.kl))) for name, metric in METRICS.items()}


def _noisy(reference, scale, seed):
    rng = np.random.default_rng(seed)
    return reference + scale * rng.standard_normal(reference.shape)


@pytest.fixture(scope="module")
def reference():
    return 2.0 * np.random.default_rng(0).standard_normal((256, 50))


# ---- metrics


def test_metrics_of_known_distributions():
    expected = np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    found = np.log([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    distance = Distance.of(found, expected)
    assert distance.kl == pytest.approx([0.25 * np.log(2), 0.0])
    assert distance.is_other_top1.tolist() == [1.0, 0.0]
    assert distance.largest_error == pytest.approx([np.log(2), 0.0])
    assert _values(distance)["top1_other"] == 0.5
    variances = np.var(expected, axis=-1)
    rms = np.sqrt(2 / 3 * np.log(2) ** 2 / variances.sum())
    assert _values(distance)["rms"] == pytest.approx(rms)


def test_log_probabilities_compare_like_logits(reference):
    noisy = _noisy(reference, 0.1, 1)
    shifted = noisy - np.log(np.exp(noisy).sum(axis=-1, keepdims=True))
    found = _values(Distance.of(shifted, reference))
    assert found == pytest.approx(_values(Distance.of(noisy, reference)))
    assert 0.04 < found["rms"] < 0.06  # 0.1 of 2.0


def test_any_number_of_tokens(reference):
    """Rows are compared some at a time, whose number need not divide theirs."""
    rows = np.concatenate([reference, reference])[:-5]
    found = _noisy(rows, 0.1, 1)
    whole = Distance.of(found, rows)
    assert len(rows) % 64 and whole.kl.shape == (len(rows),)
    last = Distance.of(found[-3:], rows[-3:])
    np.testing.assert_array_equal(whole.kl[-3:], last.kl)


def test_other_shapes_are_refused(reference):
    with pytest.raises(ValueError, match=r"shape \(256, 50\); got \(256, 49\)"):
        Distance.of(reference[:, 1:], reference)
    far, short = Distance.of(reference, reference), Distance.of(reference[:9], reference[:9])
    with pytest.raises(ValueError, match="peers must have 256 tokens; got 9"):
        compare(far, short)
    with pytest.raises(ValueError, match="at least 32 tokens; got 9"):
        compare(short, short)


def test_a_larger_distance_is_told_from_chance(reference):
    one = Distance.of(_noisy(reference, 0.1, 1), reference)
    alike = compare(Distance.of(_noisy(reference, 0.1, 2), reference), one)
    assert not any(each.is_farther for each in alike.values())
    assert alike["rms"].ratio == pytest.approx(1, abs=0.05) and alike["rms"].resolution < 0.1
    far = compare(Distance.of(_noisy(reference, 0.15, 3), reference), one)
    assert {name for name, each in far.items() if each.is_farther} >= {"rms", "max", "kl_mean"}
    assert far["rms"].ratio == pytest.approx(1.5, abs=0.1)
    near = compare(one, Distance.of(_noisy(reference, 0.15, 3), reference))
    assert not any(each.is_farther for each in near.values())


def test_equal_distances_have_the_ratio_one(reference):
    exact = Distance.of(reference, reference)
    assert {each.ratio for each in compare(exact, exact).values()} == {1.0}
    noisy = compare(Distance.of(_noisy(reference, 0.1, 1), reference), exact)
    assert noisy["rms"].ratio == float("inf") and noisy["rms"].is_farther


# ---- models and reference


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_every_layer_of_a_random_model_matters(model, tmp_path):
    made = make(model, "tiny", tmp_path, 2, 16)
    whole = float64.logits(made.folder, made.token_ids)
    assert 2 < whole.std() < 4
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    without_last = float64.logits(made.folder, made.token_ids)
    assert np.std(without_last - whole) > 0.3 * whole.std()


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_the_reference_is_what_the_engine_computes_in_float32(model, tmp_path):
    made = make(model, "tiny", tmp_path, 2, 16)
    expected = float64.logits(made.folder, made.token_ids)
    with engine.load(tmp_path, device="cpu", dtype="float32") as loaded:
        found = loaded.step(made.token_ids, loaded.new_cache(2, 16), logits="all")
    assert np.abs(found - expected).max() < 1e-4


def test_smollm2_is_the_model_that_is_loaded_by_name(tmp_path):
    made = make("smollm2", "tiny", tmp_path, 2, 8)
    found = []
    for source in ("smollm2", tmp_path):
        options = {"dtype": "bfloat16", "quantization": "none", "device": "cpu"}
        with engine.load(source, **options) as model:
            found.append(model.step(made.token_ids, model.new_cache(2, 8), logits="all"))
    assert np.array_equal(*found)


def test_an_unknown_architecture_is_refused(tmp_path):
    make("dense", "tiny", tmp_path, 2, 8)
    config = json.loads((tmp_path / "config.json").read_text())
    for wrong, said in (
        ({"model_type": "gemma"}, "got 'gemma'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "got {'rope_type': 'yarn'}"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(ValueError, match=said):
            float64.logits(tmp_path, np.zeros((1, 1), int))


# ---- paths and verdict


class _Peer:
    """In place of transformers: the reference with noise, as much as `scale` says."""

    scale = 0.0

    def __init__(self, folder, dtype, device):
        self._folder = folder
        self._scale = self.scale if dtype == "bfloat16" else 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def prompts(self, token_ids, *, wide_logits=False):
        return _noisy(float64.logits(self._folder, token_ids), self._scale, 1)

    def decoded(self, token_ids, first):
        return self.prompts(token_ids)[:, first:]


def _measured(monkeypatch, scale, **options):
    """Return the rows beside a peer with noise of `scale`; without one if it is None."""
    monkeypatch.setattr(numerics, "find_transformers", lambda: "" if scale is None else "1")
    monkeypatch.setattr(numerics, "Transformers", _Peer)
    monkeypatch.setattr(_Peer, "scale", scale)
    given = {"size": "tiny", "num_sequences": 2, "length": 40, "first": 24, **options}
    return list(numerics.measure(Plan(**given), CPU))


@pytest.fixture(scope="module")
def alone():
    """The rows of both random models without a peer."""
    with pytest.MonkeyPatch.context() as patch:
        return _measured(patch, None, models=("dense", "experts"))


def _of(rows, model, mode, path):
    """Return the row of ours in bfloat16; None if there is none."""
    wanted = (f"{model} tiny", mode, path, "bfloat16")
    found = [r for r in rows if (r["model"], r["mode"], r["path"], r["dtype"]) == wanted]
    return found[0] if found else None


def test_each_path_runs_other_kernels(alone):
    for row in alone:
        if row["path"] in numerics.PARTS:
            default = _of(alone, row["model"].split()[0], row["mode"], "default")
            assert row["ops"] != default["ops"], row["path"]
    fused = set(_of(alone, "experts", "1 request", "default")["ops"])
    assert {"rmsnorm_gemm", "rmsnorm_moe_route", "moe_gemm_combine"} <= fused
    apart = set(_of(alone, "experts", "1 request", numerics.EVERYTHING)["ops"])
    assert not apart & {"rmsnorm_gemm", "rmsnorm_moe_route", "moe_gemm_combine"}
    assert {"rmsnorm", "rope", "kv_store", "residual_add", "moe_route", "moe_combine"} <= apart
    assert "swiglu" in _of(alone, "dense", "prompts", "activations apart")["ops"]
    assert _of(alone, "dense", "prompts", "routing apart") is None


def test_ours_is_as_near_as_its_dtypes_allow(alone):
    for row in alone:
        if row["dtype"] == "float32":
            assert row["rms"] < 1e-5 and row["top1_other"] == 0
        elif row["model"] == "dense tiny":  # rounding changes no choice of experts
            assert 1e-3 < row["rms"] < 4e-2 and row["kl_median"] < 5e-3
    assert {row["mode"] for row in alone} == {"prompts", "1 request", "2 requests"}
    assert {row["path"] for row in alone} >= {"default", "deterministic", *numerics.PARTS}


def test_without_transformers_there_is_no_verdict(alone):
    assert numerics.conclusion(alone) == "no verdict: transformers is not installed"
    assert not any("ratio" in row for row in alone)


def test_the_verdict(monkeypatch):
    rows = _measured(monkeypatch, 0.5, models=("dense",))
    assert numerics.farther(rows) == []
    said = numerics.conclusion(rows).splitlines()
    assert said[-1].startswith("no fused path is farther from float64 than transformers in bf16: ")
    assert len(said) == 1 + len(METRICS) and "dense tiny, RMS: 0." in said[0]
    assert all(row["ratio"]["rms"] < 0.5 for row in rows if row["implementation"] == "ours")
    last = rows[-1]
    worse = last | {"farther": ["rms"], "ratio": last["ratio"] | {"rms": 1.25}}
    assert numerics.farther([*rows[:-1], worse]) == [(worse, "rms")]
    said = numerics.conclusion([*rows[:-1], worse]).splitlines()
    assert said[-2].endswith("are farther from float64 than transformers in bf16:")
    assert said[-1] == f"  dense tiny, {last['mode']}, {last['path']}, rms: 1.250"
    assert "(**1.25**)" in numerics.table([worse]) and "**" not in numerics.table(rows)


def _wrong(factor):
    return lambda x: (kernels.swiglu(x) * np.float32(factor)).astype(x.dtype)


def test_an_inexact_kernel_is_found(monkeypatch):
    monkeypatch.setattr(numerics._Measurement, "_sane", lambda self, row: row)
    with kernels.override(swiglu=_wrong(1.1)):
        rows = _measured(monkeypatch, 0.1, models=("dense",))
    found = {row["path"] for row, name in numerics.farther(rows) if name == "rms"}
    assert "default" in found and "activations apart" not in found  # apart, the op is right


def test_float32_must_be_near_float64(monkeypatch):
    with (
        kernels.override(swiglu=_wrong(1.1)),
        pytest.raises(RuntimeError, match=r"ours in float32 must be within .* the models differ"),
    ):
        _measured(monkeypatch, 0.1, models=("dense",))


def test_vllms_log_probabilities_are_read(monkeypatch, tmp_path):
    made = make("dense", "tiny", tmp_path / "dense", 2, 40)
    logits = float64.logits(made.folder, made.token_ids)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    np.savez(tmp_path / "dense.npz", token_ids=made.token_ids, logprobs=logprobs)
    monkeypatch.setattr(numerics._Measurement, "_ours", lambda self: iter(()))
    rows = _measured(monkeypatch, 0.1, models=("dense",), vllm=tmp_path)
    found = next(row for row in rows if row["implementation"] == "vLLM")
    assert found["mode"] == "prompts" and found["rms"] < 1e-12 and found["ratio"]["rms"] < 1e-9
    np.savez(tmp_path / "dense.npz", token_ids=made.token_ids + 1, logprobs=logprobs)
    with pytest.raises(ValueError, match="must have the token ids of this run"):
        _measured(monkeypatch, 0.1, models=("dense",), vllm=tmp_path)


# ---- the page


def test_the_page_shows_the_data():
    """Every row of its table is one of the data; each machine has its verdict and versions."""
    folder = Path(__file__).parents[1] / "docs" / "benchmarks"
    page = (folder / "numerics.md").read_text()
    shown = [line for line in page.splitlines() if re.match(r"\| (dense|experts|SmolLM2)", line)]
    known = []
    for stem, models, verdict in (
        ("numerics_h200", {"dense 1b", "experts 1b", "SmolLM2-135M"}, "GPU: {} paths by 6 metrics"),
        ("numerics_cpu", {"SmolLM2-135M", "dense 10m", "experts 10m"}, "CPU: {})"),
    ):
        record = json.loads((folder / f"{stem}.json").read_text())
        rows = [row for row in record["rows"] if row["dtype"] == "bfloat16"]
        assert {row["model"] for row in rows} == models
        known += numerics.table(rows, ("rms", "kl_mean", "kl_median")).splitlines()[2:]
        said = numerics.conclusion(rows).splitlines()[-1]
        paths = re.fullmatch(r"(no fused path .* in bf16): (\d+) paths by 6 metrics", said)
        text = page.replace("\n", " ")
        assert paths is not None and paths[1] in text and verdict.format(paths[2]) in text
        version = next(row["version"] for row in rows if row["implementation"] == "transformers")
        for one in (record["date"], record["commit"], f"transformers {version}"):
            assert one in text
    assert len(shown) == 13 and set(shown) <= set(known)


# ---- the command


def _run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["tests.quality.numerics", *map(str, arguments)])
    numerics.main()


def test_the_command_writes_and_prints(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(numerics, "find_transformers", lambda: "1")
    monkeypatch.setattr(numerics, "Transformers", _Peer)
    monkeypatch.setattr(_Peer, "scale", 1e-3)
    sizes = ["--size", "tiny", "--sequences", 2, "--length", 40, "--first", 24]
    out = ["--device", "cpu", "--json", tmp_path / "x.json", "--keep", tmp_path]
    with pytest.raises(SystemExit) as end:
        _run(monkeypatch, "dense", *sizes, *out)
    assert end.value.code == 1  # ours is farther than 1e-3
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "x.json").read_text())
    assert {"card", "date", "commit", "command", "rows"} <= set(record)
    assert np.load(tmp_path / "dense" / "token_ids.npy").shape == (2, 40)
    _run(monkeypatch, "--print", tmp_path / "x.json")
    assert capsys.readouterr().out.splitlines() == [
        line for line in printed.splitlines() if not line.startswith("device")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt"], "no model is called 'gpt'; there are smollm2, dense, experts"),
        (["--first", "200"], "first must be in 1 to 191; got 200"),
        (["--sequences", "1"], "num_sequences must be at least 2; got 1"),
        (["--json", "/no/folder/x"], "--json must name a file in an existing folder"),
    ],
)
def test_bad_options_are_named(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        _run(monkeypatch, "--device", "cpu", *arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err
