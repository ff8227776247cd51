"""Python files that define ops: "my_op.py", or "my_op.py:scale_rows" for one of its names."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, EngineError
from engine.kernels._user.op import Op

__all__ = ["check_target", "in_line", "load_name", "load_ops"]


def load_ops(target: str) -> dict[str, Op]:
    """Run a Python file and return the ops at its top level, each once, by variable; or the one
    named.

    Parameters
    ----------
    target : str
        "FILE.py" or "FILE.py:NAME".

    Raises
    ------
    ConfigError
        If there is no such file, it fails, or it has no such op.
    """
    path, name = _parts(target)
    module = _run(path)
    ops = {key: value for key, value in vars(module).items() if isinstance(value, Op)}
    if name and name not in ops:
        raise ConfigError(f"{path} has no op called {name!r}; its ops: {', '.join(ops) or 'none'}")
    if not ops:
        raise ConfigError(f"{path} has no op at its top level; kernels.define makes one")
    if name:
        return {name: ops[name]}
    firsts = {op: key for key, op in reversed(ops.items())}
    return {key: op for key, op in ops.items() if key == firsts[op]}


def check_target(target: str) -> Path:
    """Return the path of the Python file of "FILE.py" or "FILE.py:NAME".

    Raises
    ------
    ConfigError
        If there is no such file.
    """
    return _parts(target)[0]


def load_name(target: str) -> Any:
    """Run a Python file and return what it calls NAME, for "FILE.py:NAME".

    Raises
    ------
    ConfigError
        If there is no such file or name, or it fails.
    """
    path, name = _parts(target)
    if not name:
        raise ConfigError(f"must be FILE.py:NAME; got {target!r}")
    module = _run(path)
    if not hasattr(module, name):
        known = ", ".join(key for key in vars(module) if not key.startswith("_"))
        raise ConfigError(f"{path} has nothing called {name!r}; its names: {known or 'none'}")
    return getattr(module, name)


def in_line(file: str, error: BaseException) -> str:
    """Return " in line 12", the last line of `file` that `error` passed; "" if it passed none."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    return f" in line {lines[-1]}" if lines else ""


def _parts(target: str) -> tuple[Path, str]:
    path, _, name = target.rpartition(":") if ".py:" in target else (target, "", "")
    if not Path(path).is_file():
        raise ConfigError(f"file must be a Python file, or FILE.py:NAME; there is no file {path!r}")
    return Path(path).resolve(), name


def _run(path: Path) -> Any:
    """Return the file's module; a second call returns the same one, unless the file has changed."""
    stamp = f"{path}:{path.stat().st_mtime_ns}"
    key = f"engine_user_{path.stem}_{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"file must be a Python file; got {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    sys.path.insert(0, str(path.parent))  # as if the file were run
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[key]
        if isinstance(error, EngineError) or not isinstance(error, Exception):
            raise
        where = in_line(str(path), error)
        raise ConfigError(f"{path} fails{where}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module
