"""Modules that are imported when a test first uses them, so that collecting tests stays quick."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest


def lazily(name: str) -> ModuleType:
    """Return module `name`, whose code runs when an attribute is first read."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        pytest.skip(f"needs {name}", allow_module_level=True)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
