"""A model directory is data: no code in it is opened, imported or run."""

from __future__ import annotations

import json
import subprocess
import sys

PROBE = """
import sys
seen = []
sys.addaudithook(lambda event, args: seen.append((event, str(args))) if event in
    ("open", "import", "exec", "compile", "os.system", "subprocess.Popen") else None)
from engine.loading.download import resolve_model
from engine.loading.generation_config import generation_config
from engine.loading.model_config import load_config
from engine.loading.weights import load_weights
source = resolve_model(sys.argv[1])
load_weights(source, load_config(source)); generation_config(source)
touched = {line[1] for line in seen if "evil" in line[1] or "pytorch_model" in line[1]}
assert not touched, touched
assert any("config.json" in line[1] for line in seen)
"""


def test_no_code_of_a_model_directory_is_opened(make_model):
    path, config, _ = make_model("llama")
    evil = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    (path / "config.json").write_text(json.dumps({**config, "auto_map": evil}))
    for name in ("evil.py", "modeling_evil.py", "__init__.py", "conftest_evil.py"):
        (path / name).write_text("raise SystemExit('code of the model was run')")
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    result = subprocess.run(
        [sys.executable, "-c", PROBE, str(path)], capture_output=True, text=True, cwd=path
    )
    assert result.returncode == 0, result.stderr
