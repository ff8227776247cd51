"""The pages of the public API, from signatures and docstrings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from pages import ROOT, Pages

import engine
from engine import errors, kernels, reference
from engine.engine_config import CONFIG_OPTIONS, EngineConfig
from engine.model import LOAD_OPTIONS

# Title -> objects; the first of a page names it. Beside the names of `engine`, the types that
# their methods return.
OBJECTS = {
    "LLM": ("engine.LLM",),
    "LLMEngine": ("engine.LLMEngine", "engine.llm_engine.QueueFullError"),
    "AsyncEngine": ("engine.AsyncEngine", "engine.async_engine.ModelInfo"),
    "load, Model": (
        *("engine.load", "engine.Model", "engine.model.Cache", "engine.model.LoadConfig"),
        "engine.models.trace.Trace",
    ),
    "SamplingParams": (
        *("engine.SamplingParams", "engine.sampling_params.RequestOutputKind"),
        *("engine.StructuredOutput", "engine.BeamSearchParams", "engine.LoRARequest"),
    ),
    "RequestOutput": (
        *("engine.RequestOutput", "engine.CompletionOutput", "engine.outputs.Logprob"),
        *("engine.outputs.RequestMetrics", "engine.tasks.beam_search.BeamSearchOutput"),
        *("engine.tasks.beam_search.BeamSearchSequence", "engine.core.stats.EngineStats"),
        "engine.core.stats.Histogram",
    ),
    "Tokenizer": ("engine.text.tokenizer.Tokenizer",),
    "quantize": ("engine.quantize",),
}
_PLUMBING = {  # methods that other processes' models replace, and the engine alone calls
    "engine.Model": "check_ranks, close_ranks, describe_ranks, draft_target, feature_layers, "
    "forward, local_model, num_ranks, num_stages, prepare_pages, share_graphs, share_pages, "
    "stage_sizes"
}


def page_names() -> list[str]:
    """Return the pages of the API, without those of the ops."""
    named = [objects[0].rpartition(".")[2] for objects in OBJECTS.values()]
    return [*named, "options", "errors", "define", "kernels"]


def ops() -> list[str]:
    """Return the ops of the catalog."""
    return [name for name in reference.__all__ if inspect.isfunction(getattr(reference, name))]


def add_api(pages: Pages) -> None:
    """Write all pages."""
    for title, objects in OBJECTS.items():
        name = objects[0].rpartition(".")[2]
        parts = [_directive(path) for path in objects]
        pages.add(f"docs/api/{name}.md", f"# {title}\n\n" + "\n".join(parts))
    pages.add("docs/api/options.md", _options())
    pages.add("docs/api/errors.md", _errors())
    pages.add("docs/api/define.md", _define())
    pages.add("docs/api/kernels.md", _kernels())
    for op in ops():
        pages.add(f"docs/api/kernels/{op}.md", _op(op))


def _directive(path: str) -> str:
    """Return the directive that documents an object, with its public members if it is a class."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    options = ""
    kind = "autofunction" if inspect.isroutine(found) else "autodata"
    if inspect.isclass(found):
        kind = "autoclass"
        options = "" if issubclass(found, BaseException) else "   :members:\n"
        if path in _PLUMBING:
            options += f"   :exclude-members: {_PLUMBING[path]}\n"
    return f"```{{eval-rst}}\n.. {kind}:: {path}\n{options}```\n"


# ---- options


def _options() -> str:
    """Return the table of every option, from the same two places as the signature of `LLM`."""
    described = _described(engine.load) | _described(EngineConfig)
    ranges = {field.name: field.metadata for field in dataclasses.fields(EngineConfig)}
    rows = []
    for name, parameter in (LOAD_OPTIONS | CONFIG_OPTIONS).items():
        default = f"`{parameter.default!r}`"
        allowed = _allowed(ranges.get(name, {}))
        rows.append(f"`{name}`\n: {default}{allowed}. {described[name]}\n")
    page = _OPTIONS_HEAD + "\n".join(rows)
    return f"{page}\n## EngineConfig\n\n{_directive('engine.engine_config.EngineConfig')}"


_OPTIONS_HEAD = """# Options

Keywords of `LLM`, `LLMEngine.from_name` and `AsyncEngine.from_name`, with default and allowed
values. `engine serve` has a flag for each (`--max-num-seqs`). An unknown keyword is an
`UnknownOptionError` that names the nearest known one.

"""


def _allowed(metadata: Mapping[str, Any]) -> str:
    if "choices" in metadata and True not in metadata["choices"]:
        return "; one of " + ", ".join(f"`{choice!r}`" for choice in metadata["choices"])
    return f"; {metadata['range']}" if "range" in metadata else ""


def _described(function: Any) -> dict[str, str]:
    """Return the text of each parameter of a numpydoc docstring, as Markdown on one line."""
    section = inspect.getdoc(function).split("Parameters\n----------\n")[1]
    section = re.split(r"\n\n\w+\n-+\n", section)[0]
    found = {}
    for names, text in re.findall(r"^(\w[\w, ]*) : .*\n((?:    .*\n?)+)", section, re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), " ".join(text.split()).replace("<", "&lt;"))
    return found


# ---- errors and kernels


def _errors() -> str:
    tree = inspect.getdoc(errors).split("\n\n")[1]
    classes = [name for name in errors.__all__ if inspect.isclass(getattr(errors, name))]
    parts = [_directive(f"engine.errors.{name}") for name in classes]
    head = "# Errors\n\nEach derives from the built-in exception that NumPy would raise.\n\n"
    return f"{head}```text\n{textwrap.dedent(tree)}\n```\n\n" + "\n".join(parts)


_OF_OPS = ("BlockSparse", "Periodic", "Routing")  # arguments of ops
_FIRST = ("define", "Op", "Problem", "Launch")  # in the order of reading; the rest by name


def _define() -> str:
    """Return the page of the names for a kernel of the user's own."""
    known = {*ops(), *_OF_OPS, *_FIRST}
    names = [*_FIRST, *sorted(set(kernels.__all__) - known, key=str.lower)]
    parts = [_directive(f"engine.kernels.{name}") for name in names]
    return _DEFINE_HEAD + "\n".join(parts)


_DEFINE_HEAD = """# define, check, override

Names of `engine.kernels` for [a kernel of your own](../your_kernel.md). The
[CUDA headers](../headers.md) have a page of their own.

"""


def _kernels() -> str:
    """Return the page of the catalog: a table of the ops, and the types of their arguments."""
    rows = [f"| [`{op}`](kernels/{op}.md) | {_first_line(op)} |\n" for op in ops()]
    parts = [_directive(f"engine.kernels.{name}") for name in _OF_OPS]
    return _KERNELS_HEAD + "".join(rows) + "\n" + "\n".join(parts)


_KERNELS_HEAD = """# The catalog

Functions on arrays in `engine.kernels`: NumPy arrays run the mirror, CuPy arrays the CUDA kernel;
arrays with `__dlpack__` or `__cuda_array_interface__` are accepted without a copy.

| op | computes |
|---|---|
"""


def _first_line(op: str) -> str:
    text = inspect.getdoc(getattr(kernels, op)).partition("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


def _op(name: str) -> str:
    """Return the page of an op: the function, its mirror, and links to its sources."""
    mirror = inspect.getsource(getattr(reference, name))
    found = {
        label: path.relative_to(ROOT).as_posix()
        for label, pattern in _FILES.items()
        for path in ROOT.glob(pattern.format(name))
    }
    links = "\n".join(f"- {label}: [`{path}`](../../../{path})" for label, path in found.items())
    return (
        f"# {name}\n\n{_directive(f'engine.kernels.{name}')}\n## Sources\n\n{links}\n\n"
        f"## The mirror\n\nThe specification, `engine.reference.{name}`:\n\n"
        f"```python\n{mirror}```\n"
    )


_FILES = {
    "kernel": "cuda_src/**/{}.cu",
    "contract, choice of configuration and launch": "engine/kernels/**/{}.py",
    "mirror": "engine/reference/{}.py",
    "measured": "docs/benchmarks/{}.md",
}
