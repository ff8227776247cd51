"""Split .gguf models: read whole from any part, and refused if a part is missing or differs."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import gguf
import numpy as np
import pytest

import engine
from engine.errors import DownloadError, WeightsError
from engine.loading.download import pull, resolve_model
from engine.loading.gguf import GgufFile
from engine.parallel.rank import fingerprint
from engine.text.tokenizer import load_tokenizer
from tests.loading.tiny import llama_gguf
from tests.text.conftest import byte_level_metadata

__all__ = ["byte_level_metadata"]  # a fixture

NUMBER = 3
NAMES = [f"m-{i + 1:05}-of-{NUMBER:05}.gguf" for i in range(NUMBER)]


def logits(path: Path) -> np.ndarray:
    model = engine.load(path, device="cpu")
    return model.step([[5, 9, 3, 17]], model.new_cache(1, 8), logits="all")


@pytest.fixture
def split(tmp_path) -> Path:
    """A model in three parts, as gguf-split and the converter write it."""
    (tmp_path / "split").mkdir()
    llama_gguf(tmp_path / "split/m.gguf", split_max_tensors=4)
    assert sorted(path.name for path in (tmp_path / "split").iterdir()) == NAMES
    return tmp_path / "split"


def rewrite(path: Path, **changes) -> None:
    """Change integers of the split.* metadata in place."""
    data = bytearray(path.read_bytes())
    for key, value in changes.items():
        name = f"split.{key.replace('_', '.')}".encode()
        at = data.index(name) + len(name) + 4  # after the value's type
        data[at : at + 2] = value.to_bytes(2, "little")
    path.write_bytes(data)


@pytest.mark.parametrize("part", [0, 1, 2, None])
def test_any_part_or_the_folder_is_the_whole_model(tmp_path, split, part):
    whole = llama_gguf(tmp_path / "whole.gguf")
    named = split if part is None else split / NAMES[part]
    np.testing.assert_array_equal(logits(named), logits(whole))


def test_the_first_part_may_hold_no_tensors(tmp_path):
    llama_gguf(tmp_path / "m.gguf", split_max_tensors=6, small_first_shard=True)
    assert not gguf.GGUFReader(tmp_path / NAMES[0]).tensors
    whole = llama_gguf(tmp_path / "whole.gguf")
    np.testing.assert_array_equal(logits(tmp_path / NAMES[2]), logits(whole))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_part_is_named(split, lost):
    (split / NAMES[lost]).unlink()
    for named in (split, split / NAMES[(lost + 1) % NUMBER]):
        with pytest.raises(WeightsError, match=rf"one of 3 parts .*{NAMES[lost]} is missing"):
            engine.load(named, device="cpu")


def test_a_renamed_part_is_not_taken_for_a_model(split):
    (split / NAMES[1]).rename(split / "model.gguf")
    with pytest.raises(WeightsError, match=r"one of 3 parts .*must end with -00001-of-00003"):
        engine.load(split / "model.gguf", device="cpu")


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"no": 2}, r"split\.no must be 1, as the other parts say; got 2"),
        ({"count": 4}, r"split\.count must be 3, as the other parts say; got 4"),
        ({"tensors_count": 12}, r"split\.tensors\.count must be 11, as .* say; got 12"),
    ],
)
def test_parts_that_disagree_are_refused(split, changes, wanted):
    rewrite(split / NAMES[1], **changes)
    with pytest.raises(WeightsError, match=wanted):
        GgufFile(split / NAMES[0])


def test_parts_of_two_models_are_refused(tmp_path, split):
    """The second part is of another model with the same number of tensors."""
    (tmp_path / "other").mkdir()
    llama_gguf(tmp_path / "other/m.gguf", split_max_tensors=4)
    other = tmp_path / "other" / NAMES[0]
    rewrite(other, no=1)
    os.replace(other, split / NAMES[1])
    with pytest.raises(WeightsError, match=r"tensor .* is in another part, too"):
        GgufFile(split / NAMES[0])


def test_metadata_of_a_later_part_must_agree(split):
    llama_gguf(split / "n.gguf", {"split.no": 1, "split.count": 3, "llama.context_length": 64})
    os.replace(split / "n.gguf", split / NAMES[1])
    with pytest.raises(WeightsError, match=r"llama\.context_length must be 128, .* got 64"):
        GgufFile(split / NAMES[0])


def test_a_part_may_not_lead_out_of_the_folder(tmp_path, split):
    """Only the file that the user names may be a link to anywhere."""
    os.replace(split / NAMES[2], tmp_path / "elsewhere.gguf")
    (split / NAMES[2]).symlink_to(tmp_path / "elsewhere.gguf")
    with pytest.raises(WeightsError, match="must be inside the model's folder"):
        GgufFile(split / NAMES[0])


def test_ranks_compare_every_part(split):
    assert {f"the size of {name}" for name in NAMES} <= fingerprint(
        str(split / NAMES[1]), {}
    ).keys()


def test_two_models_in_a_folder_are_named_once_each(split):
    llama_gguf(split / "other.gguf")
    with pytest.raises(WeightsError, match=rf"several \.gguf files; .*: {NAMES[0]}, other\.gguf"):
        resolve_model(split)


def test_the_tokenizer_is_the_first_parts(tmp_path, byte_level_metadata):
    metadata = byte_level_metadata("smollm")
    llama_gguf(tmp_path / "m.gguf", metadata, split_max_tensors=4)
    model = engine.load(tmp_path / NAMES[2], device="cpu")
    assert model.tokenizer.encode("ab 12") == load_tokenizer(metadata).encode("ab 12")


@pytest.mark.parametrize("folder", ["", "Q8_0"])
def test_pull_fetches_every_part(tmp_path, monkeypatch, folder):
    """Into the hub's cache, where files are links to blobs, also in a folder of the repository."""
    snapshot = tmp_path / "models--o--n/snapshots/abc"
    blobs = tmp_path / "models--o--n/blobs"
    (snapshot / folder).mkdir(parents=True)
    blobs.mkdir()
    asked = []

    def snapshot_download(name, **options):
        asked.append((name, options["allow_patterns"]))
        return str(snapshot)

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download
    module.utils = types.ModuleType("huggingface_hub.utils")
    module.utils.disable_progress_bars = lambda: None
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", module.utils)
    llama_gguf(blobs / "m-Q8_0.gguf", split_max_tensors=4)
    for i, blob in enumerate(sorted(blobs.iterdir())):
        blob.rename(blobs / str(i))
        (snapshot / folder / blob.name).symlink_to(blobs / str(i))
    found = pull("o/n:q8_0")
    assert found == snapshot / folder / NAMES[0].replace("m-", "m-Q8_0-")
    assert asked == [("o/n", ["*q8_0*.gguf", "*Q8_0*.gguf"])]
    whole = llama_gguf(tmp_path / "whole.gguf")
    np.testing.assert_array_equal(logits("o/n:Q8_0"), logits(whole))
    with pytest.raises(DownloadError, match=r"one \.gguf file with 'Q4_0' in its name; got none"):
        pull("o/n:Q4_0")
    llama_gguf(snapshot / "other-Q8_0.gguf")
    with pytest.raises(DownloadError, match=r"got m-Q8_0-00001-of-00003\.gguf, other-Q8_0\.gguf"):
        pull("o/n:Q8_0")
