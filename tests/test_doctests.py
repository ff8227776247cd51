"""The examples in the docstrings are run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import warnings

import pytest

import engine

MODULES = ["engine"] + [
    m.name for m in pkgutil.walk_packages(engine.__path__, "engine.") if "__main__" not in m.name
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    if name.startswith("engine.integrations."):
        framework = name.split(".")[2]
        pytest.importorskip(framework, reason=f"{framework} is not installed", exc_type=ImportError)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    with warnings.catch_warnings():
        if name.startswith("engine.integrations."):
            warnings.simplefilter("ignore")  # a framework's own, as it is imported
        module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=flags)
    assert result.failed == 0
