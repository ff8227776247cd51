"""An `EngineClient` whose answers are prepared texts, for tests of protocols over HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from engine.async_engine import ModelInfo
from engine.outputs import CompletionOutput, RequestOutput
from engine.sampling_params import RequestOutputKind
from engine.text.tokenizer import load_tokenizer

GOLDEN = json.loads(Path(__file__).parents[1].joinpath("golden/text.json").read_text())


class ScriptedClient:
    """Answers each prompt with `script(prompt, params)`, a text, one token an output.

    Parameters
    ----------
    template : str
        The chat template.
    script : callable
        It may return a text and an exception, which is raised instead of the last token.

    Attributes
    ----------
    prompts, params : list
        Of all requests so far.
    num_aborted : int
        Requests whose generator was closed before its end.
    """

    def __init__(self, template, script, max_model_len=4096):
        self.tokenizer = load_tokenizer(
            GOLDEN["byte_level"]["metadata"] | {"tokenizer.ggml.pre": "gpt-2"},
            chat_template=template,
        )
        self.model_info = ModelInfo("scripted", max_model_len, self.tokenizer.vocab_size)
        self.error = None
        self.is_responsive = True
        self.seems_asleep = False
        self.script = script
        self.prompts, self.params = [], []
        self.num_aborted = 0

    adapters = ()

    def adapter_of(self, model):
        return None

    async def generate(self, prompt, params=None, *, request_id=None, **_):
        ids = prompt["prompt_token_ids"]
        self.prompts.append(prompt["prompt"])
        self.params.append(params)
        answer = self.script(prompt["prompt"], params)
        failure = None
        if isinstance(answer, tuple):
            answer, failure = answer
        is_delta = params.output_kind is RequestOutputKind.DELTA
        pieces = self._pieces(answer, params)
        if not is_delta and failure is None:
            last = pieces[-1]
            every = [token for piece in pieces for token in piece[1]]
            pieces = [("".join(piece[0] for piece in pieces), every, *last[2:])]
        is_finished = False
        try:
            for text, token_ids, reason, stop in pieces:
                await asyncio.sleep(0)
                if failure is not None and reason is not None:
                    raise failure
                completion = CompletionOutput(0, text, token_ids, None, None, reason, stop)
                is_finished = reason is not None
                yield RequestOutput(
                    request_id, None, ids, [completion], is_finished, num_cached_tokens=2
                )
        finally:
            self.num_aborted += not is_finished and failure is None

    def _pieces(self, answer, params):
        """Return (text, token ids, finish reason, stop reason) of each output."""
        reason, stop = "stop", None
        for each in params.stop:
            if each in answer:
                answer, stop = answer[: answer.index(each)], each
        ids = self.tokenizer.encode(answer, add_special_tokens=False)
        if params.max_tokens is not None and len(ids) > params.max_tokens:
            ids, reason, stop = ids[: params.max_tokens], "length", None
        texts = [self.tokenizer.decode(ids[: i + 1], False) for i in range(len(ids))]
        starts = ["", *texts]
        found = [
            [text[len(before) :], [token], None, None]
            for before, text, token in zip(starts, texts, ids, strict=False)
        ] or [["", [], None, None]]
        found[-1][2:] = [reason, stop]
        return found

    async def abort(self, request_id):
        pass

    async def close(self):
        pass
