"""Models that have been downloaded: `engine pull`'s own folder and the hub's cache.

A hub's repository may hold several .gguf files; each is a model of its own, named by the tag that
`resolve_model` takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import DownloadError
from engine.loading.download import ModelSource, local_path, models_dir, wheel_names
from engine.loading.gguf import part_paths

__all__ = ["CachedModel", "cached_models", "remove_model"]


@dataclass(frozen=True)
class CachedModel:
    """A downloaded model.

    Attributes
    ----------
    name : str
        The name that loads it.
    source : ModelSource
    files : tuple of Path
        Its files; links, in the hub's cache.
    repository : str
        Its repository on the hub; "" for a model of `engine pull`'s own folder.
    """

    name: str
    source: ModelSource
    files: tuple[Path, ...]
    repository: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of its files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def pulled(self) -> float:
        """When its newest file was written, in seconds since the epoch."""
        return max(file.stat().st_mtime for file in self.files)


def cached_models() -> list[CachedModel]:
    """Return all downloaded models, sorted by name."""
    return sorted([*_own(), *_from_hub()], key=lambda model: model.name)


def remove_model(model: CachedModel) -> None:
    """Delete the files of a model.

    Raises
    ------
    DownloadError
        If a file cannot be deleted.
    """
    others = (each for each in cached_models() if each.name != model.name)
    try:
        if model.repository and all(each.repository != model.repository for each in others):
            _remove_repository(model.repository)
            return
        for file in model.files:
            blob = file.resolve()
            snapshots = blob.parent.parent / "snapshots"
            is_blob = model.repository and file.parent.resolve().is_relative_to(snapshots)
            file.unlink()
            if is_blob and not _is_used(blob, snapshots):  # never what a link leads to elsewhere
                blob.unlink(missing_ok=True)
    except OSError as error:
        raise DownloadError(f"{model.name} cannot be removed: {error}") from error


def _own() -> Iterator[CachedModel]:
    """Yield the models of `engine pull`, and .gguf files put beside them."""
    names = {path: name for name in wheel_names() if (path := local_path(name)) is not None}
    for path in models_dir().glob("*.gguf"):
        yield CachedModel(names.get(path, str(path)), ModelSource("gguf", path), (path,))


def _from_hub() -> Iterator[CachedModel]:
    try:
        from huggingface_hub import constants, scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return
    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for repository in found.repos:
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            with contextlib.suppress(OSError):  # deleted meanwhile
                yield from _models_of(repository.repo_id, newest)


def _models_of(name: str, revision: Any) -> Iterator[CachedModel]:
    """Yield the models of one revision: a folder with safetensors, or .gguf files."""
    files = sorted(each.file_path for each in revision.files)
    folder = Path(revision.snapshot_path)
    if any(file.suffix == ".safetensors" for file in files) and (folder / "config.json").exists():
        own = tuple(file for file in files if file.suffix != ".gguf")
        yield CachedModel(name, ModelSource("hf_dir", folder), own, name)
    parts: dict[Path, list[Path]] = {}
    for file in files:
        if file.suffix == ".gguf":
            parts.setdefault(part_paths(file)[0], []).append(file)
    for first, all_parts in parts.items():
        tag = _tag(name, first, [*parts])
        yield CachedModel(f"{name}:{tag}", ModelSource("gguf", first), tuple(all_parts), name)


def _tag(name: str, file: Path, files: list[Path]) -> str:
    """Return a text that is in the name of this .gguf file only, preferably its format."""
    stem = file.stem.split("-00001-of-")[0]
    short = stem.removeprefix(name.split("/")[1].removesuffix("-GGUF")).strip("-._")
    is_one = sum(short.lower() in each.name.lower() for each in files) == 1
    return short if short and is_one else stem


def _is_used(blob: Path, snapshots: Path) -> bool:
    """Tell whether a file of a revision is a link to `blob`."""
    return any(file.is_symlink() and file.resolve() == blob for file in snapshots.rglob("*"))


def _remove_repository(name: str) -> None:
    """Delete all revisions of a repository in the hub's cache."""
    from huggingface_hub import constants, scan_cache_dir

    cache = scan_cache_dir(constants.HF_HUB_CACHE)
    for repository in cache.repos:
        if repository.repo_type == "model" and repository.repo_id == name:
            # A copy of a repository has the same hashes: nothing of it must be deleted.
            alone = replace(cache, repos=frozenset({repository}))
            hashes = (revision.commit_hash for revision in repository.revisions)
            alone.delete_revisions(*hashes).execute()
