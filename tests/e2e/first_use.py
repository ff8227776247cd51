"""`python -m tests.e2e.first_use KIND`: serve requests on a GPU; name kernels compiled meanwhile.

CuPy compiles a kernel when it is first used: without an entry in its cache that takes some 200 ms,
in which all requests wait. The process ends with status 1 if a step did that.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
import traceback
from pathlib import Path

import cupy
import numpy as np

from engine import SamplingParams
from engine.config import MoeConfig
from engine.kernels import _module
from tests.e2e.tiny import (
    CONFIG,
    HYBRID,
    VOCAB,
    make_engine,
    mixed_params,
    swap_gb,
    tiny_model,
)
from tests.lora_files import Served, tokens_of

_RANDOM = SamplingParams(temperature=0.9, top_k=9, top_p=0.9, min_p=0.01, seed=1, max_tokens=9)


def _prompts(count):
    rng = np.random.default_rng(0)
    return [rng.integers(4, VOCAB, int(n)).tolist() for n in rng.integers(1, 60, count)]


def _serve(engine, params):
    """Queue requests one after the other, so that steps mix prompts and decodes."""
    for index, prompt in enumerate(_prompts(12)):
        engine.add_request(str(index), prompt, params(index))
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()


def _engine(config=CONFIG, **options):
    return make_engine(tiny_model("cuda", config), cuda_graphs=True, debug=False, **options)


def _sampled(index):
    return mixed_params(index, max_tokens=9)


def _scored(index):
    return dataclasses.replace(_RANDOM, logprobs=3, prompt_logprobs=index % 2 or None)


def _penalised(index):
    return dataclasses.replace(
        _RANDOM,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.2,
        logit_bias={5: 2.0},
        min_tokens=3,
    )


_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
KINDS = {
    "sampling": ({}, _sampled),
    "ahead": ({"async_scheduling": True}, _sampled),
    "scores": ({}, _scored),
    "penalties": ({}, _penalised),
    "drafts": ({"speculative_config": _NGRAM}, _sampled),
    "preemption": ({"num_blocks": 12, "swap_space_gb": swap_gb(32)}, _sampled),
    "hybrid": ({"config": HYBRID}, _sampled),
    "experts": (
        {
            "config": dataclasses.replace(
                CONFIG, moe=MoeConfig(4, 2, 32, (True,) * CONFIG.num_layers)
            )
        },
        _sampled,
    ),
    "adapters": None,
}
"""Options of the engine, and the sampling parameters by a request's number."""


def _with_adapters(start):
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder))
        with served.llm(device="cuda", debug=False) as llm:
            start()
            requests = [served.request(index) for index in served.which]
            tokens_of(llm, served.prompts, requests)


def _caller():
    """Return the place in the engine from which the compiler is called."""
    frames = [frame for frame in traceback.extract_stack() if "/engine/" in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no file of the engine"


def main(kind):
    """Serve requests of a kind."""
    compiled = []
    compiler = cupy.cuda.compiler
    compile_cupy, compile_own = compiler._compile_module_with_cache, _module.compile_module

    def record_cupy(source, *given, **options):
        kernels = " ".join(re.findall(r"__global__ void ([^{]*)", str(source)))
        compiled.append(f"{kernels}in {_caller()}")
        return compile_cupy(source, *given, **options)

    def record_own(spec, *given, **options):
        compiled.append(str(spec))
        return compile_own(spec, *given, **options)

    compiler._compile_module_with_cache, _module.compile_module = record_cupy, record_own

    def start():
        assert compiled, "loading compiles kernels, which must be noticed"
        compiled.clear()

    if kind == "adapters":
        _with_adapters(start)
    else:
        options, params = KINDS[kind]
        engine = _engine(**options)
        start()
        _serve(engine, params)
        engine.close()
    print(*compiled, sep="\n")
    return 1 if compiled else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
