"""The reader of .gguf files: against the `gguf` package, and against damaged files."""

from __future__ import annotations

import random
import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from engine.errors import WeightsError
from engine.loading.gguf import GgufFile
from engine.loading.gguf_quants import FORMATS

QUANTIZED = [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]
QUANTIZED += [Type.Q4_K, Type.Q5_K, Type.Q6_K]
# Offsets of the float16 scales in a block.
SCALES = {kind: (208,) if kind == Type.Q6_K else (0, 2) for kind in QUANTIZED}
SCALES |= dict.fromkeys((Type.Q8_0, Type.Q4_0, Type.Q5_0), (0,))


def random_blocks(kind: Type, count: int, seed: int = 0) -> np.ndarray:
    """Return blocks of random bytes with finite scales, to cover all values of the integers."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, FORMATS[kind].itemsize), np.uint8)
    for place in SCALES[kind]:
        scale = rng.standard_normal(count).astype(np.float16)
        blocks[:, place : place + 2] = scale.view(np.uint8).reshape(count, 2)
    return blocks


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("count", [1, 3, 2049])
def test_dequantization_equals_the_package_bit_for_bit(kind, count):
    blocks = random_blocks(kind, count)
    wanted = gguf.dequantize(blocks, kind).reshape(-1)
    got = FORMATS[kind].decode(blocks.reshape(-1))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, wanted)


def test_the_table_of_formats_has_the_sizes_of_the_package():
    for kind, form in FORMATS.items():
        assert (form.block, form.itemsize) == gguf.GGML_QUANT_SIZES[Type(kind)]
        assert form.name == Type(kind).name


def q4_1_by_hand(block: bytes) -> list[float]:
    """Decode a block according to the format's definition, one weight at a time."""
    d, m = struct.unpack("<ee", block[:4])
    low = [byte % 16 for byte in block[4:]]
    high = [byte // 16 for byte in block[4:]]
    return [np.float32(np.float32(d) * q) + np.float32(m) for q in low + high]


def test_q4_1_equals_its_definition():
    block = random_blocks(Type.Q4_1, 1, seed=3).reshape(-1)
    np.testing.assert_array_equal(FORMATS[Type.Q4_1].decode(block), q4_1_by_hand(block.tobytes()))


@pytest.fixture
def write(tmp_path):
    """Write a .gguf with the package: write(adds metadata, {name: array or (bytes, type)})."""

    def make(add=lambda writer: None, tensors=None, name="x.gguf"):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        add(writer)
        for key, tensor in (tensors or {}).items():
            if isinstance(tensor, tuple):
                writer.add_tensor(key, tensor[0], raw_dtype=tensor[1])
            else:
                writer.add_tensor(key, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return make


def add_everything(writer) -> None:
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"n.{kind}", 100)
    writer.add_float32("n.float32", 0.1)
    writer.add_float64("n.float64", 0.1)
    writer.add_bool("n.true", True)
    writer.add_string("s", "é\0\n✓")
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "ü", "<|x|>"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.5])
    writer.add_array("tokenizer.ggml.token_type", [1, 3, 6])
    writer.add_array("flags", [True, False])


def test_metadata_is_read_as_written(write):
    data = GgufFile(write(add_everything)).metadata
    assert data["general.architecture"] == "llama"
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        assert data[f"n.{kind}"] == 100 and type(data[f"n.{kind}"]) is int
    assert data["n.float32"] == np.float32(0.1) and data["n.float64"] == 0.1
    assert data["n.true"] is True and data["s"] == "é\0\n✓"
    assert data["tokenizer.ggml.tokens"] == ["a", "", "ü", "<|x|>"]
    assert data["tokenizer.ggml.scores"] == [0.5, -1.5]
    assert data["tokenizer.ggml.token_type"] == [1, 3, 6] and data["flags"] == [True, False]
    assert data.get("missing") is None and "missing" not in data and len(data) == len(list(data))


def all_tensors() -> dict:
    rng = np.random.default_rng(0)
    tensors: dict = {
        "f32": rng.standard_normal((3, 5)).astype(np.float32),
        "f16": rng.standard_normal((4, 6)).astype(np.float16),
        "vector": rng.standard_normal(7).astype(np.float32),
    }
    for kind in QUANTIZED:
        columns = 2 * FORMATS[kind].block
        raw = random_blocks(kind, 3 * 2).reshape(3, -1)
        assert raw.shape[1] == columns // FORMATS[kind].block * FORMATS[kind].itemsize
        tensors[kind.name] = (raw, kind)
    bits = rng.integers(0, 2**14, (3, 4), np.uint16)
    tensors["bf16"] = (bits.view(np.uint8), Type.BF16)
    return tensors


def test_tensors_equal_those_read_by_the_package(write):
    path = write(tensors=all_tensors())
    file = GgufFile(path)
    reader = gguf.GGUFReader(path)
    assert [one.name for one in reader.tensors] == list(file.names())
    for other in reader.tensors:
        shape = tuple(int(n) for n in other.shape[::-1])
        wanted = gguf.dequantize(other.data, other.tensor_type).reshape(shape)
        assert file.shape(other.name) == shape
        got = file.read(other.name, 0, shape[0])
        np.testing.assert_array_equal(got.astype(np.float32), wanted)
        np.testing.assert_array_equal(file.read(other.name, 1, 2), got[1:2])


def test_version_2_and_a_custom_alignment(write):
    path = write(lambda writer: writer.add_custom_alignment(64), {"w": np.ones((2, 2), np.float32)})
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", 2)
    path.write_bytes(content)
    assert GgufFile(path).read("w", 0, 2).sum() == 4


class Raw:
    """A .gguf written byte by byte, so that every field can be wrong."""

    def __init__(self, version=3, tensors=None, pairs=None, magic=b"GGUF"):
        self.parts = [magic, struct.pack("<IQQ", version, tensors or 0, pairs or 0)]

    def string(self, text: bytes, length=None):
        self.parts += [struct.pack("<Q", len(text) if length is None else length), text]
        return self

    def pack(self, form, *values):
        self.parts.append(struct.pack(form, *values))
        return self

    def tensor(self, name=b"w", dims=(4,), kind=0, offset=0):
        self.string(name).pack("<I", len(dims))
        return self.pack(f"<{len(dims)}Q", *dims).pack("<IQ", kind, offset)

    def data(self, size, alignment=32):
        content = b"".join(self.parts)
        return content + bytes(-len(content) % alignment) + bytes(size)

    def bytes(self):
        return b"".join(self.parts)


BAD_FILES = {
    "magic": (Raw(magic=b"GGML").bytes(), "must begin with b'GGUF'; got b'GGML'"),
    "a pickle": (b"\x80\x04\x95" + bytes(20), "must begin with b'GGUF'"),
    "version": (Raw(version=1).bytes(), "version must be 2 or 3; got 1"),
    "big endian": (Raw(version=3 << 24).bytes(), "big-endian"),
    "short": (b"GGUF", "at least 8 bytes; got 4"),
    "no counts": (b"GGUF\x03\0\0\0\0\0", "truncated: the number of tensors needs 8 bytes"),
    "pairs": (Raw(pairs=2**63).bytes(), f"truncated: {2**63} metadata pairs do not fit in the 0"),
    "tensors": (Raw(tensors=2**64 - 1).bytes(), "tensors do not fit in the 0 bytes left"),
    "key length": (
        Raw(pairs=1).string(b"key", length=2**64 - 1).pack("<II", 4, 1).bytes(),
        "truncated: a metadata key needs 18446744073709551615 bytes",
    ),
    "key bytes": (Raw(pairs=1).string(b"\xff").pack("<II", 4, 1).bytes(), "must be UTF-8"),
    "value type": (Raw(pairs=1).string(b"k").pack("<II", 13, 1).bytes(), "unknown value type 13"),
    "array type": (
        Raw(pairs=1).string(b"k").pack("<IIQ", 9, 9, 1).bytes(),
        "'k': unknown type 9 of array items",
    ),
    "array length": (
        Raw(pairs=1).string(b"k").pack("<IIQ", 9, 4, 2**62).bytes(),
        "truncated: 4611686018427387904 items of 'k' do not fit",
    ),
    "string array length": (
        Raw(pairs=1).string(b"k").pack("<IIQ", 9, 8, 2**61).bytes(),
        "items of 'k' do not fit",
    ),
    "string in array": (
        Raw(pairs=1).string(b"k").pack("<IIQQQ", 9, 8, 2, 2**63, 0).bytes(),
        "truncated inside the strings of 'k'",
    ),
    "last string in array": (
        Raw(pairs=1).string(b"k").pack("<IIQQ", 9, 8, 1, 1).bytes(),
        "truncated inside the strings of 'k'",
    ),
    "key twice": (
        Raw(pairs=2).string(b"k").pack("<IB", 0, 1).string(b"k").pack("<IB", 0, 1).bytes(),
        "metadata key 'k' appears twice",
    ),
    "alignment": (
        Raw(pairs=1).string(b"general.alignment").pack("<II", 4, 24).bytes(),
        "general.alignment must be a power of two",
    ),
    "no alignment": (
        Raw(pairs=1).string(b"general.alignment").pack("<II", 4, 0).bytes(),
        "general.alignment must be a power of two",
    ),
    "alignment a float": (
        Raw(pairs=1).string(b"general.alignment").pack("<If", 6, 32.0).bytes(),
        "general.alignment must be a power of two",
    ),
    "dims": (Raw(tensors=1).tensor(dims=(1,) * 9).data(4), "must have 1 to 4 dimensions; got 9"),
    "no dims": (Raw(tensors=1).tensor(dims=()).data(99), "'w' must have 1 to 4 dimensions; got 0"),
    "dims 2^32": (
        Raw(tensors=1).string(b"w").pack("<I", 2**32 - 1).data(99),
        "'w' must have 1 to 4 dimensions",
    ),
    "empty": (Raw(tensors=1).tensor(dims=(4, 0)).data(4), "'w' must have dimensions above 0"),
    "kind": (Raw(tensors=1).tensor(kind=999).data(16), "must be one of F32.*got unknown type 999"),
    "kind not read": (Raw(tensors=1).tensor(kind=11).data(999), "'w' must be one of F32.*got Q3_K"),
    "row": (Raw(tensors=1).tensor(dims=(33, 2), kind=3).data(99), "a multiple of 32; got 33"),
    "past the end": (Raw(tensors=1).tensor().data(15), "ends at byte 80; the file has 79"),
    "offset past the end": (Raw(tensors=1).tensor(offset=2**63).data(16), "'w' ends at byte 92233"),
    "product": (Raw(tensors=1).tensor(dims=(2**32, 2**32)).data(16), "'w' ends at byte"),
    "product wraps to 0": (Raw(tensors=1).tensor(dims=(2**62, 4)).data(16), "'w' ends at byte"),
    "unaligned": (Raw(tensors=1).tensor(offset=4).data(99), "must be a multiple of 32; got 4"),
    "overlap": (
        Raw(tensors=2).tensor(b"a", (16,)).tensor(b"b", (16,), 0, 32).data(999),
        "'b' overlaps 'a'",
    ),
    "same place": (Raw(tensors=2).tensor(b"a").tensor(b"b").data(999), "'b' overlaps 'a'"),
    "tensor twice": (Raw(tensors=2).tensor().tensor(offset=32).data(99), "'w' appears twice"),
    "info cut": (Raw(tensors=1).tensor().bytes()[:-3], "truncated"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_damaged_file_is_refused(tmp_path, case):
    content, message = BAD_FILES[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=message) as error:
        GgufFile(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(WeightsError, match=r"nowhere\.gguf: cannot be read"):
        GgufFile(tmp_path / "nowhere.gguf")


def small_file(write) -> bytes:
    raw = random_blocks(Type.Q4_1, 2).reshape(1, -1)
    return write(
        add_everything, {"a": np.ones((2, 3), np.float32), "q": (raw, Type.Q4_1)}
    ).read_bytes()


def test_every_truncation_of_a_file_is_refused(write, tmp_path):
    whole = small_file(write)
    data_end = max(tensor.stop for tensor in GgufFile(tmp_path / "x.gguf").tensors.values())
    for length in range(data_end):
        (tmp_path / "cut.gguf").unlink(missing_ok=True)
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(WeightsError):
            GgufFile(tmp_path / "cut.gguf")


def test_a_mutated_file_is_refused_or_read_within_its_bounds(write, tmp_path):
    """Never anything but WeightsError, neither on opening nor on reading everything."""
    whole = small_file(write)
    header_end = min(tensor.start for tensor in GgufFile(tmp_path / "x.gguf").tensors.values())
    rng, path, accepted = random.Random(0), tmp_path / "mutant.gguf", 0
    for _ in range(3000):
        mutant = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(header_end)
            mutant[place] = rng.choice([0, 1, 2, 8, 9, 255, rng.randrange(256)])
        if rng.random() < 0.1:
            del mutant[rng.randrange(len(mutant)) :]
        path.unlink(missing_ok=True)  # overwriting a file would wait for the disk
        path.write_bytes(mutant)
        try:
            file = GgufFile(path)
            for key in file.metadata:
                file.metadata[key]
        except WeightsError:
            continue
        accepted += 1
        for name in file.names():
            assert file.read(name, 0, file.shape(name)[0]).shape == file.shape(name)
    assert accepted > 20
