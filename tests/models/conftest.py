"""Golden models: results of transformers, and tiny checkpoints with the same weights."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import engine
from engine import device
from engine.errors import DownloadError
from engine.loading.download import resolve_model

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.stem for path in (GOLDEN / "models").glob("*.json"))


def _tiny_weight(name: str, shape: list[int], norm_mean: float) -> np.ndarray:
    """Call `tests/golden/tiny_weights.py`, which is not a package as make.py runs standalone."""
    spec = importlib.util.spec_from_file_location("tiny_weights", GOLDEN / "tiny_weights.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tiny_weight(name, shape, norm_mean)


@dataclass(frozen=True)
class Golden:
    """One golden model: its checkpoint's directory, a prompt, (T, V) logits, a continuation."""

    directory: Path
    config: dict
    prompt: list[int]
    logits: np.ndarray
    greedy: list[int]

    def load(self, device: str = "cpu", dtype: str = "float32") -> engine.Model:
        """Load the checkpoint with the engine."""
        return engine.load(self.directory, device=device, dtype=dtype, progress=False)

    @property
    def max_tokens(self) -> int:
        """Tokens of prompt and continuation."""
        return len(self.prompt) + len(self.greedy)


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    """Return the golden model `case`; its checkpoint is written on first use."""
    made: dict[str, Golden] = {}

    def make(case: str) -> Golden:
        if case not in made:
            record = json.loads((GOLDEN / "models" / f"{case}.json").read_text())
            directory = tmp_path_factory.mktemp(case)
            (directory / "config.json").write_text(json.dumps(record["config"]))
            tensors = {
                name: _tiny_weight(name, shape, record["norm_mean"])
                for name, shape in record["tensors"].items()
            }
            save_file(tensors, directory / "model.safetensors")
            logits = np.load(GOLDEN / "models" / f"{case}.npy")
            made[case] = Golden(
                directory, record["config"], record["prompt"], logits, record["greedy"]
            )
        return made[case]

    return make


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    """The devices that a test body runs on."""
    if request.param == "cuda":
        chosen, reason = device.resolve_device("auto")
        if not chosen.is_cuda:
            pytest.skip(f"no GPU: {reason}")
    return request.param


@pytest.fixture(scope="session")
def smollm2_source():
    """The real model's file, downloaded if necessary."""
    try:
        return resolve_model("smollm2")
    except DownloadError as error:
        pytest.skip(f"SmolLM2 cannot be pulled: {error}")


@pytest.fixture(
    scope="module",
    params=[
        ("cpu", "float32"),
        *(
            pytest.param(("cuda", dtype), marks=pytest.mark.gpu, id=f"cuda-{dtype}")
            for dtype in ("float32", "float16", "bfloat16")
        ),
    ],
    ids=str,
)
def place(request):
    """A device and a dtype, as options of `engine.load`; skips if a GPU is missing."""
    where, dtype = request.param
    if where == "cuda" and not device.resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    return {"device": where, "dtype": dtype}
