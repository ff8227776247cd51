"""`LLM`: accepted and refused arguments, and abandoned requests."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engine import LLM, BeamSearchParams, SamplingParams
from engine.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    RequestError,
    TemplateError,
    UnknownOptionError,
)
from engine.parallel import make_engine
from engine.text.tokenizer import ChatPrompt
from tests.e2e.tiny import CONFIG, Words, check_drained, greedy_alone, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture
def llm():
    with LLM(config=CONFIG, load_format="dummy", device="cpu", num_blocks=64) as llm:
        yield llm
        check_drained(llm.llm_engine)


def _ids(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_prompts_may_be_ids_mappings_and_arrays(llm):
    want = greedy_alone(tiny_model(), [5, 6, 7], 3, eos=False)
    array = np.array([[5, 6, 7], [5, 6, 7]], np.uint16)
    for prompts in ([5, 6, 7], {"prompt_token_ids": [5, 6, 7]}, [[5, 6, 7]], array, array[0]):
        outputs = llm.generate(prompts, GREEDY)
        assert _ids(outputs) == [want] * len(outputs)
    assert llm.generate([], GREEDY) == llm.generate((), []) == []
    assert len(llm.generate([[5], [6]], (GREEDY, GREEDY), priority=np.int64(1))) == 2


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (None, {}, "prompts must be a prompt or a sequence of prompts; got NoneType"),
        (5, {}, "prompts must be .*; got int"),
        (b"text", {}, "prompts must be .*; got bytes"),
        ({5, 6}, {}, "prompts must be .*; got set"),
        (np.array(5), {}, "prompts must be .*; got ndarray"),
        ([[]], {}, r"^prompt must have 1 to 255 tokens .*; got 0"),
        ([[5], [-1]], {}, r"prompts\[1\]: prompt\[0\] must be .* \[0, 97\); got -1"),
        ([[5]], {"sampling_params": {"n": 1}}, r"must be one SamplingParams, .*\(dict\)"),
        ([[5]], {"lora_request": "a"}, "lora_request must be one LoRARequest or None, .*; got 'a'"),
        ([[5]], {"sampling_params": 5}, r"sampling_params must be one S.*, or .* \(1\); got 5"),
        ([[5]], {"sampling_params": [GREEDY] * 2}, "sampling_params must be .*; got 2"),
        ([[5]], {"sampling_params": [None]}, r"sampling_params\[0\] must be .*; got NoneType"),
        (
            [[5]],
            {"priority": None},
            r"priority must be one whole number, or one per prompt \(1\); got None",
        ),
        ([[5]], {"priority": 1.5}, "priority must be one whole number, .*; got 1.5"),
        ([[5]], {"priority": [1.5]}, r"^priority must be a whole number .*; got 1.5"),
    ],
)
def test_bad_arguments_are_named(llm, prompts, options, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, **options)


def test_which_of_several_prompts_is_wrong(llm, monkeypatch):
    with pytest.raises(ContextLengthError, match=r"^prompts\[1\]: This model's") as error:
        llm.generate([[5], [6] * 300], GREEDY)
    assert (error.value.num_tokens, error.value.most) == (300, 255)
    with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt\[0\] must be"):
        llm.beam_search([[5], [97]], BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt\[0\] must be"):
        llm.classify([[5], [97]])
    tokenizer = Words()
    tokenizer.encode_prompt = lambda prompt: tokenizer.encode(prompt.text)
    tokenizer.render_chat = lambda messages, **_: ChatPrompt(_template(messages))
    tokenizer.template_variables = lambda has_tools: ()
    monkeypatch.setattr(LLM, "tokenizer", tokenizer)
    one, bad, long = ([{"role": "user", "content": text}] for text in ("w5", "", "w5 " * 300))
    for wrong, message in ((bad, "no content"), (long, "This model's")):
        with pytest.raises(EngineError, match=rf"^messages\[1\]: {message}"):
            llm.chat([one, wrong], GREEDY)
        with pytest.raises(EngineError, match=f"^{message}"):
            llm.chat(wrong, GREEDY)


def _template(messages):
    if not messages[0]["content"]:
        raise TemplateError("no content")
    return messages[0]["content"]


def test_other_bad_arguments_are_named(llm):
    with pytest.raises(RequestError, match="params must be a BeamSearchParams; got SamplingParams"):
        llm.beam_search([5], GREEDY)
    with pytest.raises(RequestError, match=r"must be one SamplingParams, .*\(dict\)"):
        llm.stream([5], {"n": 1})


def test_unknown_options_are_refused_before_loading(monkeypatch):
    monkeypatch.setattr(make_engine, "load", None)  # must not be called
    for name, nearest in (("devcie", "device"), ("max_num_seq", "max_num_seqs")):
        with pytest.raises(UnknownOptionError, match=f"'{name}'; did you mean '{nearest}'"):
            LLM(**{name: 1})


def test_replicas_are_the_servers(monkeypatch):
    monkeypatch.setattr(make_engine, "load", None)  # must not be called
    with pytest.raises(ConfigError, match=r"data_parallel_size must be 1.*engine serve.*got 2"):
        LLM("m", data_parallel_size=2)
    monkeypatch.undo()
    options = {"config": CONFIG, "load_format": "dummy", "device": "cpu", "num_blocks": 8}
    with LLM(**options, data_parallel_size=1) as llm:
        assert len(_ids(llm.generate([[5]], GREEDY))[0]) == 3


@pytest.mark.parametrize(
    "call",
    [LLM.chat, lambda llm, messages: next(llm.stream(messages))],
    ids=["chat", "stream"],
)
def test_a_conversation_needs_a_tokenizer(llm, call):
    with pytest.raises(RequestError, match="messages need a model with a tokenizer"):
        call(llm, [{"role": "user", "content": "hi"}])


def test_chat_and_stream_have_a_priority(llm, monkeypatch):
    seen = []
    add = llm.llm_engine.add_request
    llm.llm_engine.add_request = lambda *given, **options: (
        seen.append(options["priority"]) or add(*given, **options)
    )
    monkeypatch.setattr(LLM, "_chat_prompt", lambda *_: {"prompt_token_ids": [5]})
    monkeypatch.setattr(LLM, "_check_variables", lambda *_: None)
    list(llm.stream([5], GREEDY, priority=-3))
    messages = [{"role": "user", "content": "a"}]
    llm.chat([messages, messages], GREEDY, priority=[2, 1])
    assert seen == [-3, 2, 1]
    with pytest.raises(RequestError, match=r"priority must be a whole number .*; got 1.5"):
        llm.stream([5], GREEDY, priority=1.5)


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("num_read", [0, 1])
def test_an_abandoned_stream_is_aborted(llm, num_read, is_closed):
    stream = llm.stream([5, 6], SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(num_read):
        next(stream)
    if is_closed:
        stream.close()
    else:
        del stream
        gc.collect()
    assert llm.llm_engine.num_unfinished_requests == 0 and not llm._shared.inbox


def test_a_stream_may_be_closed_in_the_middle_of_a_step(llm):
    """As the garbage collector does."""
    streams = [llm.stream([i, 6], SamplingParams(max_tokens=50)) for i in range(5, 8)]
    launch = llm.llm_engine.runner.launch

    def closing(output):
        while streams:
            streams.pop().close()
        return launch(output)

    llm.llm_engine.runner.launch = closing
    want = greedy_alone(tiny_model(), [5, 6, 7], 3, eos=False)
    assert _ids(llm.generate([5, 6, 7], GREEDY)) == [want]
    assert llm.llm_engine.num_unfinished_requests == 0 and not llm._shared.inbox


def test_streams_may_take_turns(llm):
    prompts = [[5, 6], [7, 8, 9]]
    turns = zip(*[llm.stream(prompt, GREEDY) for prompt in prompts], strict=True)
    got = [[output.outputs[0].token_ids[0] for output in outputs] for outputs in turns]
    assert np.transpose(got).tolist() == _ids(llm.generate(prompts, GREEDY))


def test_threads_are_served_together(llm):
    prompts = [[5 + i, 6] for i in range(6)]
    want = _ids(llm.generate(prompts, GREEDY))
    params = BeamSearchParams(beam_width=2, max_tokens=3)

    def search():  # in another batch a probability may differ by rounding
        return [s.token_ids for o in llm.beam_search(prompts[:1], params) for s in o.sequences]

    beams = search()

    def work(number):
        if number == 0:
            return search() == beams
        if number == 1:
            streamed = [list(llm.stream(prompt, GREEDY)) for prompt in prompts]
            return [[i for o in s for i in o.outputs[0].token_ids] for s in streamed] == want
        return _ids(llm.generate(prompts, GREEDY)) == want

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, [0, 1, 2, 2, 2, 2] * 4, timeout=60))


def test_close_twice_and_use_after_close():
    llm = LLM(config=CONFIG, load_format="dummy", device="cpu", num_blocks=8, swap_space_gb=0.001)
    stream = llm.stream([5], GREEDY)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(RequestError, match="the engine was closed"):
        next(stream)
    with pytest.raises(RequestError, match="closed"):
        llm.generate([5], GREEDY)
    with pytest.raises(RequestError, match="closed"):
        llm.beam_search([5], BeamSearchParams(beam_width=2))
