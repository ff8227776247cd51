"""Overrides in a running model: tokens, counts, errors at load, blocks, processes, commands."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine import LLM, AsyncEngine, SamplingParams, device, kernels, load, reference
from engine.cli import main
from engine.config import MlaConfig, MoeConfig
from engine.core.resolve import _has_graphs
from engine.device import Device
from engine.engine_config import EngineConfig
from engine.errors import ConfigError, ContractError, UnknownOptionError
from engine.kernels import _module
from tests.e2e import my_kernels
from tests.e2e.my_kernels import greedy, my_rmsnorm, my_swiglu, plain_swiglu, relu_glu
from tests.e2e.tiny import CONFIG

FILE = Path(my_kernels.__file__)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9], [9, 10], list(range(40, 60))]

QK_NORM = dataclasses.replace(CONFIG, qk_norm=True, num_layers=3)
GEMMA = dataclasses.replace(
    CONFIG, norm_weight_offset=1.0, activation="gelu_tanh", post_norms=True, embed_scale=2.0
)
MOE = dataclasses.replace(CONFIG, moe=MoeConfig(4, 2, 32, (True, True), shared_size=16))
BIAS = dataclasses.replace(CONFIG, gated_mlp=False, parallel=True)


def make(place="cpu", config=CONFIG, **options):
    """Return an LLM with random weights, in float32."""
    if place == "cuda" and not device.resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    given = {"config": config, "load_format": "dummy", "device": place, "dtype": "float32"}
    return LLM("dummy", **(given | {"num_blocks": 64, "max_num_seqs": 4} | options))


def tokens(llm, params=GREEDY, prompts=PROMPTS):
    """Return the generated ids of each prompt."""
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def runs(llm):
    """Return the number of runs of each kernel."""
    return llm.llm_engine.stats().kernel_runs


# ---- the same formula gives the same tokens


@pytest.mark.parametrize(
    ("config", "mine"),
    [
        (CONFIG, {"rmsnorm": my_rmsnorm, "swiglu": my_swiglu}),
        (CONFIG, {"rope": lambda *args: reference.rope(*args)}),
        (CONFIG, {"kv_store": lambda *args: reference.kv_store(*args)}),
        (CONFIG, {"gemm": lambda x, weight: reference.gemm(x, weight)}),
        (CONFIG, {"attention_decode": reference.attention_decode}),
        (CONFIG, {"attention_prefill": reference.attention_prefill}),
        (CONFIG, {"embedding": lambda ids, weight: reference.embedding(ids, weight)}),
        (QK_NORM, {"rmsnorm": my_rmsnorm}),
        (QK_NORM, {"rmsnorm": my_rmsnorm, "rope": lambda *args: reference.rope(*args)}),
        (GEMMA, {"geglu": reference.geglu, "rmsnorm": reference.rmsnorm}),
        (MOE, {"swiglu": my_swiglu, "rmsnorm": my_rmsnorm}),
        (MOE, {"moe_route": reference.moe_route, "moe_combine": reference.moe_combine}),
        (MOE, {"moe_route": lambda *args, **options: tuple(reference.moe_route(*args, **options))}),
        (BIAS, {"silu": reference.silu, "residual_add": lambda x, y: reference.residual_add(x, y)}),
    ],
)
def test_the_same_formula_gives_the_same_tokens(config, mine):
    plain = make(config=config)
    llm = make(config=config, kernels=mine)
    assert tokens(llm) == tokens(plain)
    assert tokens(llm, RANDOM) == tokens(plain, RANDOM)
    for op, function in mine.items():
        assert runs(llm)[f"{op}={function.__name__}"] > 0
        assert op not in runs(llm)


def test_another_formula_gives_other_tokens():
    assert tokens(make(kernels={"swiglu": relu_glu})) != tokens(make())


def test_runs_are_counted():
    """12 steps of 2 layers: each has one activation; the fused op runs as its parts."""
    plain, llm = make(), make(kernels={"swiglu": my_swiglu})
    tokens(plain), tokens(llm)
    assert runs(plain)["gemm"] == runs(llm)["gemm"] == 12 * (2 * 4 + 1)
    assert runs(plain)["sample"] == runs(llm)["sample"] == 12
    assert "swiglu" not in runs(plain)
    assert runs(llm)["swiglu=my_swiglu"] == 12 * 2
    assert set(runs(llm)) - set(runs(plain)) == {"swiglu=my_swiglu"}


def test_the_array_door():
    given = {"config": CONFIG, "load_format": "dummy", "device": "cpu"}
    plain = load(**given)
    mine = load(**given, kernels={"swiglu": relu_glu})
    ids = np.arange(10)[None]
    wanted = plain.step(ids, plain.new_cache(1, 16))
    got = mine.step(ids, mine.new_cache(1, 16))
    with kernels.override("swiglu", relu_glu):
        inside = plain.step(ids, plain.new_cache(1, 16))
    assert np.abs(wanted - got).max() > 1e-3
    np.testing.assert_array_equal(inside, got)
    np.testing.assert_array_equal(plain.step(ids, plain.new_cache(1, 16)), wanted)
    assert mine.kernels.runs["swiglu=relu_glu"] == 2


# ---- blocks


def test_a_block_around_a_running_model():
    llm = make()
    wanted, other = tokens(llm), tokens(make(kernels={"swiglu": relu_glu}))
    assert wanted != other
    for _ in range(2):
        with kernels.override("swiglu", relu_glu):
            assert tokens(llm) == other
        assert tokens(llm) == wanted
    assert runs(llm)["swiglu=relu_glu"] == 2 * 2 * 12


def test_an_override_may_call_what_it_replaces():
    """A probe: it notes its input, and calls the op, alone or as another op's part."""
    seen = []

    def probe(x, weight, eps):
        seen.append(x.shape)
        return kernels.rmsnorm(x, weight, eps=eps)

    llm = make()
    wanted = tokens(llm)
    with kernels.override("rmsnorm", probe):
        assert tokens(llm) == wanted
    assert len(seen) >= 12 * 5  # steps; norms


def test_scalars_and_classes_of_numpy_are_no_arrays():
    """An option may be one: they have `strides`, but no memory that a result could share."""

    def plain(x, weight, **options):
        return kernels.gemm(x, weight, **options)

    x, weight = np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)
    with kernels.override("gemm", plain):
        y = kernels.gemm(x, weight, out_dtype=np.float32)
    np.testing.assert_array_equal(y, np.full((2, 3), 4.0, np.float32))
    with kernels.override("rmsnorm", lambda x, weight, eps: x * weight * eps):
        y = kernels.rmsnorm(x, x[0], eps=np.float32(2.0))
    np.testing.assert_array_equal(y, np.full((2, 4), 2.0, np.float32))


def test_a_block_does_not_use_prefixes_that_other_kernels_computed():
    """Nor the other way around: the prompt is long enough to be cached."""
    prompt = [list(range(5, 90))]
    llm, fresh = make(), make(kernels={"swiglu": relu_glu})
    wanted, other = tokens(llm, prompts=prompt), tokens(fresh, prompts=prompt)
    with kernels.override("swiglu", relu_glu):
        assert tokens(llm, prompts=prompt) == other
        hits = llm.llm_engine.stats().prefix_cache_hits
        assert tokens(llm, prompts=prompt) == other
    assert llm.llm_engine.stats().prefix_cache_hits > hits == 0
    assert tokens(llm, prompts=prompt) == wanted


def test_a_request_across_the_edge_of_a_block_shares_nothing_later():
    """Half of it was computed by other kernels: a later request with its prompt starts anew."""
    prompt = list(range(5, 75))
    engine = make(max_num_batched_tokens=32).llm_engine
    with kernels.override("swiglu", relu_glu):
        engine.add_request("across", prompt, GREEDY)
        engine.step()
    engine.step()
    found = {}
    while engine.is_unfinished("across"):
        found |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
        engine.check_integrity()
    engine.add_request("later", prompt, GREEDY)
    while engine.has_unfinished_requests():
        found |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    assert engine.stats().prefix_cache_hits == 0
    assert found["later"] == tokens(make(), prompts=[prompt])[0]


def test_the_page_runs():
    page = FILE.parents[2] / "docs" / "override.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "16\n"), done.stderr


def test_a_block_comes_before_the_models_own():
    llm = make(kernels={"swiglu": relu_glu})
    with kernels.override("swiglu", my_swiglu):
        assert tokens(llm) == tokens(make())
    assert tokens(llm) != tokens(make())


def test_two_engines_do_not_disturb_each_other():
    plain, llm = make(), make(kernels={"swiglu": relu_glu})
    wanted, other = tokens(plain), tokens(llm)
    found = {}

    def serve(name, llm):
        found[name] = [tokens(llm) for _ in range(3)]

    threads = [threading.Thread(target=serve, args=pair) for pair in (("a", plain), ("b", llm))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": [wanted] * 3, "b": [other] * 3}
    assert "swiglu=relu_glu" not in runs(plain)


def test_an_engine_that_another_thread_steps():
    options = {"config": CONFIG, "load_format": "dummy", "device": "cpu", "num_blocks": 64}

    async def answer(**more):
        engine = AsyncEngine.from_name("dummy", **options, **more)
        outputs = [output async for output in engine.generate(PROMPTS[1], GREEDY)]
        await engine.close()
        return list(outputs[-1].outputs[0].token_ids)

    assert asyncio.run(answer(kernels={"swiglu": my_swiglu})) == tokens(make())[1]
    assert asyncio.run(answer(kernels={"swiglu": relu_glu})) != tokens(make())[1]


# ---- errors at load


@pytest.mark.parametrize(
    ("config", "mine", "error", "text"),
    [
        (
            CONFIG,
            {"rmsnorm": lambda x, weight: x[:, :-1]},
            ContractError,
            r"<lambda> returned \(2, 47\) float32; rmsnorm must return \(2, 48\) float32",
        ),
        (
            GEMMA,
            {"rmsnorm": lambda x, weight: x},
            ConfigError,
            r"kernels\['rmsnorm'\]: <lambda> must take weight_offset= .* with weight_offset=1\.0",
        ),
        (
            GEMMA,
            {"embedding": lambda ids, weight: weight[ids]},
            ConfigError,
            r"must take scale= to run in this model, which calls embedding with scale=2\.0",
        ),
        (CONFIG, {"swigl": relu_glu}, UnknownOptionError, "swiglu"),
        (CONFIG, {"swiglu": 3}, ConfigError, r"kernels\['swiglu'\] must be a function; got 3"),
        (CONFIG, [relu_glu], ConfigError, "kernels must be a mapping"),
        (CONFIG, {"swiglu": "x.py:f"}, ConfigError, r"kernels\['swiglu'\]: .*no file 'x.py'"),
    ],
)
def test_an_override_that_does_not_suit_the_model_is_an_error_at_load(config, mine, error, text):
    with pytest.raises(error, match=text):
        load(config=config, load_format="dummy", device="cpu", kernels=mine)


def test_experts_that_multiply_codes_are_tried_at_load():
    """They do from nine tokens on; the norm before them quantizes for few or very many."""
    given = {"config": MOE, "load_format": "dummy", "device": "cpu", "quantization": "fp8_block"}

    def without(x, weight, routing, *, scatter=False, activation=None, quantize_x=False):
        options = {"scatter": scatter, "activation": activation, "quantize_x": quantize_x}
        return kernels.moe_gemm(x, weight, routing, **options)

    with pytest.raises(ConfigError, match=r"kernels\['moe_gemm'\]: without must take x_scales="):
        load(**given, kernels={"moe_gemm": without})

    def mine(x, weight, *, eps, residual, group):
        return kernels.rmsnorm_quantize(x, weight, eps=eps, residual=residual, group=group)

    prompts = [list(range(40)), list(range(20))]
    options = {"config": MOE, "quantization": "fp8_block"}
    wanted = tokens(make(**options), prompts=prompts)
    counts = []
    for last in (0, 256):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.layers.moe._ROUTED_WITH_CODES", range(9, last + 1))
            llm = make(**options, kernels={"rmsnorm_quantize": mine})
            assert tokens(llm, prompts=prompts) == wanted
            counts.append(runs(llm)["rmsnorm_quantize=mine"])
    assert 0 < counts[0] < counts[1]


def test_only_kernels_that_the_model_runs_are_said_to_keep_their_own(caplog):
    make(kernels={"rmsnorm": my_rmsnorm})
    assert not caplog.records
    count = CONFIG.num_layers
    kinds = {"layer_kinds": ("mla",) * count, "rope_layers": (False,) * count, "attn_scale": 0.3}
    config = dataclasses.replace(CONFIG, mla=MlaConfig(12, 16, 4, 4, 6), **kinds)
    make(config=config, kernels={"rmsnorm": my_rmsnorm})
    assert [record.getMessage() for record in caplog.records] == [
        "kernels['rmsnorm']: my_rmsnorm runs where the model calls rmsnorm; not within mla_store"
    ]


def test_a_function_that_the_model_does_not_call_is_logged(caplog):
    make(kernels={"silu": lambda x: x, "swiglu": relu_glu})
    assert [record.getMessage() for record in caplog.records] == [
        "kernels['silu']: <lambda> did not run when the model was tried: "
        "a prefill, a decode and the sampler do not call silu"
    ]


def test_a_file_is_named(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def half(x):\n    return x[:, : x.shape[1] // 2]\n\n\nnothing = 3\n")
    llm = make(kernels={"swiglu": f"{file}:half"})
    assert tokens(llm) != tokens(make())
    assert runs(llm)["swiglu=half"] == 24
    with pytest.raises(ConfigError, match="has nothing called 'other'"):
        make(kernels={"swiglu": f"{file}:other"})
    with pytest.raises(ConfigError, match="must be a function; got"):
        make(kernels={"swiglu": f"{file}:nothing"})
    file.write_text("import nosuchmodule\n")
    with pytest.raises(ConfigError, match="nosuchmodule"):
        make(kernels={"swiglu": f"{file}:half"})


# ---- the other doors


def test_a_sampler():
    """It replaces temperature and top-k; log-probabilities are the model's."""
    plain, llm = make(), make(kernels={"sample": greedy})
    assert tokens(llm, RANDOM) == tokens(plain) != tokens(plain, RANDOM)
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, ignore_eos=True)
    [wanted], [got] = plain.generate(PROMPTS[0], params), llm.generate(PROMPTS[0], params)
    for one, other in zip(wanted.outputs[0].logprobs, got.outputs[0].logprobs, strict=True):
        assert list(one) == list(other)
        for token in one:
            assert other[token].logprob == pytest.approx(one[token].logprob, abs=1e-5)


def test_a_sampler_without_penalties_refuses_requests_with_penalties():
    """Such a request ends with an error that names the keyword; others go on."""
    llm = make(kernels={"sample": greedy})
    bad = dataclasses.replace(GREEDY, repetition_penalty=1.5)
    first, second = llm.generate([PROMPTS[0], PROMPTS[1]], [bad, GREEDY])
    assert first.outputs[0].finish_reason == "error"
    assert "must take history=" in str(first.outputs[0].stop_reason)
    assert list(second.outputs[0].token_ids) == tokens(make())[1]


@pytest.mark.parametrize("token_id", [1000, -1, 2**32 + 5])
def test_a_sampler_that_chooses_no_token(token_id):
    llm = make(kernels={"sample": lambda logits: np.full(len(logits), token_id)})
    [output] = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, logprobs=1))
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].stop_reason == (
        "the function for the op 'sample' chose an id outside the vocabulary"
    )


def test_logits_processors_for_every_request():
    llm = make(logits_processors=[f"{FILE}:even_ids"])
    assert all(token % 2 == 0 for ids in tokens(llm) for token in ids)
    own = dataclasses.replace(GREEDY, logits_processors=[lambda ids, row: row * (row == row[8])])
    assert {token for ids in tokens(llm, own) for token in ids} != {0}
    with pytest.raises(ConfigError, match="logits_processors must be functions; got 3"):
        make(logits_processors=[3])
    with pytest.raises(ConfigError, match="must be a sequence of functions"):
        make(logits_processors=greedy)


def test_a_proposer():
    wanted = tokens(make())
    for proposer in (my_kernels.repeat_last, f"{FILE}:repeat_last"):
        config = {"proposer": proposer, "num_speculative_tokens": 2, "adaptive": False}
        llm = make(speculative_config=config)
        assert tokens(llm) == wanted
        assert llm.llm_engine.stats().speculation.num_draft_tokens > 0


def test_an_attention_pattern_means_the_same_in_prefill_and_decode():
    given = {"config": CONFIG, "load_format": "dummy", "device": "cpu"}
    model = load(**given, attention_pattern=my_kernels.PATTERN)
    ids = np.arange(40)[None] + 3
    whole = model.step(ids, model.new_cache(1, 64), logits="all")
    cache = model.new_cache(1, 64)
    single = [model.step(ids[:, i : i + 1], cache) for i in range(40)]
    np.testing.assert_allclose(whole[0], np.concatenate(single), atol=1e-5)
    plain = load(**given)
    full = plain.step(ids, plain.new_cache(1, 64), logits="all")
    np.testing.assert_allclose(whole[0, :4], full[0, :4], atol=1e-5)  # nothing is hidden yet
    assert np.abs(whole[0, 4:] - full[0, 4:]).max() > 1e-3


def test_an_attention_pattern_in_an_engine():
    llm = make(attention_pattern={1: my_kernels.PATTERN})
    assert tokens(llm) != tokens(make())
    assert "attention_decode" in runs(llm)  # in layer 0
    numbers = {np.int64(1): my_kernels.PATTERN}
    assert tokens(make(attention_pattern=numbers)) == tokens(llm)
    everything = kernels.Periodic(period=256, width=256)
    assert tokens(make(attention_pattern=everything)) == tokens(make())
    assert tokens(make(attention_pattern=f"{FILE}:PATTERN")) == tokens(
        make(attention_pattern=my_kernels.PATTERN)
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"attention_pattern": 3}, "attention_pattern must be a kernels.Periodic"),
        ({"attention_pattern": {2: my_kernels.PATTERN}}, "from 0 to 1; got 2"),
        ({"attention_pattern": {True: my_kernels.PATTERN}}, "from 0 to 1; got True"),
        (
            {"attention_pattern": my_kernels.PATTERN, "kv_cache_dtype": "fp8"},
            "kv_cache_dtype must be 'auto' with an attention_pattern",
        ),
        (
            {"attention_pattern": my_kernels.PATTERN, "deterministic": True},
            "attention_pattern must be left out with deterministic=True on the CPU",
        ),
    ],
)
def test_patterns_that_cannot_be_are_errors(options, text):
    with pytest.raises(ConfigError, match=text):
        make(**options)


# ---- several processes


@pytest.mark.parametrize("mine", [my_swiglu, f"{FILE}:my_swiglu"])
def test_ranks_load_the_override_from_its_file(mine):
    options = {"tensor_parallel_size": 2, "deterministic": True, "collective_timeout": 30.0}
    wanted = tokens(make(deterministic=True))
    other = tokens(make(deterministic=True, kernels={"swiglu": relu_glu}))
    with make(**options, kernels={"swiglu": mine}).llm_engine as engine:
        assert _answers(engine) == wanted
        with kernels.override("swiglu", relu_glu), pytest.raises(ConfigError, match="kernels="):
            engine.step()
    with make(**options, kernels={"swiglu": relu_glu}).llm_engine as engine:
        assert _answers(engine) == other != wanted


def _answers(engine):
    found = {}
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(f"{index}", prompt, GREEDY)
    while engine.has_unfinished_requests():
        found |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    return [found[f"{index}"] for index in range(len(PROMPTS))]


def test_stages_load_the_override_from_its_file():
    options = {"pipeline_parallel_size": 2, "collective_timeout": 30.0}
    with make(**options, kernels={"swiglu": relu_glu}).llm_engine as engine:
        assert _answers(engine) == tokens(make(kernels={"swiglu": relu_glu}))


def test_a_function_that_cannot_be_sent_is_an_error():
    with pytest.raises(ConfigError, match=r"kernels\['swiglu'\]: each process loads '<lambda>'"):
        make(tensor_parallel_size=2, kernels={"swiglu": lambda x: x})


# ---- commands


def test_generate_takes_kernels_and_processors(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def half(x):\n    return x[:, : x.shape[1] // 2]\n\n\n"
        "def seven(ids, logits):\n    logits[:] = 0\n    logits[7] = 9\n"
    )
    common = ["generate", "The capital of France is", "--device", "cpu", "--max-tokens", "4"]
    common += ["--temperature", "0", "--max-model-len", "64"]
    answers = []
    for more in (
        [],
        ["--kernels", "swiglu=mine.py:half"],
        ["--logits-processors", "mine.py:seven"],
    ):
        with pytest.raises(SystemExit) as ended:
            main([*common, *more])
        assert ended.value.code == 0
        answers.append(capsys.readouterr().out)
    assert len(set(answers)) == 3
    twice = ["--kernels", "swiglu=mine.py:other"]
    for more, said in (
        (["--kernels", "swiglu"], "--kernels must be OP=FILE.py:NAME; got 'swiglu'"),
        (["--kernels", "swiglu=mine.py:half", *twice], "kernels must name each op once; got"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*common, *more])
        assert ended.value.code == 2 and said in capsys.readouterr().err


# ---- CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("swiglu", [my_swiglu, plain_swiglu])
def test_overrides_under_graphs_and_plans(dtype, deterministic, graphs, swiglu):
    """Ops are recorded in launch plans; Python functions run without; graphs hold both."""
    config = dataclasses.replace(QK_NORM, num_layers=4)
    options = {"config": config, "dtype": dtype, "deterministic": deterministic}
    options["cuda_graphs"] = graphs
    mine = {"swiglu": swiglu, "rmsnorm": my_rmsnorm}
    plain, llm = make("cuda", **options), make("cuda", **options, kernels=mine)
    late = _module.stats().compiles_after_ready
    wanted, got = tokens(plain), tokens(llm)
    if dtype == "float32":
        assert got == wanted
    if deterministic:
        assert got == [tokens(llm, prompts=[prompt])[0] for prompt in PROMPTS]
    assert _module.stats().compiles_after_ready == late, _module.stats().late
    name = swiglu.__name__
    assert runs(llm)[f"swiglu={name}"] % 4 == 0 and runs(llm)[f"swiglu={name}"] >= 12 * 4
    assert bool(llm.llm_engine.runner.graphs) == graphs


@pytest.mark.gpu
def test_a_block_has_graphs_of_its_own():
    llm = make("cuda")
    wanted, other = tokens(llm), tokens(make("cuda", kernels={"swiglu": relu_glu}))
    assert wanted != other
    late = _module.stats().compiles_after_ready
    for _ in range(3):
        with kernels.override("swiglu", relu_glu):
            assert tokens(llm) == other
        assert tokens(llm) == wanted
    assert _module.stats().compiles_after_ready == late
    tables = {table for table, _ in llm.llm_engine.runner.graphs._graphs}
    assert len(tables) == 2
    with kernels.override("swiglu", my_swiglu):
        assert tokens(llm) == wanted
    assert len({table for table, _ in llm.llm_engine.runner.graphs._graphs}) == 2


@pytest.mark.gpu
def test_a_function_that_no_graph_can_hold_runs_eagerly(caplog):
    llm = make("cuda", kernels={"swiglu": my_kernels.synchronising_swiglu})
    assert tokens(llm) == tokens(make("cuda"))
    [record] = [r for r in caplog.records if "cannot be captured" in r.getMessage()]
    assert "swiglu=synchronising_swiglu" in record.getMessage()


@pytest.mark.gpu
def test_the_other_doors_on_the_gpu():
    plain = make("cuda")
    assert tokens(make("cuda", kernels={"sample": greedy}), RANDOM) == tokens(plain)
    pattern = kernels.Periodic(period=256, width=256)
    late = _module.stats().compiles_after_ready
    assert tokens(make("cuda", attention_pattern=pattern)) == tokens(plain)
    on_cpu = make(attention_pattern=my_kernels.PATTERN)
    assert tokens(make("cuda", attention_pattern=my_kernels.PATTERN)) == tokens(on_cpu)
    assert _module.stats().compiles_after_ready == late, _module.stats().late


@pytest.mark.parametrize(
    ("num_ranks", "overrides"), [(1, "swiglu=mine"), (2, ""), (2, "swiglu=mine")]
)
def test_ranks_with_overrides_have_no_graphs(num_ranks, overrides):
    model = SimpleNamespace(
        device=Device("cuda"),
        num_ranks=num_ranks,
        num_stages=1,
        kernels=SimpleNamespace(overrides=overrides),
    )
    reasons = {}
    is_refused = num_ranks == 2 and bool(overrides)
    config = EngineConfig(tensor_parallel_size=num_ranks)
    assert _has_graphs(config, model, reasons) != is_refused and "cuda_graphs" in reasons
    if is_refused:
        with pytest.raises(ConfigError, match="tensor_parallel_size=2 and kernels=swiglu=mine"):
            _has_graphs(dataclasses.replace(config, cuda_graphs=True), model, reasons)
