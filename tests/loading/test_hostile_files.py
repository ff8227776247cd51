"""Files that are no plain files, are too large, or are links: a clear error, quickly."""

from __future__ import annotations

import json
import os
import struct
import threading

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.checks import shown
from engine.errors import ConfigError, EngineError, WeightsError
from engine.loading.download import resolve_model
from engine.loading.generation_config import generation_config
from engine.loading.gguf import GgufFile
from engine.loading.hf_config import config_from_dict
from engine.loading.model_config import load_config
from engine.loading.safetensors import SafetensorsFile, open_safetensors
from engine.model import load
from engine.model_files import MAX_JSON_BYTES, excerpt, read_file
from engine.models.registry import FAMILIES

CONFIG_FILES = ("config.json", "generation_config.json")
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "other.safetensors")
MAX_MESSAGE = 1300  # paths of pytest's folders included


def special(path, kind):
    """Make `path` something else than a file."""
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        os.symlink("/dev/zero", path)


def read_all(path):
    """Read everything of the model except its tokenizer."""
    generation_config(path)
    load_config(path)
    open_safetensors(path)


def within(seconds, call):
    """Return the error of `call`, which must not take longer."""
    caught: list[BaseException] = []

    def run():
        try:
            call()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "hangs"
    assert caught and isinstance(caught[0], EngineError), caught
    assert len(str(caught[0])) < MAX_MESSAGE
    return caught[0]


@pytest.mark.parametrize("kind", ["FIFO", "directory", "device"])
@pytest.mark.parametrize("name", CONFIG_FILES + WEIGHT_FILES)
def test_only_regular_files_are_opened(make_model, name, kind):
    path, _, _ = make_model("llama")
    if name in WEIGHT_FILES:
        (path / "model.safetensors").unlink()
    special(path / name, kind)
    error = within(5, lambda: read_all(path))
    assert isinstance(error, WeightsError if name in WEIGHT_FILES else ConfigError)
    wanted = "must be inside the model's folder" if kind == "device" else f"it is a {kind}"
    assert name in str(error) and wanted in str(error)


@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_a_special_file_given_as_the_model(tmp_path, kind):
    path = tmp_path / "m.gguf"
    special(path, kind)
    for call in (lambda: resolve_model(path), lambda: GgufFile(path), lambda: load(path)):
        assert f"m.gguf: must be a regular file; it is a {kind}" in str(within(5, call))


@pytest.mark.parametrize("name", [*CONFIG_FILES, "model.safetensors.index.json"])
def test_a_sparse_file_of_20_gb_is_not_read(make_model, name):
    path, _, _ = make_model("llama")
    (path / "model.safetensors").unlink()
    with open(path / name, "wb") as file:
        file.truncate(20 << 30)
    error = within(5, lambda: read_all(path))
    assert name in str(error) and f"got {20 << 30}" in str(error)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_pointers_of_git_lfs_are_called_so(make_model, name):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12345\n"
    path = make_model()[0] / name
    path.write_text(pointer)
    with pytest.raises(EngineError, match=f"{name}: is a pointer of Git LFS, not the file itself"):
        load(path.parent, device="cpu")
    single = path.with_name("model.gguf")
    single.write_text(pointer)
    with pytest.raises(EngineError, match=r"model\.gguf: is a pointer of Git LFS"):
        load(single, device="cpu")


def test_a_sparse_gguf_with_an_array_of_billions(tmp_path):
    key = b"tokenizer.ggml.tokens"
    text = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path = tmp_path / "m.gguf"
    for item in (8, 0):  # strings, bytes
        path.write_bytes(text + struct.pack("<IIQ", 9, item, 2 << 30))
        os.truncate(path, 20 << 30)
        error = within(5, lambda: GgufFile(path))
        assert f"must have at most {1 << 24} items; got {2 << 30}" in str(error)


def test_no_more_than_the_limit_is_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b"123456")
    assert read_file(path, 6) == b"123456"
    with pytest.raises(ConfigError, match=r"x\.json: must have at most 5 bytes; got 6"):
        read_file(path, 5)
    with pytest.raises(WeightsError, match=r"must not change while it is read; it had 0 bytes"):
        read_file(type(path)("/proc/self/status"), MAX_JSON_BYTES, error=WeightsError)


def weights_at(path, *names):
    save_file({name: np.ones(2, np.float32) for name in names}, path)


def a_model(root, form, target):
    """Make a folder whose weights are a link to `target`, as one file or as a shard."""
    root.mkdir(parents=True)
    name = "model.safetensors" if form == "single" else "m-1.safetensors"
    os.symlink(target, root / name)
    if form == "shard":
        text = json.dumps({"weight_map": {"a": name}})
        (root / "model.safetensors.index.json").write_text(text)
    return root


@pytest.mark.parametrize("form", ["single", "shard"])
def test_one_policy_for_links(tmp_path, form):
    outside, blobs = tmp_path / "outside.safetensors", tmp_path / "hub" / "blobs"
    blobs.mkdir(parents=True)
    weights_at(outside, "a")
    weights_at(blobs / "0123", "a")
    hub = a_model(tmp_path / "hub" / "snapshots" / "rev", form, "../../blobs/0123")
    inner = a_model(tmp_path / "inner", form, "data/w")
    (inner / "data").mkdir()
    weights_at(inner / "data" / "w", "a")
    (tmp_path / "link").symlink_to(inner)  # the folder itself may be a link
    for root in (hub, inner, tmp_path / "link"):
        assert open_safetensors(root).view("a").sum() == 2
    bad = a_model(tmp_path / "bad", form, outside)
    with pytest.raises(WeightsError, match=r"must be inside the model's folder; it is a link to"):
        open_safetensors(bad)


@pytest.mark.parametrize("name", CONFIG_FILES)
def test_configurations_follow_the_same_policy(make_model, tmp_path, name):
    path, config, _ = make_model("llama")
    (tmp_path / "other.json").write_text(json.dumps(config))
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(tmp_path / "other.json")
    with pytest.raises(ConfigError, match=rf"{name}: must be inside the model's folder"):
        load_config(path)


def test_a_gguf_in_a_folder_must_not_be_a_link_out_of_it_but_one_named_may(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "real.gguf").write_bytes(b"GGUF")
    link = tmp_path / "m" / "x.gguf"
    link.symlink_to(tmp_path / "real.gguf")
    assert resolve_model(link).path == link
    with pytest.raises(WeightsError, match="must be inside the model's folder"):
        resolve_model(tmp_path / "m")


@pytest.mark.parametrize("name", ["model.safetensors", "m-1.safetensors"])
def test_a_file_that_links_to_itself(tmp_path, name):
    root = a_model(tmp_path / "m", "single" if name.startswith("model") else "shard", name)
    with pytest.raises(WeightsError, match=rf"{name}: cannot be read \(Too many levels"):
        open_safetensors(root)


def test_a_shard_with_a_name_too_long_for_a_file(tmp_path):
    text = json.dumps({"weight_map": {"a": "s" * 300}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match=r"shard s{197}\.\.\. is missing"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["/" + "a" * 5000, "/a" * 2500, "./\0", "./\ud800", "~nobody-x/y"],
    ids=["long name", "long path", "NUL", "surrogate", "no such user"],
)
def test_paths_that_no_file_can_have(text):
    with pytest.raises(WeightsError, match="does not exist") as caught:
        resolve_model(text)
    assert len(str(caught.value)) < 500
    with pytest.raises(WeightsError):
        open_safetensors(text)
    with pytest.raises(EngineError):
        load_config(text)
    assert generation_config(text) == {}


def test_sizes_too_long_to_print(raw_safetensors):
    shape = [10**4000] * 8
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}})
    with pytest.raises(WeightsError, match=r"must be a whole number of about 3\d{4} digits") as got:
        SafetensorsFile(raw_safetensors(header.encode(), bytes(4)))
    assert len(str(got.value)) < MAX_MESSAGE


@pytest.mark.parametrize("digits", [4000, 5000])
def test_long_integers(make_model, digits):
    path, config, _ = make_model("llama")
    text = json.dumps(config).replace('"vocab_size": 40', f'"vocab_size": 1{"0" * digits}')
    (path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: .*(digits|vocab_size)") as caught:
        load_config(path)
    assert len(str(caught.value)) < MAX_MESSAGE


def test_integers_that_python_refuses_to_print(tiny):
    for value in (10**5000, [10**5000], {"a": 10**5000}, -(10**5000)):
        with pytest.raises(ConfigError, match=r"vocab_size must be a whole number .*digits"):
            config_from_dict(tiny.config_of("llama", vocab_size=value))


def test_messages_show_little_of_a_file(raw_safetensors, make_model):
    name = "n" * 100_000
    path = raw_safetensors({name: {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}, bytes(4))
    with pytest.raises(WeightsError) as caught:
        SafetensorsFile(path)
    assert len(str(caught.value)) < MAX_MESSAGE
    path, config, _ = make_model("llama")
    (path / "config.json").write_text(json.dumps({**config, "model_type": name, name: 1}))
    with pytest.raises(ConfigError) as failed:
        load_config(path)
    assert len(str(failed.value)) < MAX_MESSAGE + len(", ".join(FAMILIES))  # the message lists them
    for value in (name, [name] * 99, {name: name}, name.encode(), 10**5000, [[[[[[[[1]]]]]]]]):
        assert len(shown(value)) <= 80
    assert len(excerpt(name)) == 200


def test_options_that_python_refuses_to_print(make_model):
    path, _, _ = make_model("llama")
    long = 10**5000
    for name in ("max_model_len", "dtype", "load_format", "deterministic"):
        with pytest.raises(ConfigError, match=rf"{name} must be .*about 5001 digits"):
            load(path, **{"device": "cpu", name: long})
    with pytest.raises(ConfigError, match="model must be a name or a path"):
        load(long)
