"""The structure of the repository: five files per op, imports only downward, no unsafe code."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest

from engine import env, kernels, reference
from tests import structure

ROOT = Path(__file__).parents[1]
OPS = sorted(m.name for m in pkgutil.iter_modules(kernels.__path__) if not m.name.startswith("_"))
OUTPUT_KEYWORDS = {
    "out", "normed_out", "residual_out", "lse_out", "dlogits_out", "dq", "dk", "dv", "dsinks",
}  # fmt: skip

# From the ground up: a module imports only from parts that stand before its own, or its own.
ORDER = (
    *("_version", "errors", "signatures", "config", "outputs", "checks", "cards", "drafts"),
    *("lora_request",),
    *("env", "threads", "plan_array", "device", "dtypes", "model_files", "request"),
    *("text", "weights", "reference", "testing", "structured", "sampling_params", "kernels"),
    *("cache", "layers", "distributed", "models", "scheduler", "loading", "runner"),
    *("model", "quantization", "speculative", "engine_config", "options", "core", "scaling"),
    *("parallel", "llm_engine", "snapshot", "tasks", "shared_engine", "async_engine"),
    *("llm", "__init__", "integrations", "server", "commands", "cli", "__main__"),
)
LAYERS = {part: number for number, part in enumerate(ORDER)}

# Keywords of public ops that only affect where or how the kernel runs, absent from the mirror.
LAUNCH_KEYWORDS = {
    "max_seqlen_q", "max_seqlen_k", "max_context_len", "num_splits", "pdl", "total_tokens",
    "deterministic", "num_experts", "is_late", "peers",
}  # fmt: skip


def _sources() -> list[Path]:
    return sorted((ROOT / "engine").rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _part(path: Path) -> str:
    return path.relative_to(ROOT / "engine").parts[0].removesuffix(".py")


def test_every_environment_variable_is_declared():
    read = {
        name
        for path in _sources()
        for name in re.findall(r"[\"'](ENGINE_[A-Z_]+)[\"']", path.read_text())
    }
    assert read == {variable.name for variable in env.VARIABLES}


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_five_files(op):
    """Its sources are in the folder itself, or in the folder of its family."""
    for folder, name in (
        ("cuda_src", f"{op}.cu"),
        ("engine/kernels", f"{op}.py"),
        ("engine/reference", f"{op}.py"),
        ("tests/kernels", f"test_{op}.py"),
        ("tests/bench", f"bench_{op}.py"),
    ):
        found = [*(ROOT / folder).glob(name), *(ROOT / folder).glob(f"*/{name}")]
        assert len(found) == 1, f"op {op!r} needs one {folder}/{name}; found {found}"


def test_every_cuda_file_belongs_to_an_op():
    """A second source of an op is named `<op>_<variant>.cu`."""
    for path in (ROOT / "cuda_src").rglob("*.cu"):
        op = re.sub("(_few_tokens|_chunks|_stream)?(_sm90)?$", "", path.stem)
        assert op in OPS, f"{path.name} belongs to no op"


def test_a_headers_name_is_unique():
    """Comments and docs name a header without its folder."""
    names = [path.name for path in (ROOT / "cuda_src").rglob("*.cuh")]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"two folders hold {sorted(twice)}: put the family's name in front"


def _families_of_headers() -> dict[str, set[str]]:
    """Return, for each header, the families whose `.cu` files include it, directly or not.

    A family is a folder of `cuda_src/`, or a single `.cu` file beside these folders.
    """
    source = ROOT / "cuda_src"
    texts = {str(p.relative_to(source)): p.read_text() for p in source.rglob("*.cu*")}
    includes = {
        name: re.findall(r'^\s*#include "([^"]+)"', text, re.MULTILINE)
        for name, text in texts.items()
    }
    families: dict[str, set[str]] = {name: set() for name in texts if name.endswith(".cuh")}
    for name in texts:
        if name.endswith(".cu"):
            pending, seen = [name], set()
            while pending:
                for header in includes[pending.pop()]:
                    if header not in seen:
                        seen.add(header)
                        pending.append(header)
            for header in seen:
                families[header].add(name.split("/")[0])
    return families


def test_a_common_header_serves_two_families():
    """A header of one family is in that family's folder, and no other family includes it.

    A public one serves the users' kernels.
    """
    public = {header.include for header in kernels.headers().values()}
    for header, families in _families_of_headers().items():
        folder = header.split("/")[0]
        if header in public:
            continue
        if folder == "common":
            assert len(families) > 1, f"{header} serves {sorted(families)} only: move it there"
        else:
            assert families == {folder}, f"{header} is read by {sorted(families)}: see common/"


@pytest.mark.parametrize("op", OPS)
def test_the_mirror_has_the_ops_signature(op):
    public = inspect.signature(getattr(kernels, op)).parameters
    mirror = inspect.signature(getattr(reference, op)).parameters
    keywords = {name for name, p in public.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    ignored = keywords & (OUTPUT_KEYWORDS | LAUNCH_KEYWORDS)
    wanted = [name for name in public if name not in ignored]
    # An op that reads the former values of `out` has a mirror that takes it.
    others = (LAUNCH_KEYWORDS | ignored) - set(wanted)
    assert [name for name in mirror if name not in others] == wanted
    for name in wanted:
        assert mirror[name].default == public[name].default, f"{op}: default of {name!r} differs"


def _imports(path: Path) -> set[str]:
    """Return the parts of the package that the file imports."""
    parts: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "engine" and len(pieces) > 1 and pieces[1] in LAYERS:
                parts.add(pieces[1])
    return parts


def test_imports_only_go_down():
    for path in _sources():
        part = _part(path)
        assert part in LAYERS, f"{path} belongs to no layer; add it to LAYERS"
        for other in _imports(path):
            assert LAYERS[other] <= LAYERS[part], f"{path} (L{LAYERS[part]}) imports {other}"
            is_its_kernel = part == "reference" and other == "kernels"
            assert not is_its_kernel, f"{path}: a mirror imports its kernel"


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _modules() -> set[str]:
    return {_module_name(source) for source in _sources()}


def _first_party_imports(path: Path) -> dict[int, set[str]]:
    """Return the package's modules that a file imports, by the line that does."""
    modules = _modules()
    found: dict[int, set[str]] = {}
    for node in ast.walk(_tree(path)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            # `from engine import kernels` runs engine/__init__ too, but that imports nothing.
            inner = [name for name in names[:-1] if name in modules]
            names = inner if len(inner) == len(names) - 1 else names
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        known = {name for name in names if name in modules and name != "engine"}
        if known:
            found.setdefault(node.lineno, set()).update(known)
    return found


def test_no_import_is_a_cycle():
    """Imports inside functions count, too."""
    graph = {
        _module_name(path): set().union(*_first_party_imports(path).values())
        for path in _sources()
        if path != ROOT / "engine" / "__init__.py"  # imports its names on demand
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"cycle: {' -> '.join((*way[way.index(module) :], module))}"
        if module not in done:
            for other in sorted(graph.get(module, ()) - {module}):
                # A package's __init__ re-exports names of its own modules.
                if not module.startswith(f"{other}."):
                    visit(other, (*way, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_an_import_inside_a_function_says_why():
    for path in _sources():
        _check_imports_inside_functions(path)


def _check_imports_inside_functions(path: Path) -> None:
    lines = path.read_text().splitlines()
    for node in ast.walk(_tree(path)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        previous_end = 0
        for inner in ast.walk(node):
            if not isinstance(inner, ast.Import | ast.ImportFrom):
                continue
            module = getattr(inner, "module", None) or inner.names[0].name
            if module.split(".")[0] == "engine":
                above = lines[inner.lineno - 2].strip()
                has_reason = "#" in lines[inner.lineno - 1] or above.startswith("#")
                follows = above.startswith(("from engine", "import engine")) and previous_end
                assert has_reason or follows, f"{path}:{inner.lineno}: no reason beside the import"
                previous_end = inner.end_lineno or 0


def test_sizes_of_weights_are_asked_of_the_weight():
    """With formats, scales and shards, the size of an array is not that of the `Weight`."""
    for path in _sources():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            bare = re.search(r"\.weight\.(data\.)?(size|nbytes)\b", line)
            assert not bare, f"{path}:{number}: use num_elements or num_bytes"


def test_nothing_dangerous_in_the_package():
    never = {"pickle", "marshal", "dill", "cloudpickle", "shelve"}
    for path in _sources():
        banned = never if _part(path) == "integrations" else never | {"torch", "jax", "vllm"}
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
                assert not banned & {n.split(".")[0] for n in names}, f"{path} imports {names}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "__import__"}, f"{path}:{node.lineno}"


def test_row_offsets_are_64_bit_in_cuda():
    """`blockIdx.x * n` overflows at 2^31 elements: an index is widened before it is multiplied."""
    narrow = re.compile(r"(?<!<int64_t>\()blockIdx\.[xyz]\s*\*\s*(?!k[A-Z])[a-z]\w*stride")
    for path in (ROOT / "cuda_src").rglob("*.cu*"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not narrow.search(line), f"{path.name}:{number}: {line.strip()}"


def test_lines_of_cuda_sources_have_100_columns():
    """clang-format keeps code to them, but leaves comments as they are."""
    for path in (ROOT / "cuda_src").rglob("*.cu*"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 100, f"{path.relative_to(ROOT)}:{number} has {len(line)} columns"


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return a function's lines without its signature and docstring."""
    first = function.body[0]
    is_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    start = (first.end_lineno or 0) if is_doc else first.lineno - 1
    return (function.end_lineno or 0) - start


@pytest.mark.filterwarnings("default")
def test_long_files_and_functions_are_named():
    """A file or function is cut at an idea, so length only warns."""
    for path in _sources():
        text = path.read_text()
        if (length := text.count("\n")) > 500:
            warnings.warn(f"{path.relative_to(ROOT)} has {length} lines", stacklevel=1)
        for node in ast.walk(_tree(path)):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and (length := _code_lines(node)) > 60:
                name = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                warnings.warn(f"{name} has {length} lines", stacklevel=1)


def test_an_assignment_makes_one_value():
    """`a, b = x, y` hides that two things happen; a swap is one."""
    for path in _sources():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                targets = node.targets[0]
                if isinstance(targets, ast.Tuple):
                    read = {ast.unparse(name) for name in ast.walk(node.value)}
                    is_swap = any(ast.unparse(target) in read for target in targets.elts)
                    assert is_swap, f"{path}:{node.lineno}: one statement, one value"


@pytest.mark.parametrize("path", structure.packages(), ids=lambda path: path.parent.name)
def test_a_package_says_what_it_holds(path):
    assert structure.first_sentence(path), f"{path} needs a docstring of one sentence"


def test_the_page_about_the_structure_is_up_to_date():
    text = structure.PAGE.read_text()
    assert text == structure.page(), "run: python -m tests.structure"
    assert text.count("\n") <= 76


def test_import_is_light():
    """`import engine` loads neither CuPy nor a tokenizer."""
    code = (
        "import sys, engine; print([m for m in ('cupy', 'tokenizers', 'jinja2', 'gguf', "
        "'safetensors', 'huggingface_hub', 'msgspec', 'starlette', 'uvicorn', 'zmq', "
        "'prometheus_client') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
