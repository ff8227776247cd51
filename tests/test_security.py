"""SECURITY.md says what is tested; and tests of what no other file covers."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys

import jinja2
import pytest

from engine.errors import ConfigError
from engine.model_files import excerpt, read_json
from engine.text.tokenizer import load_tokenizer
from tests.loading.tiny import write_model


def _rows(root):
    lines = (root / "SECURITY.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [row for row in cells if len(row) == 5 and row[0].isdigit()]


def test_every_class_of_the_table_has_a_test_or_a_reason(repo_root):
    rows = _rows(repo_root)
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 22
    for number, _, _, answer, tests in rows:
        named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", tests)
        assert named or answer.startswith("does not apply: "), number
        for path, name in named:
            tree = ast.parse((repo_root / path).read_text())
            found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in found, f"{path}::{name}"


def test_jinja_has_its_last_escapes_mended(repo_root):
    """CVE-2025-27516 is mended in 3.1.6."""
    floor = re.search(r'"jinja2>=([\d.]+)"', (repo_root / "pyproject.toml").read_text())
    for version in (floor[1], jinja2.__version__):
        assert tuple(map(int, version.split("."))) >= (3, 1, 6)


def test_the_package_fetches_no_urls(repo_root):
    """The hub's own client, pip (`engine pull`) and `engine chat --url` do; parsing one is fine."""
    banned = {"requests", "urllib", "urllib3", "http", "httpx", "aiohttp", "ftplib", "smtplib"}
    client = repo_root / "engine" / "commands" / "_http.py"  # of `engine chat --url URL`
    paths = [path for path in (repo_root / "engine").rglob("*.py") if path != client]
    assert len(paths) > 100 and client.exists()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if names[-1] == "urllib.parse":
                    continue
                assert not banned & {name.split(".")[0] for name in names}, f"{path}: {names}"


_LOAD = """
import sys
opened = []
def hook(event, arguments):
    if event in ("open", "import", "exec", "compile"):
        opened.append(f"{event} {arguments}")
import engine
model = engine.load(sys.argv[1], device="cpu", dtype="float32")
sys.addaudithook(hook)
model = engine.load(sys.argv[1], device="cpu", dtype="float32")
print([text for text in opened if "modeling" in text or "tokenization" in text])
print(any("config.json" in text for text in opened))
"""


def test_code_in_a_models_folder_is_not_opened(tmp_path):
    code = {"AutoModelForCausalLM": "modeling_x.X", "AutoTokenizer": ["tokenization_x.X", None]}
    write_model(tmp_path / "m", "llama", auto_map=code, trust_remote_code=True)
    for name in ("modeling_x.py", "tokenization_x.py", "__init__.py", "setup.py"):
        (tmp_path / "m" / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path / "m")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["[]", "True"]  # the second: the hook sees what is opened
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31mred", "a\rb", "\u202eabc", "\x00", "\ud800"])
def test_messages_escape_control_characters(tmp_path, text):
    assert excerpt(text).isprintable() and len(excerpt(text * 500)) == 200
    path = tmp_path / "config.json"
    path.write_text(json.dumps([text]))
    with pytest.raises(ConfigError) as caught:
        read_json(path)
    assert str(caught.value).removeprefix(str(path)).isprintable()
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": text}))
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).isprintable()
