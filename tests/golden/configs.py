"""Configurations of the golden models."""

from __future__ import annotations

import json
from pathlib import Path

from engine.config import ModelConfig
from engine.loading.hf_config import config_from_dict

FOLDER = Path(__file__).parent / "models"
CASES = sorted(path.stem for path in FOLDER.glob("*.json"))


def golden_config(case: str) -> ModelConfig:
    """Return the configuration of a golden model, such as "llama"."""
    return config_from_dict(json.loads((FOLDER / f"{case}.json").read_text())["config"])
