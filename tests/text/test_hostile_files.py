"""Hostile tokenizer files: the engine's own error, quickly, showing little of the file."""

from __future__ import annotations

import json
import os
import time

import pytest

from engine.errors import ConfigError
from engine.text.tokenizer import load_tokenizer

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "additional_chat_templates/x.jinja",
)
MAX_MESSAGE = 900  # paths of pytest's folders included


@pytest.fixture
def directory(tmp_path, golden):
    """A model's directory with a small byte-level tokenizer."""
    case, vocabulary = golden["directories"][0], golden["byte_level"]["metadata"]
    files = json.loads(json.dumps(case["files"]))
    model = files["tokenizer.json"]["model"]
    model["vocab"] = {t: i for i, t in enumerate(vocabulary["tokenizer.ggml.tokens"])}
    model["merges"] = [merge.split(" ") for merge in vocabulary["tokenizer.ggml.merges"]]
    root = tmp_path / "model"
    (root / "additional_chat_templates").mkdir(parents=True)
    for name, content in files.items():
        (root / name).write_text(json.dumps(content))
    return root


def refused(directory, message):
    """Check that loading fails soon, with a short message that matches."""
    start = time.process_time()
    with pytest.raises(ConfigError, match=message) as caught:
        load_tokenizer(directory)
    assert time.process_time() - start < 5
    assert len(str(caught.value)) < MAX_MESSAGE


@pytest.mark.parametrize("name", NAMES)
def test_only_regular_files_inside_the_directory_are_read(directory, tmp_path, name):
    path = directory / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    refused(directory, rf"{path.name}: must be a regular file; it is a FIFO")
    path.unlink()
    path.mkdir()
    refused(directory, rf"{path.name}: must be a regular file; it is a directory")
    path.rmdir()
    (tmp_path / "secret").write_text("{}")
    for target in ("/dev/zero", tmp_path / "secret"):
        path.symlink_to(target)
        refused(directory, rf"{path.name}: must be inside the model's folder; it is a link to")
        path.unlink()
    with open(path, "wb") as file:
        file.truncate(20 << 30)
    refused(directory, rf"{path.name}: must have at most \d+ bytes; got {20 << 30}")


def test_links_into_the_hubs_blobs_are_read(directory, tmp_path):
    (directory / "additional_chat_templates" / "x.jinja").write_text("X")
    (directory / "chat_template.jinja").write_text("T")
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "rev", tmp_path / "hub" / "blobs"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(path for path in directory.rglob("*") if path.is_file()):
        path.rename(blobs / str(i))
        link = snapshot / path.relative_to(directory)
        link.symlink_to(os.path.relpath(blobs / str(i), link.parent))
    assert load_tokenizer(snapshot).chat_template == "T"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja: must be UTF-8"),
        ("additional_chat_templates/x.jinja", b"a\xc3", r"x\.jinja: must be UTF-8"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": 5}', "must be an object; got 5"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}', r"an object; got \[1\]"),
        ("tokenizer_config.json", rb'{"bos_token": "\ud800"}', "bos_token .*valid Unicode"),
        (
            "tokenizer_config.json",
            rb'{"added_tokens_decoder": {"617": "\udfff"}}',
            "added token 617 must be valid Unicode",
        ),
        ("added_tokens.json", rb'{"\ud800": 617}', "added token 617 must be valid Unicode"),
        (
            "added_tokens.json",
            b'{"x": 1%s}' % (b"0" * 4000),
            "an added token's id must be .*got '1000",
        ),
        ("added_tokens.json", b'{"x": 1%s}' % (b"0" * 5000), "is not valid JSON"),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"1%s": "x"}}' % (b"0" * 5000),
            "an added token's id must be a whole number of at most 9 digits; got '1000",
        ),
        ("tokenizer_config.json", b'{"bos_token": ["%s"]}' % (b"x" * 9000), r"got \['xxx"),
        ("tokenizer_config.json", b'{"chat_template": ["%s"]}' % (b"x" * 9000), "got 'xxx"),
        ("config.json", b'{"eos_token_id": "%s"}' % (b"x" * 9000), "must be token ids"),
        ("tokenizer.json", rb'{"version": "\ud800"}', r"tokenizer\.json cannot be read"),
        ("tokenizer.json", b'{"version": "%s"}' % (b"x" * 9000), r"tokenizer\.json cannot be read"),
        ("tokenizer.json", b'{"%s": 1}' % (b"x" * 9000), r"tokenizer\.json cannot be read"),
        ("tokenizer.json", b"[" * 100_000, r"tokenizer\.json cannot be read"),
        ("tokenizer.json", b"\xff", r"tokenizer\.json cannot be read"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_damaged_content(directory, name, content, message):
    (directory / name).write_bytes(content)
    refused(directory, message)


def test_many_added_tokens_are_added_at_once(directory):
    """One by one takes time that grows with the square of their number."""
    listed = {
        str(617 + i): {"content": f"<t{i}>", "special": i % 2 == 0, "normalized": False}
        for i in range(20_000)
    }
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"added_tokens_decoder": listed}))
    start = time.process_time()
    tokenizer = load_tokenizer(directory)
    assert time.process_time() - start < 10
    assert tokenizer.encode("<t5><t19998>") == [622, 20_615]
    assert 622 not in tokenizer.special_ids and 20_615 in tokenizer.special_ids
    too_many = {f"{617 + i}": "x" for i in range((1 << 18) + 1)}
    path.write_text(json.dumps(config | {"added_tokens_decoder": too_many}))
    refused(directory, f"must have at most {1 << 18} tokens to add; got {(1 << 18) + 4}")


def test_many_additional_templates(directory):
    for i in range(65):
        (directory / "additional_chat_templates" / f"{i}.jinja").write_text("x")
    refused(directory, "must have at most 64 files; got 65")


def test_paths_that_no_directory_can_have():
    for path in ("/" + "a" * 5000, "/a" * 2500, "a\0", "\ud800"):
        refused(path, "source must be a directory")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", ["gpt2"]),
        ("model", {}),
        ("bos_token_id", "x"),
        ("bos_token_id", [1]),
        ("bos_token_id", float("nan")),
        ("token_type", ["x"]),
        ("token_type", [[1]]),
        ("token_type", [float("inf")]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_metadata_of_the_wrong_type(byte_level_metadata, key, value):
    with pytest.raises(ConfigError, match=f"tokenizer.ggml.{key} must be") as caught:
        load_tokenizer(byte_level_metadata(**{key: value}))
    assert len(str(caught.value)) < MAX_MESSAGE
