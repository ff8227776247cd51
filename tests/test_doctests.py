"""The examples in the docstrings are run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import engine

MODULES = ["engine"] + [
    m.name
    for m in pkgutil.walk_packages(engine.__path__, "engine.")
    if "__main__" not in m.name and not m.name.startswith("engine.integrations.")
]  # tests/integrations/test_docstrings.py runs the others


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert result.failed == 0
