"""Tiny quantized checkpoints in every scheme, written from the formats' published layouts.

Independent of the engine: plain loops over codes, and an own writer of .safetensors. Codes, scales
and zero points are random, so that all values appear; the dequantized twin is what the definition
of the format makes of them, in float32.

    python tests/golden/quantized.py FOLDER [case ...]
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["CASES", "CONFIG", "LINEARS", "Case", "make", "make_linear", "write_safetensors"]

Array = np.ndarray[Any, Any]
Tensors = dict[str, tuple[str, Array]]

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "dtype": "float32",
}
LINEARS = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (128, 256),
    "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (256, 256),
    "mlp.up_proj": (256, 256),
    "mlp.down_proj": (256, 256),
}

DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, Array]]) -> None:
    """Write {name: (dtype, array)}."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array, DTYPES[dtype]).tobytes()
        place = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": place}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def seed_of(text: str) -> int:
    return zlib.crc32(text.encode())


def e4m3(code: int) -> float:
    """Return the number of an e4m3 code: sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([e4m3(code) for code in range(256)], np.float32)


def pack_along_columns(codes: Array, bits: int) -> Array:
    """Pack (R, C) to int32 words (R, ceil(C / p)), the first code in the lowest bits."""
    per_word = 32 // bits
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for column in range(columns):
        shift = bits * (column % per_word)
        words[:, column // per_word] |= codes[:, column].astype(np.uint32) << np.uint32(shift)
    return words.view(np.int32)


def pack_along_rows(codes: Array, bits: int) -> Array:
    """Pack (R, C) to int32 words (ceil(R / p), C)."""
    per_word = 32 // bits
    rows, columns = codes.shape
    words = np.zeros((-(-rows // per_word), columns), np.uint32)
    for row in range(rows):
        shift = bits * (row % per_word)
        words[row // per_word] |= codes[row].astype(np.uint32) << np.uint32(shift)
    return words.view(np.int32)


def pack_awq(codes: Array) -> Array:
    """Pack (R, C) to int32 words (R, C / 8): place p of word w has column 8 w + order[p]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(order):
            code = codes[:, 8 * word + column].astype(np.uint32)
            words[:, word] |= code << np.uint32(4 * place)
    return words.view(np.int32)


def random_scales(rng: np.random.Generator, shape: tuple[int, ...], size: float, dtype: str):
    """Return positive scales of about `size`, all exact in `dtype`."""
    return (size * rng.uniform(0.5, 1.5, shape)).astype(DTYPES[dtype])


class Integers:
    """Random codes, zero points and scales of one matrix, and its numbers.

    group_of: the group of each column; consecutive unless `act_order`.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        shape: tuple[int, int],
        bits: int,
        group_size: int,
        symmetric: bool,
        dtype: str,
        order_seed: int | None,
    ) -> None:
        rows, columns = shape
        size = group_size if group_size > 0 else columns
        groups = -(-columns // size)
        self.bits, self.shape = bits, shape
        self.codes = rng.integers(0, 2**bits, shape)
        zero = np.full((rows, groups), 2 ** (bits - 1))
        self.zeros = zero if symmetric else rng.integers(0, 2**bits, zero.shape)
        self.scales = random_scales(rng, (rows, groups), 3.0 / 2**bits / np.sqrt(columns), dtype)
        self.group_of = np.array([column // size for column in range(columns)])
        if order_seed is not None:
            order = np.random.default_rng(order_seed).permutation(columns)
            self.group_of = self.group_of[order]
        self.numbers = np.zeros(shape, np.float32)
        for column in range(columns):
            group = self.group_of[column]
            difference = (self.codes[:, column] - self.zeros[:, group]).astype(np.float32)
            self.numbers[:, column] = difference * self.scales[:, group].astype(np.float32)


class Case:
    """One scheme: its configuration, and how it stores a matrix.

    Attributes
    ----------
    config : dict
        The quantization_config.
    linear : callable
        (rng, (N, K), input seed) -> (tensors by kind, numbers in float32). Matrices that are
        multiplied with the same input have the same input seed.
    file : str
        Where the configuration is: in config.json, or in a file beside it.
    """

    def __init__(
        self,
        config: dict[str, Any],
        linear: Callable[[np.random.Generator, tuple[int, int], int], tuple[Tensors, Array]],
        file: str = "config.json",
    ) -> None:
        self.config, self.linear, self.file = config, linear, file


def ct_config(form: str, weights: dict[str, Any], activations: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    group["output_activations"] = None
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def ct_packed(
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = True,
    dtype: str = "BF16",
    actorder: str | None = None,
) -> Case:
    def linear(rng: np.random.Generator, shape: tuple[int, int], seed: int):
        order = seed if actorder == "group" else None
        data = Integers(rng, shape, bits, group_size, symmetric, dtype, order)
        tensors: Tensors = {
            "weight_packed": ("I32", pack_along_columns(data.codes, bits)),
            "weight_scale": (dtype, data.scales),
            "weight_shape": ("I64", np.array(shape)),
        }
        if not symmetric:
            tensors["weight_zero_point"] = ("I32", pack_along_rows(data.zeros, bits))
        if order is not None:
            tensors["weight_g_idx"] = ("I32", data.group_of)
        elif actorder == "unused":
            tensors["weight_g_idx"] = ("I32", np.full(shape[1], -1))
        return tensors, data.numbers

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    weights["strategy"] = "group" if group_size > 0 else "channel"
    weights["group_size"] = group_size if group_size > 0 else None
    weights["actorder"] = "group" if actorder == "group" else None
    return Case(ct_config("pack-quantized", weights), linear)


def ct_int8(activations: bool, group_size: int = 0, bits: int = 8) -> Case:
    def linear(rng: np.random.Generator, shape: tuple[int, int], seed: int):
        codes = rng.integers(-(1 << bits - 1), 1 << bits - 1, shape)
        groups = -(-shape[1] // group_size) if group_size else 1
        scales = random_scales(rng, (shape[0], groups), 0.01 / np.sqrt(shape[1]), "BF16")
        numbers = np.zeros(shape, np.float32)
        for column in range(shape[1]):
            group = column // group_size if group_size else 0
            numbers[:, column] = codes[:, column] * scales[:, group].astype(np.float32)
        return {"weight": ("I8", codes), "weight_scale": ("BF16", scales)}, numbers

    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True}
    weights |= {"strategy": "group", "group_size": group_size} if group_size else {}
    weights.setdefault("strategy", "channel")
    tokens = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    return Case(ct_config("int-quantized", weights, tokens if activations else None), linear)


def fp8_linear(kind: str, name: str = "weight_scale", dtype: str = "F32", static: str = ""):
    """Return the function of a matrix in e4m3; kind: "tensor", "channel" or "block"."""

    def linear(rng: np.random.Generator, shape: tuple[int, int], seed: int):
        codes = rng.integers(0, 256, shape)
        codes[codes & 0x7F == 0x7F] = 0x7E  # no NaN
        rows, columns = shape
        grids: dict[str, tuple[int, ...]] = {"tensor": (1,), "channel": (rows, 1)}
        grids["block"] = (-(-rows // 128), -(-columns // 128))
        size = 0.01 / np.sqrt(columns)
        if dtype == "F8_E8M0":
            scales = rng.integers(115, 119, grids[kind])
            factors = 2.0 ** (scales.astype(np.float32) - 127)
        else:
            scales = random_scales(rng, grids[kind], size, dtype)
            factors = scales.astype(np.float32)
        numbers = np.zeros(shape, np.float32)
        for row in range(rows):
            for column in range(0, columns, 128):
                factor = factors.reshape(-1)[0]
                if kind == "channel":
                    factor = factors[row, 0]
                elif kind == "block":
                    factor = factors[row // 128, column // 128]
                part = codes[row, column : column + 128]
                numbers[row, column : column + 128] = E4M3[part] * np.float32(factor)
        tensors: Tensors = {"weight": ("F8_E4M3", codes), name: (dtype, scales)}
        if static:
            tensors[static] = ("F32", np.array(0.02))
        return tensors, numbers

    return linear


def ct_fp8(strategy: str, static: bool = False) -> Case:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    weights["strategy"] = strategy
    weights["block_structure"] = [128, 128] if strategy == "block" else None
    tokens = {"num_bits": 8, "type": "float", "strategy": "tensor" if static else "token"}
    tokens["dynamic"] = not static
    linear = fp8_linear(strategy, dtype="BF16", static="input_scale" if static else "")
    return Case(ct_config("float-quantized", weights, tokens), linear)


def ct_mxfp4() -> Case:
    numbers_of = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = np.array(numbers_of + [-number for number in numbers_of], np.float32)

    def linear(rng: np.random.Generator, shape: tuple[int, int], seed: int):
        rows, columns = shape
        codes = rng.integers(0, 16, shape)
        exponents = rng.integers(119, 123, (rows, columns // 32))
        packed = np.zeros((rows, columns // 2), np.uint8)
        numbers = np.zeros(shape, np.float32)
        for column in range(columns):
            packed[:, column // 2] |= (codes[:, column] << (4 * (column % 2))).astype(np.uint8)
            factors = 2.0 ** (exponents[:, column // 32].astype(np.float32) - 127)
            numbers[:, column] = table[codes[:, column]] * factors
        return {"weight_packed": ("U8", packed), "weight_scale": ("U8", exponents)}, numbers

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return Case(ct_config("mxfp4-pack-quantized", weights), linear)


def ct_mixed() -> Case:
    """Attention in 4 bits, the rest in fp8 per channel."""
    packed, floats = ct_packed(group_size=64), ct_fp8("channel")
    first = packed.config["config_groups"]["group_0"]
    second = floats.config["config_groups"]["group_0"]
    first = {**first, "targets": ["re:.*self_attn.*"], "format": "pack-quantized"}
    second = {**second, "format": "float-quantized"}
    groups = {"group_0": second, "group_1": first}
    config = {**packed.config, "format": "mixed-precision", "config_groups": groups}

    def linear(rng: np.random.Generator, shape: tuple[int, int], seed: int):
        which = packed if seed % 2 == 0 else floats  # see `make`
        return which.linear(rng, shape, seed)

    return Case(config, linear)


def gptq(
    bits: int = 4,
    group_size: int = 128,
    sym: bool = True,
    desc_act: bool = False,
    version: str = "gptq",
    file: str = "config.json",
    g_idx: str = "given",
) -> Case:
    def linear(rng: np.random.Generator, shape: tuple[int, int], seed: int):
        order = seed if desc_act and group_size > 0 else None
        data = Integers(rng, shape, bits, group_size, sym, "F16", order)
        zeros = pack_along_columns(np.ascontiguousarray(data.zeros.T), bits).view(np.uint32)
        if version == "gptq":  # a word less 1 in every place, as a whole
            zeros = zeros - np.uint32(0x11111111 if bits == 4 else 0x01010101)
        tensors: Tensors = {
            "qweight": ("I32", pack_along_rows(np.ascontiguousarray(data.codes.T), bits)),
            "qzeros": ("I32", zeros.view(np.int32)),
            "scales": ("F16", np.ascontiguousarray(data.scales.T)),
        }
        if g_idx == "given":
            tensors["g_idx"] = ("I32", data.group_of)
        elif g_idx == "zeros":
            tensors["g_idx"] = ("I32", np.zeros(shape[1]))
        return tensors, data.numbers

    config: dict[str, Any] = {"bits": bits, "group_size": group_size, "sym": sym}
    config |= {"desc_act": desc_act, "damp_percent": 0.01, "true_sequential": True}
    if file == "config.json":
        config["quant_method"] = "gptq"
    if version != "gptq":
        config["checkpoint_format"] = version
    return Case(config, linear, file)


def awq(group_size: int = 128, zero_point: bool = True, file: str = "config.json") -> Case:
    def linear(rng: np.random.Generator, shape: tuple[int, int], seed: int):
        data = Integers(rng, shape, 4, group_size, not zero_point, "F16", None)
        tensors: Tensors = {
            "qweight": ("I32", pack_awq(np.ascontiguousarray(data.codes.T))),
            "scales": ("F16", np.ascontiguousarray(data.scales.T)),
        }
        if zero_point:
            tensors["qzeros"] = ("I32", pack_awq(np.ascontiguousarray(data.zeros.T)))
        return tensors, data.numbers

    if file == "config.json":
        config: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": group_size}
        config |= {"version": "gemm", "zero_point": zero_point, "modules_to_not_convert": None}
    else:
        config = {"w_bit": 4, "q_group_size": group_size, "version": "GEMM"}
        config |= {"zero_point": zero_point}
    return Case(config, linear, file)


def fp8(block: bool = False, dtype: str = "F32", static: bool = False) -> Case:
    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3"}
    config["activation_scheme"] = "static" if static else "dynamic"
    config["modules_to_not_convert"] = ["lm_head"]
    if block:
        config["weight_block_size"] = [128, 128]
    kind, name = ("block", "weight_scale_inv") if block else ("tensor", "weight_scale")
    return Case(config, fp8_linear(kind, name, dtype, "input_scale" if static else ""))


def bitnet(linear_class: str = "autobitlinear") -> Case:
    def linear(rng: np.random.Generator, shape: tuple[int, int], seed: int):
        ternary = rng.integers(-1, 2, shape)
        step = shape[0] // 4
        packed = sum((ternary[i * step :][:step] + 1) << (2 * i) for i in range(4))
        scale = random_scales(rng, (1,), 0.7 / np.sqrt(shape[1]), "BF16")
        factor = scale.astype(np.float32)
        if linear_class == "bitlinear":
            scale = random_scales(rng, (1,), 1.4 * np.sqrt(shape[1]), "F32")
            factor = np.float32(1 / np.float64(scale))
        kind = "F32" if linear_class == "bitlinear" else "BF16"
        numbers = (ternary * factor).astype(np.float32)
        return {"weight": ("U8", packed), "weight_scale": (kind, scale)}, numbers

    config = {"quant_method": "bitnet", "linear_class": linear_class}
    return Case(config | {"quantization_mode": "offline", "modules_to_not_convert": None}, linear)


CASES: dict[str, Case] = {
    "ct_int4": ct_packed(),
    "ct_int4_asymmetric": ct_packed(group_size=32, symmetric=False),
    "ct_int4_g64": ct_packed(group_size=64, dtype="F16", actorder="unused"),
    "ct_int4_g256": ct_packed(group_size=256),
    "ct_int4_channel": ct_packed(group_size=-1),
    "ct_int4_float32_scales": ct_packed(dtype="F32"),
    "ct_int4_act_order": ct_packed(group_size=64, actorder="group"),
    "ct_int8_packed": ct_packed(bits=8),
    "ct_int8_packed_channel": ct_packed(bits=8, group_size=-1),
    "ct_int8_packed_asymmetric": ct_packed(bits=8, group_size=64, symmetric=False),
    "ct_int8": ct_int8(activations=True),
    "ct_int8_weight_only": ct_int8(activations=False),
    "ct_int8_groups": ct_int8(activations=False, group_size=128),
    "ct_int4_bytes": ct_int8(activations=True, group_size=64, bits=4),
    "ct_fp8_tensor": ct_fp8("tensor", static=True),
    "ct_fp8_channel": ct_fp8("channel"),
    "ct_fp8_block": ct_fp8("block"),
    "ct_mxfp4": ct_mxfp4(),
    "ct_mixed": ct_mixed(),
    "gptq": gptq(),
    "gptq_no_g_idx": gptq(g_idx="absent"),
    "gptq_zero_g_idx": gptq(group_size=64, g_idx="zeros"),
    "gptq_channel": gptq(group_size=-1, desc_act=True),
    "gptq_asymmetric": gptq(group_size=32, sym=False),
    "gptq_v2": gptq(version="gptq_v2"),
    "gptq_v2_asymmetric": gptq(sym=False, version="gptq_v2"),
    "gptq_act_order": gptq(group_size=64, desc_act=True),
    "gptq_act_order_asymmetric": gptq(group_size=128, sym=False, desc_act=True),
    "gptq_8": gptq(bits=8),
    "gptq_8_asymmetric": gptq(bits=8, group_size=32, sym=False),
    "gptq_old_file": gptq(file="quantize_config.json"),
    "awq": awq(),
    "awq_g64": awq(group_size=64),
    "awq_symmetric": awq(zero_point=False),
    "awq_old_file": awq(file="quant_config.json"),
    "bitnet": bitnet(),
    "bitnet_bitlinear": bitnet("bitlinear"),
    "fp8": fp8(),
    "fp8_static": fp8(static=True),
    "fp8_block": fp8(block=True),
    "fp8_block_ue8m0": fp8(block=True, dtype="F8_E8M0"),
}


def make_linear(case: str, shape: tuple[int, int], name: str = "x") -> tuple[Tensors, Array]:
    """Return one matrix of a case: its tensors by kind, and its numbers."""
    return CASES[case].linear(np.random.default_rng(seed_of(name)), shape, seed_of(name))


def make(folder: Path, case: str, files: Mapping[str, bytes] | None = None) -> tuple[Path, Path]:
    """Write a tiny model in `case`, and its dequantized twin in float32; return both folders.

    files: others to write to both, such as those of a tokenizer.
    """
    one = CASES[case]
    plain: Tensors = {}
    stored: Tensors = {}

    def add(name: str, shape: tuple[int, ...], mean: float, size: float) -> None:
        values = mean + size * np.random.default_rng(seed_of(name)).standard_normal(shape)
        plain[name] = stored[name] = ("F32", values.astype(np.float32))

    hidden, vocab = CONFIG["hidden_size"], CONFIG["vocab_size"]
    add("model.embed_tokens.weight", (vocab, hidden), 0.0, 0.5)
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{prefix}.{norm}.weight", (hidden,), 1.0, 0.1)
        for linear, shape in LINEARS.items():
            name = f"{prefix}.{linear}"
            # The same for matrices with the same input; even in attention, odd elsewhere.
            inputs = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
            short = linear.split(".")[1].removesuffix("_proj")
            seed = 2 * seed_of(f"{prefix} {inputs.get(short, short)}") + ("mlp" in linear)
            tensors, numbers = one.linear(np.random.default_rng(seed_of(name)), shape, seed)
            stored |= {f"{name}.{kind}": tensor for kind, tensor in tensors.items()}
            plain[f"{name}.weight"] = ("F32", numbers)
    add("model.norm.weight", (hidden,), 1.0, 0.1)
    add("lm_head.weight", (vocab, hidden), 0.0, 0.1)

    quantized, twin = folder / case, folder / f"{case}_twin"
    for path, tensors in ((quantized, stored), (twin, plain)):
        path.mkdir(parents=True)
        write_safetensors(path / "model.safetensors", tensors)
        for name, content in (files or {}).items():
            (path / name).write_bytes(content)
        (path / "config.json").write_text(json.dumps(CONFIG))
    config = one.config
    if one.file == "config.json":
        config = {**CONFIG, "quantization_config": one.config}
    (quantized / one.file).write_text(json.dumps(config))
    return quantized, twin


if __name__ == "__main__":
    for wanted in sys.argv[2:] or CASES:
        print(*make(Path(sys.argv[1]), wanted))
