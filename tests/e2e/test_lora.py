"""Requests of several LoRA adapters in one engine: the tokens of each adapter's merged model."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from engine import LLM, LLMEngine, LoRARequest, SamplingParams, device, load
from engine.errors import RequestError
from engine.kernels._override.scope import current_overrides
from engine.runner import cuda_graph
from tests.lora_files import GREEDY, Served, tokens_of, write_adapter

Q = "model.layers.0.self_attn.q_proj.weight"
Q_KIND = ("qkv",)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return Served(tmp_path_factory.mktemp("served"))


WAYS = {
    "default": {},
    "preemption": {"num_blocks": 14, "max_num_seqs": 8},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "no prefixes": {"enable_prefix_caching": False},
    "swapping": {"num_blocks": 14, "swap_space_gb": 0.1, "preemption_mode": "swap"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "deterministic": {"deterministic": True},
    "one slot": {"max_loras": 1},
    "longest prefix first": {"scheduling_policy": "lpm"},
    "in the order of arrival": {"async_scheduling": True},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "two stages, drafts": {
        "pipeline_parallel_size": 2,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_of_the_merged_models(served, way):
    """Twice: the second time prefixes are cached, and all other adapters have been in the slots."""
    with served.llm(**WAYS[way]) as llm:
        served.check(llm, served.which)
        served.check(llm, served.which[::-1])
        assert llm.llm_engine.list_loras() == tuple(
            dict.fromkeys(f"a{index}" for index in served.which if index >= 0)
        )


def test_a_stream_has_an_adapter(served):
    with served.llm() as llm:
        for index in (-1, 0, 1):
            outputs = llm.stream(served.prompts[0], GREEDY, lora_request=served.request(index))
            got = [token for output in outputs for token in output.outputs[0].token_ids]
            assert got == served.want[0, index]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_bits_do_not_depend_on_the_adapters_of_others(served, quantization):
    """With `deterministic=True`, in 16 bits: of a request with an adapter, and of one without."""
    options = {"dtype": "bfloat16", "deterministic": True, "quantization": quantization}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)

    def logprobs(llm, which):
        prompts = [{"prompt_token_ids": prompt[:9]} for prompt in served.prompts[: len(which)]]
        adapters = [served.request(index) for index in which]
        return [o.outputs[0].logprobs for o in llm.generate(prompts, params, lora_request=adapters)]

    with served.llm(**options, enable_prefix_caching=False) as llm:
        for index in (-1, 2):
            alone = logprobs(llm, [index])
            assert logprobs(llm, [index, 0])[:1] == alone


def test_stages_with_graphs(served):
    """Steps without adapters are laid out for graphs, those with adapters are not."""
    with served.llm(pipeline_parallel_size=2) as llm:
        runner = llm.llm_engine.runner
        runner.capture_graphs(llm.llm_engine.config.scheduler.max_model_len)
        stage = runner.graphs.stage
        staged = []
        runner.graphs.stage = lambda *given: staged.append(stage(*given)) or staged[-1]
        served.check(llm, served.which)
        served.check(llm, [-1] * len(served.which))
    kinds = {one is None for one in staged}
    assert kinds == {True, False}


GPU_WAYS = {
    **{way: WAYS[way] for way in ("default", "preemption", "chunks", "drafts", "deterministic")},
    "kernel by kernel": {"cuda_graphs": False},
    "two stages": {"pipeline_parallel_size": 2},
    "four slots": {"max_loras": 4},
}


@pytest.mark.gpu
@pytest.mark.parametrize("way", GPU_WAYS)
def test_tokens_on_a_gpu(served, way):
    """Graphs with and without adapters, of more and more kinds of weights."""
    place, _ = device.resolve_device("auto")
    if not place.is_cuda:
        pytest.skip("no GPU")
    num_gpus = GPU_WAYS[way].get("pipeline_parallel_size", 1)
    if place.xp.cuda.runtime.getDeviceCount() < num_gpus:
        pytest.skip(f"fewer than {num_gpus} GPUs")
    with served.llm(device="cuda", **GPU_WAYS[way]) as llm:
        served.check(llm, [-1] * len(served.which))
        served.check(llm, served.which)
        served.check(llm, served.which[::-1])


@pytest.mark.parametrize("max_misses", [512, 3])
def test_steps_capture_no_graph(served, tmp_path, monkeypatch, max_misses):
    """Graphs of every adaptable product serve adapters of some, unless requests never end."""
    monkeypatch.setattr(cuda_graph, "_MAX_MISSES", max_misses)
    pairs = {Q: (np.ones((4, 32), "f4"), 0.1 * np.ones((64, 4), "f4"))}
    adapters = [LoRARequest("q", 9, write_adapter(tmp_path / "q", pairs, 4)), None]
    prompts = served.prompts[:2]
    with served.llm() as llm:
        want = tokens_of(llm, prompts, adapters)
    launched, captured = [], []

    def add(table, key, launch, _):
        captured.append(key.adapters)

        def replay():
            launched.append(key.adapters)
            launch()

        table[current_overrides(), key] = SimpleNamespace(launch=replay)
        return True

    with served.llm() as llm:
        core = llm.llm_engine
        core.runner.capture_graphs(core.config.scheduler.max_model_len)
        graphs = core.runner.graphs
        monkeypatch.setattr(graphs, "_add", add)
        monkeypatch.setattr(graphs, "_capturing", nullcontext)
        graphs._is_captured = True
        for key in graphs.keys:
            add(graphs._graphs, key, partial(graphs.compute, key), None)
        general = ("down", "gate_up", "o", "qkv")
        assert set(captured) == {(), general}
        captured.clear()
        assert tokens_of(llm, prompts, adapters) == want
        assert set(captured) == {Q_KIND}
        assert launched[:2] == [general] * 2
        assert launched[-1] == (general if max_misses > 3 else Q_KIND)
        launched.clear()
        captured.clear()
        assert tokens_of(llm, prompts, adapters) == want
        assert set(launched) == {Q_KIND} and not captured


def test_adapters_share_no_prefix(served):
    prompt = served.prompts[int(np.argmax([len(prompt) for prompt in served.prompts]))]
    with served.llm() as llm:

        def cached(index):
            [output] = llm.generate(
                {"prompt_token_ids": prompt}, GREEDY, lora_request=served.request(index)
            )
            return output.num_cached_tokens

        assert cached(-1) == cached(0) == cached(1) == 0
        assert cached(-1) == cached(0) == cached(1) > 0


def test_parallel_samples_and_log_probabilities(served):
    with served.llm() as llm:
        params = SamplingParams(temperature=0.01, max_tokens=4, n=3, logprobs=1, prompt_logprobs=1)
        [output] = llm.generate(
            {"prompt_token_ids": served.prompts[0]}, params, lora_request=served.request(1)
        )
        want = served.want[0, 1][: len(output.outputs[0].token_ids)]
        assert [list(one.token_ids) for one in output.outputs] == [want] * 3
        base = llm.generate({"prompt_token_ids": served.prompts[0]}, params)[0]
        last = served.prompts[0][-1]
        assert output.prompt_logprobs[-1][last].logprob != base.prompt_logprobs[-1][last].logprob


def test_adding_replacing_and_removing(served, tmp_path):
    with served.llm() as llm:
        core = llm.llm_engine
        core.add_lora(LoRARequest("x", 1, served.folders[0]))
        assert tokens_of(llm, served.prompts[:1], [LoRARequest("x")]) == [served.want[0, 0]]
        with pytest.raises(RequestError, match=r"lora_path of 'x' must be '.*a0', as it was"):
            core.add_lora(LoRARequest("x", 1, served.folders[1]))
        core.add_lora(LoRARequest("x", 1, served.folders[1]), load_inplace=True)
        assert tokens_of(llm, served.prompts[:1], [LoRARequest("x")]) == [served.want[0, 1]]
        core.remove_lora("x")
        assert core.list_loras() == ()
        with pytest.raises(RequestError, match="lora_request needs a lora_path for 'x'"):
            tokens_of(llm, served.prompts[:1], [LoRARequest("x")])
        with pytest.raises(RequestError, match=r"lora_name must be one of the adapters \(none\)"):
            core.remove_lora("x")


def test_a_removed_adapter_serves_its_requests_to_their_end(served):
    with served.llm() as llm:
        core = llm.llm_engine
        core.add_request(
            "r", {"prompt_token_ids": served.prompts[2]}, GREEDY, lora_request=served.request(3)
        )
        core.step()
        core.remove_lora("a3")
        tokens = []
        while core.has_unfinished_requests():
            for output in core.step():
                tokens = list(output.outputs[0].token_ids)
        assert tokens == served.want[2, 3]


def test_an_adapter_that_cannot_be_copied_costs_a_step(served):
    """The request is computed again; later ones get the scores of their prompts."""
    with served.llm() as llm:
        core = llm.llm_engine
        write, calls = core.model.write_adapter, []

        def failing(*given):
            calls.append(given)
            if len(calls) == 1:
                raise MemoryError("no room for an adapter")
            write(*given)

        core.model.write_adapter = failing
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
        for index in (1, -1, 2):
            prompt = {"prompt_token_ids": served.prompts[0]}
            [output] = llm.generate(prompt, params, lora_request=served.request(index))
            assert list(output.outputs[0].token_ids) == served.want[0, index]
            assert None not in output.prompt_logprobs[1:]
        assert core.stats().num_step_failures == 1 and len(calls) == 3


def test_a_bad_adapter_is_refused_and_the_others_go_on(served, tmp_path):
    damaged = write_adapter(
        tmp_path / "damaged",
        {
            "model.layers.0.self_attn.q_proj.weight": (
                np.ones((4, 31), "f4"),
                np.ones((64, 4), "f4"),
            )
        },
        4,
    )
    with served.llm() as llm:
        bad = LoRARequest("bad", 9, damaged)
        with pytest.raises(RequestError, match=r"prompts\[1\]: adapter 'bad': module"):
            tokens_of(llm, served.prompts[:2], [None, bad])
        assert not llm.llm_engine.has_unfinished_requests()
        served.check(llm, served.which)
        assert "bad" not in llm.llm_engine.list_loras()


def test_a_child_of_another_adapter_is_refused_by_name(served):
    """Its parent's keys are those of the parent's adapter."""
    prompt = served.prompts[0]
    with served.llm() as llm:
        core = llm.llm_engine
        core.add_request("parent", prompt, GREEDY, lora_request=served.request(0))
        core.step()
        with pytest.raises(RequestError, match=r"must agree with its parent .* LoRA adapter"):
            core.add_request("child", [*prompt, 5], GREEDY, parent="parent")
        assert core.num_unfinished_requests == 1


@pytest.mark.parametrize("max_loras", [1, 2])
def test_two_engines_of_one_model_in_turn(served, max_loras):
    """They share the slots: each brings its adapters back where the other has written its own."""
    options = {"device": "cpu", "dtype": "float32", "progress": False}
    model = load(served.base, enable_lora=True, max_loras=max_loras, **options)
    engines = [LLMEngine(model, num_blocks=32, max_num_seqs=2, debug=True) for _ in range(2)]
    for number in range(6):
        which = (number % 2, 2 + number % 3)
        for engine, index in zip(engines, which, strict=True):
            engine.add_request(
                "r", served.prompts[number], GREEDY, lora_request=served.request(index)
            )
        last = [None, None]
        while any(engine.has_unfinished_requests() for engine in engines):
            for place, engine in enumerate(engines):
                for output in engine.step():
                    last[place] = list(output.outputs[0].token_ids)
        assert last == [served.want[number, index] for index in which]


@pytest.mark.parametrize("request_", ["a", 5, {"lora_name": "a"}])
def test_arguments_that_are_no_request(served, request_):
    with served.llm() as llm, pytest.raises(RequestError, match="lora_request must be"):
        llm.generate("x", GREEDY, lora_request=request_)


def test_arguments_of_a_request():
    for name in ("", "x" * 257, 5, None):
        with pytest.raises(RequestError, match="lora_name must be a str of 1 to 256"):
            LoRARequest(name)
    with pytest.raises(RequestError, match="lora_path must be a str or path; got 5"):
        LoRARequest("a", 1, 5)


def test_a_model_without_room_for_adapters(served):
    llm = LLM(str(served.base), device="cpu")
    with llm, pytest.raises(RequestError, match="'a0' needs a model loaded with enable_lora=True"):
        tokens_of(llm, served.prompts[:1], [served.request(0)])
