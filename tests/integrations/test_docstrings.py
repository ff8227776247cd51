"""The examples in the docstrings of engine.integrations are run, where the framework is there."""

from __future__ import annotations

import doctest
import importlib
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "engine" / "integrations"
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in FOLDER.rglob("*.py")
    if path.parent.name.isidentifier() and path != FOLDER / "__init__.py"
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    framework = name.split(".")[2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a framework's own, as it is imported
        if not framework.startswith("_"):  # engine.integrations._bounds needs none
            reason = f"{framework} is not installed"
            pytest.importorskip(framework, reason=reason, exc_type=ImportError)
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert error.name is not None
            assert not error.name.startswith("engine")
            pytest.skip(f"{framework} imports {error.name}, which is not installed")
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.testmod(module, optionflags=flags).failed == 0
