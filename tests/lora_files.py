"""Random LoRA adapters as peft writes them, and the checkpoints with the same adapters merged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import engine
from engine import LLM, LoRARequest, SamplingParams
from engine.loading.weight_table import matrix_placements
from engine.models.registry import family
from engine.models.wrappers import text_name
from tests.loading.tiny import config_of, random_tensors, tensor_shapes

NUM_ADAPTERS = 5
NUM_REQUESTS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def read_tensors(folder: Path):
    """Return a checkpoint's tensors, GPT-2's matrices as (out, in) like those of others."""
    return _with_conv1d_turned(folder, load_file(folder / "model.safetensors"))


def _with_conv1d_turned(folder, tensors):
    if json.loads((folder / "config.json").read_text())["model_type"] != "gpt2":
        return tensors
    return {
        name: np.ascontiguousarray(tensor.T) if ".c_" in name else tensor
        for name, tensor in tensors.items()
    }


def adaptable(model, tensors):
    """Return the names of the checkpoint's tensors that an adapter of `model` may change."""
    config = model.config
    table = matrix_placements(config, family(config.model_type).names)
    products = model.decoder.adapters.products
    found = []
    for name, tensor in tensors.items():
        forms = table.get(text_name(name), []) if tensor.ndim == 2 else []
        places = [place for _, make in forms for place in make()]
        if places and all(str(place.target) in products for place in places):
            found.append(name)
    return found


def random_adapter(names, tensors, rank, seed=0, strength=0.3):
    """Return {tensor: (A, B)} of random matrices of this rank."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for name in names:
        rows, columns = tensors[name].shape
        a = rng.standard_normal((rank, columns)) / np.sqrt(columns)
        b = strength * rng.standard_normal((rows, rank))
        pairs[name] = a.astype(np.float32), b.astype(np.float32)
    return pairs


def write_adapter(folder: Path, pairs, rank, biases=None, **config):
    """Write a folder as peft's `save_pretrained` does; `biases`: tensor -> its lora_B.bias."""
    folder.mkdir(parents=True)
    tensors = {}
    for name, (a, b) in pairs.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = a
        tensors[f"{module}.lora_B.weight"] = b
    for name, bias in (biases or {}).items():
        tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_B.bias"] = bias
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def write_merged(folder: Path, base: Path, pairs, scale=1.0):
    """Write the checkpoint `base` with W + scale B A in place of each adapted W."""
    folder.mkdir(parents=True)
    tensors = read_tensors(base)
    for name, (a, b) in pairs.items():
        merged = tensors[name] + scale * (b.astype(np.float64) @ a)
        tensors[name] = merged.astype(np.float32)
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file(_with_conv1d_turned(base, tensors), folder / "model.safetensors")
    return folder


class Served:
    """A base checkpoint, its adapters, and prompts with the tokens that each must get."""

    def __init__(self, folder):
        self.base = folder / "base"
        self.base.mkdir()
        config = config_of("qwen3")
        (self.base / "config.json").write_text(json.dumps(config))
        save_file(random_tensors(tensor_shapes(config)), self.base / "model.safetensors")
        tensors = load_file(self.base / "model.safetensors")
        model = engine.load(self.base, device="cpu", progress=False, enable_lora=True)
        names = adaptable(model, tensors)
        rng = np.random.default_rng(3)
        lengths = rng.integers(2, 40, NUM_REQUESTS)
        self.prompts = [rng.integers(3, 39, int(length)).tolist() for length in lengths]
        self.which = [int(index) for index in rng.integers(-1, NUM_ADAPTERS, NUM_REQUESTS)]
        self.folders = []
        self.want = {}
        for index in range(-1, NUM_ADAPTERS):
            path = self.base
            if index >= 0:
                rank = (1, 4, 16, 7, 2)[index]
                pairs = random_adapter(names[index % 3 :], tensors, rank, seed=index)
                self.folders.append(write_adapter(folder / f"a{index}", pairs, rank))
                path = write_merged(folder / f"merged{index}", self.base, pairs)
            with LLM(str(path), device="cpu", dtype="float32") as llm:
                for row in range(NUM_REQUESTS):
                    self.want[row, index] = tokens_of(llm, [self.prompts[row]], [None])[0]

    def request(self, index):
        """Return the LoRARequest of an adapter; None for the base model."""
        return None if index < 0 else LoRARequest(f"a{index}", index + 1, self.folders[index])

    def llm(self, **options):
        """Return an engine with two slots."""
        options = {"max_loras": 2, "debug": True, "dtype": "float32", "device": "cpu"} | options
        return LLM(str(self.base), enable_lora=True, **options)

    def check(self, llm, which):
        """Check the tokens of every prompt with the adapters `which`."""
        got = tokens_of(llm, self.prompts, [self.request(index) for index in which])
        assert got == [self.want[row, index] for row, index in enumerate(which)]


def tokens_of(llm, prompts, requests, params=GREEDY):
    """Return the tokens of each prompt's answer; `requests`: the adapter of each."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, lora_request=requests
    )
    return [list(output.outputs[0].token_ids) for output in outputs]
