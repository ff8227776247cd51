"""Folders and .gguf files with something wrong: a model that computes, or an `EngineError`.

A case names a valid folder, and the files of it that are others: {"text": ...}, {"b64": ...} or
{"special": ...}.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from engine import LLM, load
from engine.errors import EngineError
from engine.loading.gguf import GgufFile
from engine.loading.safetensors import SafetensorsDirectory, open_safetensors
from engine.loading.weights import weight_shapes
from engine.sampling_params import SamplingParams
from tests.fuzz import gguf_file
from tests.fuzz.limits import Limits, outcome_of
from tests.fuzz.tokenizer import BASES as TOKENIZERS
from tests.fuzz.values import change_bytes, change_document, dump, json_value
from tests.golden.quantized import CASES
from tests.loading.tiny import EXTRA, config_of, random_tensors, tensor_shapes

# A rope table of a gigabyte, which the memory plan allows, takes 7 s.
LIMITS = Limits(cpu_seconds=40.0, wall_seconds=120.0)
GOLDEN = Path(__file__).parents[1] / "golden/models"
VARIED = ("cohere2", "gpt_oss", "granitemoe", "mixtral", "olmo3", "qwen2_moe", "qwen3_moe")
VARIED += ("smollm3", "starcoder2", "llama4", "qwen2_5_vl", "qwen3_vl_moe", "gemma3_wrapped")
FAMILIES = sorted((*EXTRA, *VARIED))
INDEX = "model.safetensors.index.json"
CONFIG_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "dtype"),
    *("rms_norm_eps", "tie_word_embeddings", "hidden_act", "attention_bias", "quantization_config"),
    *("partial_rotary_factor", "query_pre_attn_scalar", "final_logit_softcapping", "torch_dtype"),
    *("eos_token_id", "bos_token_id", "architectures", "auto_map", "use_sliding_window"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "mlp_only_layers", "decoder_sparse_step", "use_bias"),
    *("norm_topk_prob", "swiglu_limit", "swiglu_alpha", "no_rope_layers", "sliding_window_pattern"),
    *("text_config", "vision_config", "attention_chunk_size", "moe_layers", "floor_scale"),
    *("no_rope_layer_interval", "max_window_layers", "logit_scale", "logits_scaling", "clip_qkv"),
)
ROPES = (
    *("linear", "dynamic", "yarn", "longrope", "llama3", "su", "default", "mrope"),
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("short_factor", "long_factor", "attention_factor", "beta_fast", "mscale", "type"),
)
QUANTIZATION_KEYS = (
    *("quant_method", "bits", "w_bit", "group_size", "q_group_size", "sym", "desc_act", "dynamic"),
    *("zero_point", "version", "checkpoint_format", "format", "config_groups", "targets", "ignore"),
    *("weights", "num_bits", "type", "strategy", "symmetric", "actorder", "block_structure"),
    *("weight_block_size", "modules_to_not_convert", "ignored_layers", "activation_scheme"),
    *("scale_fmt", "modules_in_block_to_quantize", "transform_config", "sparsity_config"),
)
GENERATION_KEYS = ("temperature", "top_k", "top_p", "max_new_tokens", "do_sample", "eos_token_id")
SHARD_NAMES = (
    *("../m.safetensors", "/etc/passwd", "a/b", "a\\b", "", ".", "..", "x\0", "\ud800", "s" * 300),
    *("config.json", "model.safetensors", "missing.safetensors"),
)
SPECIALS = (
    *("FIFO", "directory", "zero", "self link", "sparse", "link out", "socket", "empty"),
    *("link in", "dangling", "unreadable"),
)


def _safetensors(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def base_files(family: str) -> dict[str, bytes]:
    """Return the files of a tiny model."""
    if family in EXTRA:
        config = config_of(family)
        shapes = tensor_shapes(config)
    else:
        golden = json.loads((GOLDEN / f"{family}.json").read_text())
        config, shapes = golden["config"], golden["tensors"]
    tensors = random_tensors(shapes)
    header, data = {}, b""
    for name, value in tensors.items():
        at = [len(data), len(data) + value.nbytes]
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": at}
        data += value.tobytes()
    return {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": _safetensors(json.dumps(header).encode(), data),
        **TOKENIZERS["plain"],
    }


BASES = {family: base_files(family) for family in FAMILIES}
_PARTS = gguf_file.tiny_parts()
GGUF = gguf_file.pack_gguf(_PARTS)


def _bytes(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


def _text(text: str) -> dict[str, str]:
    return _bytes(text.encode("utf-8", "surrogatepass"))


def make(rng: random.Random) -> dict[str, Any]:
    """Make a case."""
    family = rng.choice(FAMILIES)
    ways = [_config, _config, _header, _header, _header_bytes, _index, _special, _generation]
    way = rng.random()
    if way < 0.12:
        files: dict[str, Any] = {"m.gguf": _bytes(gguf_file.change_gguf(rng))}
    elif way < 0.25:
        files = {"m.gguf": _bytes(change_bytes(rng, GGUF, len(GGUF) - _PARTS["room"]))}
    else:
        files = rng.choice(ways)(rng, family)
    return {"family": family, "files": files, "use": rng.choice(["load"] * 9 + ["LLM"])}


def _config(rng: random.Random, family: str) -> dict[str, Any]:
    config = json.loads(BASES[family]["config.json"])
    if rng.random() < 0.4:
        key = rng.choice(["rope_scaling", "rope_parameters"])
        config[key] = {"type": rng.choice(ROPES[:8]), "rope_type": rng.choice(ROPES[:8])}
        config[key] |= {name: rng.choice([1.0, 2.0, 8, [1.0, 2.0]]) for name in ROPES[8:12]}
        for _ in range(rng.randrange(4)):
            config[key][rng.choice(ROPES[8:])] = json_value(rng)
    if rng.random() < 0.1:
        scheme = CASES[rng.choice(list(CASES))].config
        config["quantization_config"] = change_document(rng, scheme, QUANTIZATION_KEYS)
    config = change_document(rng, config, CONFIG_KEYS)
    text = dump(config)
    if rng.random() < 0.1:
        text = f"{text[:-1]}, {json.dumps(rng.choice(CONFIG_KEYS))}: {dump(json_value(rng))}}}"
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        data = change_bytes(rng, BASES[family]["config.json"])
    return {"config.json": _bytes(data)}


def _generation(rng: random.Random, family: str) -> dict[str, Any]:
    values = {key: json_value(rng) for key in rng.sample(GENERATION_KEYS, 2)}
    return {"generation_config.json": _text(dump(values))}


def _split(family: str) -> tuple[dict[str, Any], bytes]:
    whole = BASES[family]["model.safetensors"]
    size = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + size]), whole[8 + size :]


def _header(rng: random.Random, family: str) -> dict[str, Any]:
    header, data = _split(family)
    name = rng.choice(list(header))
    entry, length = header[name], None
    way = rng.random()
    if way < 0.35:
        begin, stop = entry["data_offsets"]
        steps = [-1, 1, 4, -4, 128, 2**31, 2**63, -begin, begin - stop]
        entry["data_offsets"] = [begin + rng.choice([0, *steps]), stop + rng.choice([0, *steps])]
    elif way < 0.5:
        other = header[rng.choice(list(header))]
        entry["data_offsets"] = list(other["data_offsets"])
    elif way < 0.65:
        entry["dtype"] = rng.choice(["F16", "BF16", "F64", "I32", "U8", "F8_E4M3", "F4", "", "f32"])
    elif way < 0.7:
        renamed = rng.choice(list(_split(rng.choice(FAMILIES))[0]))
        header[renamed] = header.pop(name)
    elif way < 0.8:
        entry["shape"] = rng.choice([[], [0], [-1], [2**32, 2**32], [2**63], entry["shape"][::-1]])
    else:
        header = change_document(rng, header, ("__metadata__", name))
    text = dump(header)
    if rng.random() < 0.1:
        text = f"{text[:-1]}, {json.dumps(name)}: {dump(entry)}}}"
    if rng.random() < 0.1:
        length = rng.choice(
            [0, 1, len(text) - 1, len(text) + 1, 10**8, 10**8 + 1, 2**63, 2**64 - 1]
        )
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data))]
    raw = _safetensors(text.encode("utf-8", "surrogatepass"), data, length)
    return {"model.safetensors": _bytes(raw)}


def _header_bytes(rng: random.Random, family: str) -> dict[str, Any]:
    whole = BASES[family]["model.safetensors"]
    end = 8 + int.from_bytes(whole[:8], "little")
    return {"model.safetensors": _bytes(change_bytes(rng, whole, end))}


def _index(rng: random.Random, family: str) -> dict[str, Any]:
    """Split the weights in two shards, then change the index or a shard."""
    header, data = _split(family)
    names, files, owner = list(header), {}, {}
    half = rng.randrange(1, len(names))
    for number, part in enumerate((names[:half], names[half:])):
        low = header[part[0]]["data_offsets"][0]
        moved = {}
        for name in part:
            begin, stop = header[name]["data_offsets"]
            moved[name] = {**header[name], "data_offsets": [begin - low, stop - low]}
            owner[name] = f"s{number}.safetensors"
        own = data[low : header[part[-1]]["data_offsets"][1]]
        files[f"s{number}.safetensors"] = _bytes(_safetensors(dump(moved).encode(), own))
    index: dict[str, Any] = {"metadata": {}, "weight_map": owner}
    way = rng.random()
    if way < 0.5:
        for _ in range(rng.choice([1, 1, 3])):
            owner[rng.choice(names)] = rng.choice([*SHARD_NAMES, "s0.safetensors"])
    elif way < 0.8:
        index = change_document(rng, index, ("weight_map",))
    elif way < 0.95:
        files["s1.safetensors"] = {"special": rng.choice(SPECIALS)}
    return {"model.safetensors": None, **files, INDEX: _text(dump(index))}


def _special(rng: random.Random, family: str) -> dict[str, Any]:
    names = ["config.json", "generation_config.json", "model.safetensors", INDEX]
    names += ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "m.gguf"]
    files: dict[str, Any] = {rng.choice(names): {"special": rng.choice(SPECIALS)}}
    if INDEX in files:
        files["model.safetensors"] = None
    return files


def write_special(path: Path, kind: str, outside: Path) -> None:
    """Make `path` something else than a plain file."""
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "sparse":
        with open(path, "wb") as file:
            file.truncate(20 << 30)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            here = os.getcwd()  # a socket's path has at most 107 bytes
            os.chdir(path.parent)
            one.bind(path.name)
            os.chdir(here)
    elif kind in ("empty", "unreadable"):
        path.touch(mode=0o000 if kind == "unreadable" else 0o644)
    else:
        inner = path.parent / "config.json"
        targets = {"zero": "/dev/zero", "self link": path.name, "link out": outside}
        path.symlink_to(targets.get(kind, inner if kind == "link in" else "nowhere"))


class Runner:
    """Loads folders; an accepted model must be what its files say, and compute."""

    def __init__(self, folder: Path) -> None:
        self._root, self._outside = folder / "m", folder / "outside.json"
        self._outside.write_text("{}")
        for family in FAMILIES:
            assert self.run({"family": family, "files": {}, "use": "LLM"}) == "loaded"
        for whole in (GGUF, gguf_file.pack_gguf(gguf_file.tiny_parts(3))):
            files = {"m.gguf": _bytes(whole)}
            assert "loaded" in self.run({"family": "llama", "files": files, "use": "load"})

    def run(self, case: dict[str, Any]) -> str:
        """Load the model of a case; return how it ended."""
        try:
            self._write(case)
            return self._load(case)
        except EngineError as error:
            return outcome_of(error)
        finally:
            shutil.rmtree(self._root)

    def _write(self, case: dict[str, Any]) -> None:
        self._root.mkdir()
        base: dict[str, Any] = {} if "m.gguf" in case["files"] else BASES[case["family"]]
        for name, content in (base | case["files"]).items():
            path = self._root / name
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif content is not None and "b64" in content:
                path.write_bytes(base64.b64decode(content["b64"]))
            elif content is not None:
                write_special(path, content["special"], self._outside)

    def _load(self, case: dict[str, Any]) -> str:
        if case["use"] == "LLM":
            with LLM(str(self._root), device="cpu", num_blocks=8, max_num_seqs=2) as llm:
                [output] = llm.generate([[1, 2]], SamplingParams(max_tokens=2, temperature=0))
                assert output.outputs[0].finish_reason
                self._check(llm.llm_engine.model)
            return "loaded"
        model = load(self._root, device="cpu", dtype="float32")
        self._check(model)
        cache = model.new_cache(1, min(2, model.max_model_len))
        logits = model.step([[1 % model.config.vocab_size]], cache)
        assert logits.shape == (1, model.config.vocab_size)
        try:
            model.tokenizer.decode(model.tokenizer.encode("Hello"))
            model.sampling_defaults  # noqa: B018
        except EngineError as error:
            return f"loaded, but {outcome_of(error)}"
        return "loaded"

    def _check(self, model: Any) -> None:
        """Compare an accepted model's tensors with the files."""
        assert weight_shapes(model.config)
        if any(self._root.glob("*.gguf")):
            [path] = self._root.glob("*.gguf")
            size = path.stat().st_size
            assert all(0 <= t.start < t.stop <= size for t in GgufFile(path).tensors.values())
            return
        found = open_safetensors(self._root)
        files = found._home.values() if isinstance(found, SafetensorsDirectory) else [found]
        for file in set(files):
            _compare(file)


def _compare(file: Any) -> None:
    """Compare the tensors with those that the safetensors package reads."""
    size = file.path.stat().st_size
    assert all(0 <= t.start <= t.stop <= size for t in file.tensors.values())
    with safetensors.safe_open(file.path, "np") as other:
        assert set(other.keys()) == set(file.names())
        for name in other.keys():  # noqa: SIM118
            assert np.array_equal(other.get_tensor(name), file.view(name), equal_nan=True), name
