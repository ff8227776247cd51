"""Make the golden files, with transformers on a CPU. Not part of CI.

    pip install torch transformers gguf
    python tests/golden/make.py [tiny [case ...]] [ropes] [smollm2 <path of the .gguf>]

- tiny: `models/<case>.json` and `.npy`: all-position float32 logits and a greedy continuation of
  a tiny random model of every type and rope scaling (`cases.py`, `wrapped.py`,
  `tiny_weights.py`), or of the named cases.
- ropes: `ropes.json`: frequencies and attention factors with the numbers of real models.
- smollm2: `smollm2.json` and `smollm2.npz`: the real weights on real prompts.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import MODELS as OLDER
from cases import ROPES
from cases_hybrid import HYBRIDS
from cases_mla import LATENTS
from cases_switches import SWITCHES
from safetensors.numpy import load_file, save_file
from tiny_weights import tiny_weight
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DynamicCache,
    Mistral4ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter
from wrapped import WRAPPED

# Not in AutoModelForCausalLM
Mistral4ForCausalLM.from_config = Mistral4ForCausalLM._from_config
HERE = Path(__file__).parent
MODELS = OLDER | SWITCHES | WRAPPED | HYBRIDS | LATENTS
# Dense families whose tensors have other names in memory than on disk
RENAMED = ("gpt_neox", "nemotron_h", "olmo_hybrid", "kimi_linear", "bailing_hybrid")
RENAMED += ("exaone", "lfm3", "falcon")
# Ends of their classes' names, in small letters.
ROUTERS = ("topkrouter", "tokenchoicerouter", "v1gate", "gemma4textrouter")
# Families whose norms multiply by 1 + w
OFFSET_NORMS = ("gemma", "vaultgemma", "nemotron", "qwen3_next", "qwen3_5")
PLAIN_NORMS = ("gemma3n", "gemma4", "nemotron_h")
NUM_PROMPT = 28
NUM_NEW = 12
# A greedy choice that rounding could flip proves nothing.
SMALLEST_GAP = 1e-3
# Nor does a choice of experts.
SMALLEST_MARGIN = 1e-3
# Nor do logits that rounding alone moves by as much as the tests allow: the largest difference
# between float32 and float64, in standard deviations.
LARGEST_ROUNDING = 2e-5
# Nor does a recurrence that amplifies rounding: transformers' own two ways to compute it differ by
# at most this many standard deviations.
LARGEST_NOISE = 4e-5

SMOL_PROMPTS = (
    "The capital of France is Paris. The capital of Italy is",
    "<|im_start|>user\nWhy is the sky blue? Answer in two sentences.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "def fibonacci(n):\n    # Grüße, 世界: return the n-th number\n    if n <",
)
SMOL_NEW = 32
SMOL_COLUMNS = 48
SMOL_DIRECTIONS = 16


def load_config(values: dict[str, Any]) -> Any:
    """Have transformers read a config.json, with old keys too."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        return AutoConfig.from_pretrained(folder)


def tiny_model(values: dict[str, Any], norm_mean: float) -> tuple[Any, dict[str, list[int]]]:
    """Return the model and the shapes of its tensors, by name."""
    is_wrapped = "vision_config" in values
    is_causal = not is_wrapped or values["model_type"] == "phi4_multimodal"
    auto = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
    auto = Mistral4ForCausalLM if values["model_type"] == "mistral4" else auto
    model = auto.from_config(
        load_config(values), attn_implementation="eager", dtype=torch.float32
    ).eval()
    state = model.state_dict()
    is_renamed = is_wrapped or values["model_type"] in RENAMED
    if is_renamed or any("experts" in name for name in state):
        return saved_model(model, norm_mean, auto)
    if values["tie_word_embeddings"]:
        del state["lm_head.weight"]
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    weights = {n: torch.from_numpy(tiny_weight(n, s, norm_mean)) for n, s in shapes.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model, shapes


def saved_model(model: Any, norm_mean: float, auto: Any) -> tuple[Any, dict[str, list[int]]]:
    """As `tiny_model`, for tensors with other names or shapes in memory than on disk."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {name: list(array.shape) for name, array in load_file(file).items()}
        weights = {name: tiny_weight(name, shape, norm_mean) for name, shape in shapes.items()}
        save_file(weights, file, metadata={"format": "pt"})
        model = auto.from_pretrained(
            folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
        )
    return model.eval(), shapes


def choice_margin(ranks: torch.Tensor, count: int) -> float:
    """Return how far the last of `count` chosen per row is from the best not chosen.

    In standard deviations, the smallest of all rows; infinite if all are chosen.
    """
    if count >= ranks.shape[1]:
        return np.inf
    ordered = ranks.sort(dim=1, descending=True).values
    gaps = ordered[:, count - 1] - ordered[:, count]
    return float(gaps.min() / ranks[ranks.isfinite()].std())


@torch.no_grad()
def router_margin(model: Any, ids: list[int]) -> float:
    """Return the smallest margin of a choice of experts, or groups; infinite without routers."""
    margins = [np.inf]

    def look_at_closeness(router: Any, logits: torch.Tensor) -> None:
        """See how far logits are from the border of what counts as close to a chosen one."""
        best = logits.topk(2).values
        for chosen in best.T[:, :, None]:
            reach = torch.maximum(logits.abs(), chosen)
            gaps = ((chosen - logits) / reach - 2 * router.router_jitter_noise).abs()
            margins.append(float(gaps.min()))

    def look(router: Any, inputs: Any, outputs: Any) -> None:
        ranks = outputs[0].float()
        if hasattr(router, "router_jitter_noise"):
            look_at_closeness(router, ranks)
        if hasattr(router, "moe_statics"):
            ranks = router.moe_statics(ranks.softmax(-1))
        elif hasattr(router, "classifier"):
            ranks = ranks.softmax(-1) + router.e_score_correction_bias
        elif len(inputs) > 1:  # the correction is an argument
            ranks = ranks.sigmoid() + inputs[1]
        elif type(router) is Mistral4TopkRouter or hasattr(router, "e_score_correction_bias"):
            has_none = type(router) is Mistral4TopkRouter
            ranks = (
                ranks.softmax(-1) if has_none else ranks.sigmoid() + router.e_score_correction_bias
            )
            groups = ranks.view(len(ranks), router.num_group, -1)
            of_group = groups.topk(2).values.sum(-1)
            margins.append(choice_margin(of_group, router.topk_group))
            kept = of_group >= of_group.topk(router.topk_group).values[:, -1:]
            ranks = groups.masked_fill(~kept[:, :, None], -np.inf).view(ranks.shape)
        is_gemma = not hasattr(router, "top_k")
        margins.append(
            choice_margin(ranks, router.config.top_k_experts if is_gemma else router.top_k)
        )

    def look_at_scores(router: Any, inputs: Any, outputs: Any) -> None:
        margins.append(choice_margin(outputs[1].float(), router.top_k))

    hooks = [
        module.register_forward_hook(look_at_scores if name == "llama4router" else look)
        for module in model.modules()
        if (name := type(module).__name__.lower()).endswith((*ROUTERS, "llama4router"))
    ]
    all_logits(model, ids, one_by_one=False)
    for hook in hooks:
        hook.remove()
    return min(margins)


@torch.no_grad()
def all_logits(model: Any, ids: list[int], one_by_one: bool, dtype: Any = np.float32) -> np.ndarray:
    """Return (T, V) logits, from one pass or token by token."""
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model = model.language_model  # the whole model fails without an image
    if not one_by_one:
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        return (logits.double() if dtype == np.float64 else logits.float()).numpy()
    cache, rows = DynamicCache(config=model.config), []
    for token in ids:
        where = torch.tensor([[len(rows)]])  # Bamba does not take it from the cache
        logits = model(torch.tensor([[token]]), position_ids=where, past_key_values=cache).logits
        rows.append(logits[0, -1].numpy())
    return np.stack(rows)


def greedy(model: Any, ids: list[int], count: int, one_by_one: bool) -> tuple[list[int], float]:
    """Return a greedy continuation, and the smallest margin of a choice over the runner-up."""
    ids, gap = list(ids), np.inf
    for _ in range(count):
        last = all_logits(model, ids, one_by_one)[-1]
        second, first = np.sort(last)[-2:]
        gap = min(gap, float(first - second))
        ids.append(int(last.argmax()))
    return ids[-count:], gap


def rounding(model: Any, ids: list[int], one_by_one: bool) -> float:
    """Return how far float32 logits are from float64's, in standard deviations."""
    rounded = all_logits(model, ids, one_by_one)
    exact = all_logits(model.double(), ids, one_by_one, np.float64)
    model.float()
    return float(np.abs(rounded - exact).max() / exact.std())


def recurrence_noise(model: Any, prompt: list[int]) -> float:
    """Return how far logits token by token are from those of one pass, in standard deviations."""
    whole, steps = (all_logits(model, prompt, one_by_one) for one_by_one in (False, True))
    return float(np.abs(whole - steps).max() / whole.std())


def make_tiny(only: list[str]) -> None:
    folder = HERE / "models"
    folder.mkdir(exist_ok=True)
    for case in only or MODELS:
        values = MODELS[case]
        vocab_size = values.get("text_config", values)["vocab_size"]
        kind = values["model_type"]
        has_offset = kind.startswith(OFFSET_NORMS) and not kind.startswith(PLAIN_NORMS)
        norm_mean = 0.0 if has_offset else 1.0
        # NOTE: dynamic NTK depends on how tokens are fed; our convention is one by one.
        one_by_one = "dynamic" in case
        for attempt in range(100):
            seed = int.from_bytes(hashlib.sha256(f"{case}{attempt}".encode()).digest()[:4], "big")
            prompt = np.random.default_rng(seed).integers(4, vocab_size, NUM_PROMPT).tolist()
            model, shapes = tiny_model(values, norm_mean)
            tokens, gap = greedy(model, prompt, NUM_NEW, one_by_one)
            margin = router_margin(model, prompt + tokens)
            is_clear = gap > SMALLEST_GAP and margin > SMALLEST_MARGIN
            # Recurrences compute in float32 whatever their dtype.
            noise = recurrence_noise(model, prompt) if case in HYBRIDS else 0.0
            rounded = 0.0 if case in HYBRIDS else rounding(model, prompt, one_by_one)
            if is_clear and rounded < LARGEST_ROUNDING and noise < LARGEST_NOISE:
                break
        model, _ = tiny_model(values, norm_mean)
        logits = all_logits(model, prompt, one_by_one)
        record = {
            "config": values,
            "norm_mean": norm_mean,
            "tensors": shapes,
            "prompt": prompt,
            "greedy": tokens,
        }
        (folder / f"{case}.json").write_text(json.dumps(record, indent=1) + "\n")
        np.save(folder / f"{case}.npy", logits.astype(np.float32))
        print(
            f"{case}: attempt {attempt}, gap {gap:.4f}, router margin {margin:.4f}, "
            f"std {logits.std():.3f}, "
            f"tokens {tokens}"
        )


def make_ropes() -> None:
    records = {}
    for case, (values, length) in ROPES.items():
        config = load_config(values)
        function = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]]
        frequencies, factor = function(config, torch.device("cpu"), seq_len=length)
        records[case] = {
            "config": values,
            "length": length,
            "inv_freq": [float(f) for f in frequencies],
            "attention_factor": float(factor),
        }
    (HERE / "ropes.json").write_text(json.dumps(records, indent=1) + "\n")


def median_distance(half: np.ndarray, exact: np.ndarray) -> float:
    """Return the median over positions of 1 - cosine similarity of the logits."""
    half, exact = half.astype(np.float64), exact.astype(np.float64)
    norms = np.linalg.norm(half, axis=-1) * np.linalg.norm(exact, axis=-1)
    return float(np.median(1 - (half * exact).sum(-1) / norms))


def make_smollm2(path: Path) -> None:
    options = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()
    halves = {
        name: AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=getattr(torch, name), attn_implementation="eager", **options
        ).eval()
        for name in ("float16", "bfloat16")
    }
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    vocab_size = model.config.vocab_size
    columns = np.sort(np.random.default_rng(0).choice(vocab_size, SMOL_COLUMNS, replace=False))
    directions = np.random.default_rng(1).standard_normal((vocab_size, SMOL_DIRECTIONS))
    records, arrays = [], {"columns": columns.astype(np.int32)}
    for index, text in enumerate(SMOL_PROMPTS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        with torch.no_grad():
            out = model.generate(
                torch.tensor([ids]), max_new_tokens=SMOL_NEW, do_sample=False, use_cache=True
            )
        tokens = out[0, len(ids) :].tolist()
        logits = all_logits(model, ids + tokens, one_by_one=False)
        second, first = np.sort(logits[len(ids) - 1 : -1], axis=-1)[:, -2:].T
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == tokens
        records.append(
            {
                "text": text,
                "ids": ids,
                "greedy": tokens,
                "gap": float((first - second).min()),
                "std": float(logits.std()),
            }
        )
        records[-1]["half_precision_distance"] = {
            name: median_distance(all_logits(half, ids + tokens, one_by_one=False), logits)
            for name, half in halves.items()
        }
        arrays[f"columns_{index}"] = logits[:, columns]
        arrays[f"projected_{index}"] = (logits @ directions).astype(np.float32)
        print(records[-1], tokenizer.decode(tokens))
    (HERE / "smollm2.json").write_text(json.dumps(records, indent=1) + "\n")
    np.savez_compressed(HERE / "smollm2.npz", **arrays)


def main(args: list[str]) -> None:
    if not args or "tiny" in args:
        make_tiny([case for case in args if case in MODELS])
    if not args or "ropes" in args:
        make_ropes()
    if "smollm2" in args:
        make_smollm2(Path(args[args.index("smollm2") + 1]))


if __name__ == "__main__":
    main(sys.argv[1:])
