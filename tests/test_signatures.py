"""Keywords that `help`, editors and pages show: one source each, and every place agrees with it.

`tests/typed_calls.py` holds what a type checker must see.
"""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re

import pytest

import engine
import engine.reference
from engine.engine_config import CONFIG_OPTIONS, EngineConfig
from engine.errors import UnknownOptionError
from engine.model import LOAD_OPTIONS
from tests import options

CHECKED = (engine.SamplingParams, engine.StructuredOutput, engine.BeamSearchParams, EngineConfig)
OF_BOTH = (engine.LLM, engine.LLMEngine.from_name, engine.AsyncEngine.from_name)


def _names(function):
    return set(inspect.signature(function).parameters)


def _described(function):
    """Return the names that a numpydoc section of parameters or attributes describes."""
    text = inspect.getdoc(function)
    [section] = re.findall(r"(?:Parameters|Attributes)\n-+\n(.*?)(?=\n\n\w+\n-+\n|\Z)", text, re.S)
    heads = re.findall(r"^(\w[\w, ]*?)(?: : .*)?$", section, re.M)
    return {name for head in heads for name in head.split(", ")}


def test_the_types_of_options_are_up_to_date():
    assert options.MODULE.read_text() == options.module(), "run: python -m tests.options"


@pytest.mark.parametrize("function", OF_BOTH, ids=lambda function: function.__qualname__)
def test_keywords_of_load_and_of_the_engine_are_shown(function):
    shown = inspect.signature(function).parameters
    assert list(shown) == ["model", *(LOAD_OPTIONS | CONFIG_OPTIONS)]
    assert shown["block_size"].default == 16
    assert shown["device"].default == "auto"
    assert "enable_prefix_caching: 'bool' = True" in pydoc.render_doc(function)


def test_an_engine_takes_the_fields_of_its_configuration():
    fields = [field.name for field in dataclasses.fields(EngineConfig)]
    assert list(inspect.signature(engine.LLMEngine).parameters) == ["model", *fields]


def test_load_shows_what_it_describes():
    assert _described(engine.load) == _names(engine.load)
    assert _names(engine.load) == {"model", "collectives", "stage", *LOAD_OPTIONS}


@pytest.mark.parametrize("cls", CHECKED, ids=lambda cls: cls.__name__)
def test_fields_are_shown_and_described(cls):
    fields = {field.name for field in dataclasses.fields(cls)}
    assert _names(cls) == fields == _described(cls)


@pytest.mark.parametrize("cls", CHECKED, ids=lambda cls: cls.__name__)
def test_an_unknown_keyword_is_told_with_the_nearest(cls):
    name = dataclasses.fields(cls)[-1].name
    with pytest.raises(UnknownOptionError, match=f"{cls.__name__} got .*did you mean '{name}'"):
        cls(**{f"{name}s": 1})


def test_defaults_of_a_model_take_the_fields_of_sampling_params():
    shown = _names(engine.LLM.get_default_sampling_params)
    assert shown == {"self"} | _names(engine.SamplingParams)


@pytest.mark.parametrize("op", engine.reference.__all__)
def test_every_parameter_of_an_op_is_described(op):
    function = getattr(engine.kernels, op)
    if inspect.isfunction(function):
        assert _names(function) <= _described(function)


def test_chat_shows_its_options():
    shown = inspect.signature(engine.LLM.chat).parameters
    assert {"tools", "add_generation_prompt", "continue_final_message"} <= set(shown)
