"""New weights while an engine serves: prefixes are dropped, requests go on."""

from __future__ import annotations

import asyncio
import threading

import pytest
from safetensors.numpy import load_file

from engine import LLM
from engine.async_engine import AsyncEngine
from engine.errors import EngineError, RequestError
from engine.loading.tensor_reader import TensorReader
from tests.lora_files import GREEDY, Served, tokens_of


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return Served(tmp_path_factory.mktemp("served"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_are_those_of_the_new_weights(served, ranks):
    base = str(served.base)
    with LLM(base, device="cpu", dtype="float32", tensor_parallel_size=ranks) as llm:
        old = [served.want[row, -1] for row in range(4)]
        assert tokens_of(llm, served.prompts[:4], None) == old
        names = llm.update_weights(served.base.parent / "merged2")
        assert "layers.0.qkv" in names
        assert tokens_of(llm, served.prompts[:4], None) == [served.want[row, 2] for row in range(4)]
        llm.update_weights(served.base)
        assert tokens_of(llm, served.prompts[:4], None) == old


def test_a_running_request_goes_on_and_shares_nothing(served):
    new = load_file(served.base.parent / "merged1" / "model.safetensors")
    with LLM(str(served.base), device="cpu", dtype="float32", debug=True) as llm:
        core = llm.llm_engine
        longest = max(range(16), key=lambda row: len(served.prompts[row]))
        prompt = {"prompt_token_ids": served.prompts[longest]}
        core.add_request("old", prompt, GREEDY)
        core.step()
        core.step()
        core.update_weights(new)
        core.add_request("new", prompt, GREEDY)
        tokens = {}
        cached = {}
        while core.has_unfinished_requests():
            for output in core.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                cached[output.request_id] = output.num_cached_tokens
        assert tokens["new"] == served.want[longest, 1] and cached["new"] == 0
        assert len(tokens["old"]) == 12
        assert tokens["old"][0] == served.want[longest, -1][0]


def test_files_that_fail_while_they_are_written_over_the_model(served, monkeypatch):
    """The error says that some weights are new, and no prefix of the old ones is used."""
    prompt = {"prompt_token_ids": (served.prompts[0] * 4)[:40]}
    read = TensorReader.dense_rows

    def fail_at_the_end(reader, place, dtype):
        if place.target.kind == "final_norm":
            raise OSError("input/output error")
        return read(reader, place, dtype)

    with LLM(str(served.base), device="cpu", dtype="float32") as llm:
        llm.generate([prompt], GREEDY)
        assert llm.generate([prompt], GREEDY)[0].num_cached_tokens
        with monkeypatch.context() as patch:
            patch.setattr(TensorReader, "dense_rows", fail_at_the_end)
            with pytest.raises(EngineError, match=r"output error\. Some of the new weights have"):
                llm.update_weights(served.base.parent / "merged1")
        assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0
        llm.update_weights(served.base.parent / "merged1")
        assert tokens_of(llm, served.prompts[:2], None) == [served.want[row, 1] for row in (0, 1)]


def test_the_thread_that_calls_exports_the_arrays(served):
    """A library's current stream, for which DLPack waits, is that of a thread."""
    threads = set()

    class Tensor:
        def __init__(self, array):
            self._array = array

        def __dlpack_device__(self):
            return self._array.__dlpack_device__()

        def __dlpack__(self, **options):
            threads.add(threading.get_ident())
            return self._array.__dlpack__(**options)

    new = load_file(served.base.parent / "merged1" / "model.safetensors")

    async def update(engine):
        with pytest.raises(RequestError, match="must be an array; got str"):
            await engine.update_weights({"x": "y"})
        names = await engine.update_weights({name: Tensor(a) for name, a in new.items()})
        await engine.close()
        return names

    with LLM(str(served.base), device="cpu", dtype="float32") as llm:
        names = asyncio.run(update(AsyncEngine(llm.llm_engine)))
    assert "layers.0.qkv" in names
    assert threads == {threading.get_ident()}


def test_what_is_refused(served):
    with LLM(str(served.base), device="cpu", dtype="float32", tensor_parallel_size=2) as llm:
        with pytest.raises(RequestError, match="source must be a folder with tensor_parallel_size"):
            llm.update_weights({})
        with pytest.raises(RequestError, match="nothing must be a directory with a model"):
            llm.update_weights(served.base.parent / "nothing")
        for wrong in (3, None, ["a"], b"a", ""):
            with pytest.raises(RequestError, match="source must be a folder, or a mapping of arra"):
                llm.update_weights(wrong)
        assert tokens_of(llm, served.prompts[:2], None) == [served.want[row, -1] for row in (0, 1)]
