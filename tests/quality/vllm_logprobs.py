"""`python -m tests.quality.vllm_logprobs FOLDER ...`: vLLM's log-probabilities of prompts.

Each FOLDER is a checkpoint that `python -m tests.quality.numerics --keep` wrote. The
log-probabilities of its tokens go to FOLDER.npz, which `--vllm` reads. Needs vLLM, not the engine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np


def logprobs(folder: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the token ids (S, L), and the log-probabilities (S, L, V) of what follows each."""
    from vllm import LLM, SamplingParams

    token_ids = np.load(folder / "token_ids.npy")
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_logprobs=-1,
        max_model_len=token_ids.shape[1] + 1,
        gpu_memory_utilization=0.5,
    )
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    params = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=-1, logprobs=-1, detokenize=False
    )
    found = np.full((*token_ids.shape, vocab_size), np.nan, np.float32)
    for row, ids in enumerate(token_ids.tolist()):
        output = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
        # The first prompt token has no distribution; the sampled one has the last.
        positions = [*list(output.prompt_logprobs)[1:], output.outputs[0].logprobs[0]]
        for column, position in enumerate(positions):
            for token, entry in position.items():
                found[row, column, token] = entry.logprob
    if np.isnan(found).any():
        raise SystemExit(f"vLLM must return all {vocab_size} log-probabilities of each token")
    return token_ids, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    for folder in parser.parse_args().folders:
        token_ids, found = logprobs(folder)
        np.savez(folder.with_suffix(".npz"), token_ids=token_ids, logprobs=found)
        print(folder.with_suffix(".npz"))


if __name__ == "__main__":
    main()
