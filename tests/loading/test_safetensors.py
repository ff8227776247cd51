"""The reader of safetensors: against the `safetensors` package, and against damaged files."""

from __future__ import annotations

import json
import os
import random
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from engine.checks import warn_once
from engine.errors import WeightsError
from engine.loading.safetensors import (
    MAX_HEADER_BYTES,
    SafetensorsDirectory,
    SafetensorsFile,
    open_safetensors,
)

DTYPES = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_equal_those_read_by_the_package(tmp_path, dtype):
    rng = np.random.default_rng(0)
    tensors = {
        f"t{i}": np.asarray(rng.standard_normal(shape) * 50).astype(dtype)
        for i, shape in enumerate([(3, 5), (7,), (), (2, 0, 3), (1, 2, 3, 4)])
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "np"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert sorted(file.names()) == sorted(tensors)
    for name, wanted in tensors.items():
        got = file.view(name)
        assert got.dtype == wanted.dtype and file.shape(name) == wanted.shape
        np.testing.assert_array_equal(got, wanted)


def test_bfloat16_and_float8_are_viewed_through_ml_dtypes(raw_safetensors):
    x = np.arange(6).astype(ml_dtypes.bfloat16)
    y = np.arange(4).astype(ml_dtypes.float8_e4m3fn)
    header = {"x": entry("BF16", (2, 3), (0, 12)), "y": entry("F8_E4M3", (4,), (12, 16))}
    file = SafetensorsFile(raw_safetensors(header, x.tobytes() + y.tobytes()))
    np.testing.assert_array_equal(file.view("x"), x.reshape(2, 3))
    np.testing.assert_array_equal(file.view("y"), y)
    np.testing.assert_array_equal(file.read("x", 1, 2), x.reshape(2, 3)[1:])
    with pytest.raises(WeightsError, match=r"'y' must be one of F32, F16, BF16; got F8_E4M3"):
        file.read("y", 0, 4)


def test_a_view_is_read_only_and_copies_nothing(tmp_path):
    save_file({"w": np.ones((4, 4), np.float32)}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    view = file.view("w")
    assert not view.flags.writeable and not view.flags.owndata
    del file
    assert view.sum() == 16  # the view keeps the mapping alive


BAD_HEADERS = {
    "gap": (
        {"a": entry(), "b": entry(offsets=(12, 20))},
        20,
        r"'b' leaves a gap after 'a'.*it starts at byte .*; it must",
    ),
    "first gap": ({"a": entry(offsets=(4, 12))}, 12, "'a' leaves a gap after the header"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, 12, "'b' overlaps 'a'"),
    "same bytes": ({"a": entry(), "b": entry()}, 8, "'b' overlaps 'a'"),
    "trailing": ({"a": entry()}, 9, "tensors must end with the file, at .*; got"),
    "past the end": ({"a": entry()}, 7, r"'a': data_offsets must be inside the 7 bytes.*\[0, 8\]"),
    "too small": ({"a": entry(shape=(3,))}, 8, r"'a': size must be 12 bytes.*\[3\].*got 8"),
    "huge product": ({"a": entry(shape=(2**62, 2**62))}, 8, "'a': size must be 8507"),
    "product wraps to size": ({"a": entry(shape=(2**32, 2**32 * 2 + 1))}, 8, "'a': size must be"),
    "unknown dtype": ({"a": entry("F4")}, 8, "'a': dtype must be one of F64.*got 'F4'"),
    "dtype a number": ({"a": entry(5)}, 8, "'a': dtype must be"),
    "dtype a list": ({"a": entry(["F32"])}, 8, "'a': dtype must be"),
    "negative": ({"a": entry(shape=(-2,))}, 8, "'a': shape must be"),
    "float shape": ({"a": entry(shape=(2.0,))}, 8, "'a': shape must be"),
    "bool shape": ({"a": entry(shape=(True, 2))}, 8, "'a': shape must be"),
    "too many dims": ({"a": entry(shape=(1,) * 99)}, 4, "'a': shape must be at most 8"),
    "reversed": ({"a": entry(shape=(0,), offsets=(8, 0))}, 8, "'a': data_offsets must be two"),
    "three offsets": ({"a": entry(offsets=(0, 8, 9))}, 8, "'a': data_offsets must be two"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "'a': shape must be"),
    "no object": ({"a": 7}, 8, "'a': entry must be an object; got 7"),
    "metadata": ({"__metadata__": {"a": 1}}, 0, "__metadata__ must be an object of strings"),
    "metadata a list": ({"__metadata__": []}, 0, "__metadata__ must be an object of strings"),
    "a list": ([1, 2], 0, "header must be a JSON object"),
    "not JSON": (b"{'a'", 0, "header is not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', 0, "header is not valid JSON"),
    "deep": (b"[" * 200_000, 0, "header is not valid JSON"),
    "twice": (b'{"a":{},"a":{}}', 0, "key 'a' appears twice"),
    "twice inside": (b'{"a":{"dtype":"F32","dtype":"F16"}}', 0, "key 'dtype' appears twice"),
    "huge number": (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}", 0, "not valid JSON"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_damaged_header_is_refused(raw_safetensors, case):
    header, size, message = BAD_HEADERS[case]
    path = raw_safetensors(header, bytes(size))
    with pytest.raises(WeightsError, match=message) as error:
        SafetensorsFile(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_shorter_than_its_header_length_is_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(WeightsError, match=f"at least 8 bytes; got {len(content)}"):
        SafetensorsFile(tmp_path / "x")


def test_a_header_longer_than_the_file_or_the_limit_is_refused(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", 100) + b"{}")
    with pytest.raises(
        WeightsError, match="truncated: the header needs 108 bytes; the file has 10"
    ):
        SafetensorsFile(path)
    for length in (MAX_HEADER_BYTES + 1, 2**64 - 1):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(WeightsError, match=f"at most {MAX_HEADER_BYTES} bytes; got {length}"):
            SafetensorsFile(path)


def test_every_truncation_of_a_file_is_refused(tmp_path):
    save_file({"a": np.ones(3, np.float32), "b": np.ones((2, 2))}, tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").unlink(missing_ok=True)
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(WeightsError):
            SafetensorsFile(tmp_path / "cut")


def test_an_accepted_mutated_header_is_read_as_by_the_package(tmp_path):
    """Only WeightsError is ever raised, and nothing is accepted that the package refuses."""
    save_file({f"layer.{i}": np.full((i, 2), i, np.float16) for i in range(4)}, tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    rng, path, accepted = random.Random(0), tmp_path / "mutant", 0
    for _ in range(4000):
        mutant = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(header_end)
            mutant[place] = rng.choice([rng.randrange(256), *b'0123456789"[]{},:-.eFBI'])
        if rng.random() < 0.1:
            del mutant[rng.randrange(len(mutant)) :]
        path.unlink(missing_ok=True)  # overwriting a file would wait for the disk
        path.write_bytes(mutant)
        try:
            file = SafetensorsFile(path)
        except WeightsError:
            continue
        accepted += 1
        others = dict(safetensors.deserialize(bytes(mutant)))
        assert sorted(others) == sorted(file.names())
        for name, info in others.items():
            assert tuple(info["shape"]) == file.shape(name)
            assert bytes(info["data"]) == file.view(name).tobytes()
    assert accepted > 20  # harmless changes, such as to a letter of a name


def shard(path, names, rows=2):
    save_file({name: np.full((rows,), 1.0, np.float32) for name in names}, path)


def index(root, weight_map) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (root / "model.safetensors.index.json").write_text(text)


def test_shards_are_read_as_one(tmp_path):
    shard(tmp_path / "s1.safetensors", ["a", "b"])
    shard(tmp_path / "s2.safetensors", ["c"], rows=5)
    index(tmp_path, {"a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"})
    checkpoint = open_safetensors(tmp_path)
    assert isinstance(checkpoint, SafetensorsDirectory)
    assert sorted(checkpoint.names()) == ["a", "b", "c"] and checkpoint.shape("c") == (5,)
    assert checkpoint.view("c").sum() == 5 and checkpoint.read("c", 1, 3).shape == (2,)


def test_a_missing_shard_is_named(tmp_path):
    shard(tmp_path / "s1.safetensors", ["a"])
    index(tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors"})
    with pytest.raises(WeightsError, match=r"shard s2\.safetensors is missing"):
        open_safetensors(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shard(tmp_path / "s1.safetensors", ["a", "b"])
    shard(tmp_path / "s2.safetensors", ["b"])
    index(tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors"})
    with pytest.raises(WeightsError, match=r"'b' must be in one shard; got s1.* and s2"):
        open_safetensors(tmp_path)


def test_a_tensor_that_no_shard_holds_is_a_warning(tmp_path, caplog):
    warn_once.cache_clear()
    shard(tmp_path / "s1.safetensors", ["a"])
    index(tmp_path, {"a": "s1.safetensors", "zz": "s1.safetensors"})
    with caplog.at_level("WARNING", "engine"):
        assert list(open_safetensors(tmp_path).names()) == ["a"]
    assert "1 tensors are in no shard: the first is 'zz', which s1.safetensors" in caplog.text


def test_a_tensor_may_be_in_another_shard_than_the_index_says(tmp_path, caplog):
    warn_once.cache_clear()
    shard(tmp_path / "s1.safetensors", ["a"])
    shard(tmp_path / "s2.safetensors", ["b"])
    index(tmp_path, {"a": "s2.safetensors", "b": "s1.safetensors"})
    checkpoint = open_safetensors(tmp_path)
    assert sorted(checkpoint.names()) == ["a", "b"] and not caplog.text


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "a\\b", "a\0b", "", 3],
)
def test_a_shard_outside_of_the_directory_is_refused(tmp_path, name):
    root = tmp_path / "model"
    (root / "sub").mkdir(parents=True)
    for place in (tmp_path, root / "sub"):
        shard(place / "x.safetensors", ["a"])
    index(root, {"a": name})
    with pytest.raises(WeightsError, match=r"must be a plain file name|must name a file"):
        open_safetensors(root)


def test_a_link_out_of_the_directory_is_refused_except_into_a_hub_cache(tmp_path):
    plain, hub = tmp_path / "plain", tmp_path / "models--x--y" / "snapshots" / "rev"
    blobs = tmp_path / "models--x--y" / "blobs"
    for folder in (plain, hub, blobs):
        folder.mkdir(parents=True)
    shard(blobs / "0123", ["a"])
    for root in (plain, hub):
        os.symlink(blobs / "0123", root / "x.safetensors")
        index(root, {"a": "x.safetensors"})
    assert open_safetensors(hub).view("a").sum() == 2
    with pytest.raises(
        WeightsError, match=r"must be inside the model's folder; it is a link to .*0123"
    ):
        open_safetensors(plain)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 99_999,
     '{"weight_map": {"a": "x", "a": "y"}}'],
)  # fmt: skip
def test_a_damaged_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match=r"index\.json: "):
        open_safetensors(tmp_path)


def test_a_directory_with_only_pickles_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(
        WeightsError, match=r"a pickle \(pytorch_model\.bin\).*run any code.*convert"
    ):
        open_safetensors(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"has no weights; it needs model\.safetensors"):
        open_safetensors(tmp_path)
    with pytest.raises(WeightsError, match="is not a directory"):
        open_safetensors(tmp_path / "nowhere")


def test_a_single_file_of_any_name_is_taken_and_several_need_an_index(tmp_path):
    shard(tmp_path / "weights.safetensors", ["a"])
    assert open_safetensors(tmp_path).path.name == "weights.safetensors"
    shard(tmp_path / "weights2.safetensors", ["b"])
    with pytest.raises(WeightsError, match="the index is missing"):
        open_safetensors(tmp_path)
