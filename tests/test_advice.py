"""Messages that name an option, a keyword, a command or a variable name one that exists."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from engine import env
from engine.cli import _SUBCOMMANDS, COMMANDS

SOURCES = sorted((Path(__file__).parents[1] / "engine").rglob("*.py"))
# Words before "=" that are no keywords: headers, a log line, a label, an internal check's counter,
# an op of the command line, an option of containers.
OTHERS = {"charset", "camera", "geolocation", "microphone", "prompt", "card", "num_cached"}
OTHERS |= {"swiglu", "add"}
OTHERS |= {"string", "to"}  # in formats of tool calls
# Options of other programs, which messages tell the user to run.
PROGRAMS = {"--no-deps", "--only-binary", "--disable-pip-version-check", "--no-input", "--dest"}
PROGRAMS |= {"--cap-add"}
PROGRAMS |= {"--page-size", "--attention-backend"}  # SGLang's


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def texts_of(path: Path) -> list[str]:
    """The texts of a module that a user may read: strings with a space, without docstrings."""
    tree = tree_of(path)
    skipped = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [one for one in node.values if isinstance(one, ast.Constant)]
            skipped |= {id(one) for one in parts}
            # A value stands for a word of its own: "--{name}" and "{name}=" name no option.
            text = "".join(one.value if one in parts else "\0" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = "" if id(node) in skipped else node.value
        else:
            continue
        if " " in text:
            found.append(text)
    return found


def options_of(module: str) -> set[str]:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"engine.commands.{module}").add_arguments(parser)
    return set(parser._option_string_actions)


@cache
def every_option() -> frozenset[str]:
    modules = [name.replace("-", "_") for name in COMMANDS]
    modules += [module for module, _ in _SUBCOMMANDS.values()]
    return frozenset().union(*map(options_of, modules))


@cache
def every_keyword() -> frozenset[str]:
    """Parameters of functions, and fields of classes: what can stand before "=" in a call."""
    names: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.arguments):
                names |= {one.arg for one in (*node.args, *node.kwonlyargs)}
            elif isinstance(node, ast.ClassDef):
                fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                names |= {one.target.id for one in fields if isinstance(one.target, ast.Name)}
    return frozenset(names)


def faults(text: str) -> set[str]:
    """Return what a text names that does not exist."""
    options = set(re.findall(r"(?<![\w\0-])--[a-z][a-z0-9-]*[a-z0-9](?![\w\0])", text))
    keywords = set(re.findall(r"(?<![\w\0.%])([a-z][a-z_]+)=(?![=\s])", text))
    commands = set(re.findall(r"[`'(]engine ([a-z-]+)", text))
    variables = set(re.findall(r"\bENGINE_[A-Z_]+", text))
    return (
        {one for one in options if one not in every_option() | PROGRAMS}
        | (keywords - every_keyword() - OTHERS)
        | {f"engine {one}" for one in commands - COMMANDS.keys()}
        | (variables - {one.name for one in env.VARIABLES})
    )


def test_what_messages_advise_exists():
    found = {
        (path.name, fault): text
        for path in SOURCES
        for text in texts_of(path)
        for fault in faults(text)
    }
    assert not found


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("start the server with --tool-call-parsers", "--tool-call-parsers"),
        ("use data_type='float32' instead", "data_type"),
        ("run `engine fetch smollm2` first", "engine fetch"),
        ("set ENGINE_TOKENIZER to one of", "ENGINE_TOKENIZER"),
    ],
)
def test_a_name_that_does_not_exist_is_found(text, fault):
    assert faults(text) == {fault}
    assert not faults("use --tool-call-parser, dtype='float32', `engine pull x`, ENGINE_DEBUG=1")
