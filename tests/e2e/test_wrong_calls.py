"""Wrong calls: each is a `RequestError` that names the argument, and leaves nothing behind.

Also calls at a wrong moment: from within a step, or from a second thread.
"""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from engine import SamplingParams, load
from engine.checks import shown
from engine.errors import ConfigError, EngineError, OutOfMemoryError, RequestError
from engine.tasks.beam_search import BeamSearchParams
from tests.e2e.tiny import CONFIG, VOCAB, make_engine, make_llm, run, tiny_model

HUGE = 10**5000  # str() of it raises
SHORT = SamplingParams(max_tokens=3, temperature=0)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def engine(model):
    return make_engine(model)


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        *[("timeout", v, "digits") for v in (10**400, HUGE, -HUGE)],
        *[("timeout", v, "got") for v in (True, 0, np.array(1.0), float("nan"), "1")],
        *[("priority", v, "digits") for v in (HUGE, -HUGE)],
        *[("priority", v, "got") for v in (2**31, -(2**31), True, None, np.array(1))],
        *[("priority", v, "got") for v in (np.int64(2**40), np.timedelta64(1, "s"))],
        *[("parent", v, "got") for v in ([], {}, 5, "nobody", np.array(1))],
        ("parent", HUGE, "digits"),
        *[("cache_salt", v, "digits") for v in (HUGE, [HUGE])],
        *[("request_id", v, "got") for v in ([], None, b"r")],
        ("request_id", HUGE, "digits"),
        *[("params", v, "got int") for v in (5, HUGE)],
        *[("prompt", v, "got") for v in (HUGE, None, b"ab", np.array(1), np.zeros((2, 2), int))],
        *[("prompt", v, "got") for v in ([], [True], [1.0], [VOCAB], [np.timedelta64(1, "s")])],
        ("prompt", [5, HUGE], r"\[1\].*digits"),
        *[("prompt", v, "at most 255 tokens") for v in (range(10**8), range(10**30))],
        *[("prompt", {"prompt_token_ids": v}, "got") for v in (None, {}, {5: 6}, "text")],
        ("prompt", {"prompt": 5, "prompt_token_ids": [5]}, "got 5"),
        ("prompt", {HUGE: 1}, "digits"),
    ],
    ids=shown,  # the ids that pytest makes itself fail on a huge int
)
def test_a_refused_request_leaves_nothing(engine, name, value, got):
    arguments = {"request_id": "r", "prompt": [5], "params": SHORT, name: value}
    with pytest.raises(RequestError, match=f"{name}.*{got}") as error:
        engine.add_request(**arguments)
    assert len(str(error.value)) < 300
    assert not engine.has_unfinished_requests()
    engine.check_integrity()


@pytest.mark.parametrize("endless", [lambda: itertools.repeat(5), itertools.count])
def test_of_an_endless_prompt_no_more_is_read_than_fits(model, engine, endless):
    with pytest.raises(RequestError, match="at most 255 tokens"):
        engine.add_request("r", endless())
    with pytest.raises(RequestError, match="at most 255 tokens"):
        make_llm(model).generate(endless(), SHORT)
    with pytest.raises(RequestError, match=r"priority .*got more"):
        make_llm(model).generate([[5], [6]], SHORT, priority=endless())
    assert not engine.has_unfinished_requests()


def test_iterators_of_prompts_and_of_ids_are_served(model):
    llm = make_llm(model)
    want = [output.outputs[0].token_ids for output in llm.generate([[5, 6], [7]], SHORT)]
    for prompts in (iter([[5, 6], [7]]), iter([iter([5, 6]), iter([7])])):
        outputs = llm.generate(prompts, SHORT)
        assert [output.outputs[0].token_ids for output in outputs] == want
    [output] = llm.generate(iter([5, 6]), SHORT)
    assert output.outputs[0].token_ids == want[0]


@pytest.mark.parametrize("kind", [int, np.int8, np.int32, np.int64])
def test_numpy_priorities_are_those_of_python(model, kind):
    """An int32 would wrap where the queue adds to it, and be served first."""
    engine = make_engine(model, max_num_seqs=1)
    low, high = (kind(100), kind(-100)) if kind is np.int8 else (kind(2**31 - 1), kind(1 - 2**31))
    engine.add_request("low", [5], SHORT, priority=low)
    engine.add_request("middle", [5], SHORT)
    engine.add_request("high", [5], SHORT, priority=high)
    requests = list(engine.scheduler.unfinished_requests())
    assert {type(request.priority) for request in requests} == {int}
    assert list(run(engine)) == ["high", "middle", "low"]


@pytest.mark.parametrize(
    "ids",
    [None, 5, HUGE, b"r", [5], [[]], ["r", None], np.array(1), itertools.repeat("x")],
    ids=shown,
)
def test_abort_refuses_what_are_no_ids_and_aborts_none(model, ids):
    engine = make_engine(model)
    engine.add_request("r", [5], SHORT)
    for method in (engine.abort_request, engine.forget_aborted):
        with pytest.raises(RequestError, match="request_ids must"):
            method(ids)
    assert engine.is_unfinished("r")
    assert run(engine)["r"].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("kind", ["array", "empty_array", "timedelta64"])
def test_values_that_compare_strangely_are_refused_by_name(model, kind):
    """An array has no truth value, and a timedelta64 calls itself an integer."""
    strange = {"array": np.arange(3), "empty_array": np.zeros(0)}
    value = strange.get(kind, np.timedelta64(1, "s"))
    cache = model.new_cache(1, 8)
    calls = {
        "block_size": lambda: model.new_cache(1, 8, block_size=value),
        "max_tokens": lambda: model.new_cache(1, value),
        "logits": lambda: model.step([[5]], cache, logits=value),
        "load_format": lambda: load(config=CONFIG, load_format=value, device="cpu"),
        "dtype": lambda: load(config=CONFIG, load_format="dummy", device="cpu", dtype=value),
        "preemption_mode": lambda: make_engine(model, preemption_mode=value),
        "debug": lambda: make_engine(model, debug=value),
    }
    for name, call in calls.items():
        with pytest.raises((ConfigError, RequestError), match=f"{name} must be .*got"):
            call()


def test_huge_values_of_other_arguments_have_a_short_message(model):
    cache = model.new_cache(1, 8)
    calls = {
        "max_tokens": lambda: model.new_cache(1, HUGE),
        "block_size": lambda: model.new_cache(1, 8, block_size=[5] * 10**6),
        "logits": lambda: model.step([[5]], cache, logits=HUGE),
        "num_tokens": lambda: cache.truncate(HUGE),
        "row": lambda: cache.truncate(0, row=HUGE),
        "ignore_eos": lambda: BeamSearchParams(beam_width=2, ignore_eos=HUGE),
        "preemption_mode": lambda: make_engine(model, preemption_mode=HUGE),
        "device": lambda: load(config=CONFIG, load_format="dummy", device=HUGE),
    }
    for name, call in calls.items():
        with pytest.raises(EngineError, match=f"{name} must be") as error:
            call()
        assert len(str(error.value)) < 300


def test_an_endless_list_of_prompts_is_refused(model):
    llm = make_llm(model)
    with pytest.raises(RequestError, match=f"prompts must be at most {2**20}; got more"):
        llm.generate(itertools.repeat("w5"), SHORT)
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_swap_space_beyond_the_hosts_memory(model, monkeypatch):
    def no_memory(*_):
        raise MemoryError("no")

    monkeypatch.setattr("engine.cache.swap.np.empty", no_memory)
    with pytest.raises(OutOfMemoryError, match="swap_space_gb must fit in the host's memory"):
        make_engine(model, swap_space_gb=0.001)


# ---- calls at a wrong moment


def _within(seconds, function):
    """Run `function` in a thread, and fail if it hangs."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"


def test_a_logits_processor_cannot_use_its_llm():
    llm, errors, outputs = make_llm(tiny_model()), [], []

    def call(ids, logits):
        for method in (llm.generate, llm.stream, llm.reset_prefix_cache, llm.close):
            arguments = ([5], SHORT) if method in (llm.generate, llm.stream) else ()
            with pytest.raises(RequestError, match="a logits processor") as error:
                method(*arguments)
            errors.append(error)
        llm.generate([5], SHORT)

    params = SamplingParams(max_tokens=3, logits_processors=[call])
    _within(60, lambda: outputs.extend(llm.generate([[5], [6]], [params, SHORT])))
    bad, good = outputs
    assert len(errors) == 4 and bad.outputs[0].finish_reason == "error"
    assert "the LLM was called from within" in bad.outputs[0].stop_reason
    assert good.outputs[0].finish_reason == "length"
    assert llm.generate([6], SHORT)[0].outputs[0].token_ids == good.outputs[0].token_ids
    llm.llm_engine.check_integrity()
    llm.close()


def _calls(engine):
    return {
        "step": engine.step,
        "add_request": lambda: engine.add_request("new", [5], SHORT),
        "abort_request": lambda: engine.abort_request("r"),
        "forget_aborted": lambda: engine.forget_aborted(["r"]),
        "reset_prefix_cache": engine.reset_prefix_cache,
        "close": engine.close,
    }


@pytest.mark.parametrize("other_thread", [False, True], ids=["same-thread", "other-thread"])
def test_an_engine_is_in_one_call_at_a_time(model, other_thread):
    engine, names = make_engine(model), []

    def use():
        for name, call in _calls(engine).items():
            with pytest.raises(RequestError, match=f"LLMEngine.{name} .*one thread at a time"):
                call()
            names.append(name)

    def processor(ids, logits):
        if not names:
            _within(60, use) if other_thread else use()
        return logits

    engine.add_request("r", [5], SamplingParams(max_tokens=3, logits_processors=[processor]))
    outputs = run(engine)
    assert list(outputs) == ["r"] and outputs["r"].outputs[0].finish_reason == "length"
    assert names == list(_calls(engine))


def test_threads_can_take_turns_with_an_engine(model):
    engine, outputs = make_engine(model), {}
    _within(60, lambda: engine.add_request("r", [5], SHORT))
    _within(60, lambda: outputs.update(run(engine)))
    assert outputs["r"].finished
    with pytest.raises(RequestError):
        engine.add_request("r", None)
    engine.close()  # the refused call has left the engine


def test_step_refuses_a_long_range_before_it_is_copied(model):
    cache = model.new_cache(1, 8)
    with pytest.raises(RequestError, match=r"token_ids must have B = 1 rows.*got 1000000000"):
        model.step(range(10**9), cache)
