"""Command lines with hostile options and with closed, full or undecodable streams.

A command ends with status 0, 1 or 2; where it is not 0, one line says why (usage aside); there is
no traceback, whatever the streams are.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from engine import cli
from tests.fuzz.limits import Limits
from tests.fuzz.tokenizer import BASES
from tests.fuzz.values import dump, json_value
from tests.loading.tiny import write_model

LIMITS = Limits(cpu_seconds=20.0, wall_seconds=90.0)
STREAMS = {
    0: ("pipe", "pipe", "null", "closed", "not UTF-8"),
    1: ("file", "file", "file", "closed", "full", "broken pipe"),
    2: ("file", "file", "file", "file", "closed", "full"),
}
VALUES = (
    *("0", "1", "-1", "2", "0.5", "nan", "inf", "-inf", "1e309", "1e400", "9" * 30, "9" * 5000),
    *("", " ", "x", "\ud800", "é", "-", "--", "-x", "/", ".", "..", "/dev/zero", "/dev/null", "~"),
    *("../..", "a" * 5000, "cpu", "cuda", "cuda:0", "cuda:-1", "cuda:99999999999", "auto", "CPU"),
    *("float32", "bfloat16", "int8", "dummy", "none", "no/such", "a/b/c", "x.gguf", "sm_90a"),
    *(
        "{}",
        "[1]",
        "$(id)",
        ";",
        "0x10",
        "1_0",
        "\u0663",
        "True",
        "MODEL",
        "FIFO",
        "TEXT",
        "int4",
        "80GB",
    ),
    "a\nb",
)
SAMPLING = (
    *("--max-tokens", "--min-tokens", "--temperature", "--top-p", "--top-k", "--min-p", "--seed"),
    *("--repetition-penalty", "--presence-penalty", "--frequency-penalty", "--stop"),
)
MODEL = ("--model", "--device", "--dtype", "--load-format", "--max-model-len", "--quantization")
OPTIONS = {
    "generate": (*SAMPLING, *MODEL, "--file"),
    "chat": (*SAMPLING, *MODEL, "--system"),
    "bench": (
        "--num-requests",
        "--repeats",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--quantization",
        "--json",
    ),
    "eval": (
        *("--file", "--model", "--device", "--dtype", "--quantization", "--context", "--stride"),
        *("--max-tokens", "--compare", "--json"),
    ),
    "pull": ("--nothing",),
    "kernels": ("--arch", "--dtype"),
    "doctor": ("--plan", "--memory", "--dtype", "--max-model-len", "--quantization"),
    "plan": (
        *("--gpu", "--gpus", "--gpus-per-host", "--tensor-parallel-size", "--quantization"),
        *("--pipeline-parallel-size", "--data-parallel-size", "--dtype", "--kv-cache-dtype"),
        *("--max-model-len", "--max-num-seqs", "--num-requests", "--prompt-len", "--output-len"),
        "--memory",
    ),
}
FLAGS = {
    "generate": ("--chat", "--json", "--ignore-eos", "--help"),
    "chat": ("--ignore-eos", "--help"),
    "bench": ("--no-async", "--no-cuda-graphs", "--help"),
    "eval": ("--help",),
    "kernels": ("--help",),
    "plan": ("--enable-expert-parallel", "--json", "--help", "--help=gpu", "--help="),
}
TINY = ["--model", "MODEL", "--device", "cpu", "--max-tokens", "4"]
EVAL = ["perplexity", "--model", "MODEL", "--device", "cpu", "--context", "8", "--file", "TEXT"]
BENCH = ["latency", "--model", "MODEL", "--device", "cpu", "--prompt-len", "4", "--output-len", "3"]


def make(rng: random.Random) -> dict[str, Any]:
    """Make a case."""
    command = rng.choices(list(OPTIONS), [6, 3, 2, 2, 2, 1, 0.3, 2])[0]
    arguments = []
    if command in ("generate", "chat"):
        arguments = [*TINY, *(["--temperature", "0"] if rng.random() < 0.5 else [])]
    elif command == "bench":
        arguments = [*BENCH, "--repeats", "1"]
    elif command == "eval":
        arguments = list(EVAL)
    elif command == "plan":
        arguments = ["MODEL", "--gpus", rng.choice(["1", "8", "96"])]
        arguments += ["--gpu", "h200"] if rng.random() < 0.8 else []
    elif command == "kernels":
        arguments = ["--arch", "sm_90a", rng.choice(["rmsnorm", "gelu"])]
    for _ in range(rng.choice([0, 1, 1, 2])):
        value = rng.choice(VALUES) if rng.random() < 0.9 else dump(json_value(rng))[:2000]
        arguments += [rng.choice(OPTIONS[command]), value.replace("\0", "")]
    if rng.random() < 0.3 and command in FLAGS:
        arguments.append(rng.choice(FLAGS[command]))
    if rng.random() < 0.5 and command in ("generate", "pull"):
        arguments.append(rng.choice(VALUES))
    if rng.random() < 0.05:
        command = rng.choice(VALUES)
    streams = {number: rng.choice(kinds) for number, kinds in STREAMS.items()}
    if rng.random() < 0.5:
        streams = {0: "pipe", 1: "file", 2: "file"}
    texts = ["Hello", "", "/reset\n/exit\n", "a\nb\n", "x" * 3000, "\n\n", "\0"]
    texts += ["/set\n/set top_k x\n/model \0\n/load ../x\n", '"""a\nb"""\n/sytem\n"""']
    text = rng.choice(texts)
    listed = [streams[number] for number in range(3)]
    return {"arguments": [command, *arguments], "streams": listed, "text": text}


class Runner:
    """Runs each command line in a forked process with real descriptors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        sizes = {"vocab_size": 620, "max_position_embeddings": 64, "num_hidden_layers": 1}
        write_model(folder / "model", "llama", **sizes)
        for name, data in BASES["plain"].items():
            (folder / "model" / name).write_bytes(data)
        (folder / "text").write_text("Hello, hello, hello, hello, hello. " * 3)
        os.mkfifo(folder / "fifo")
        os.environ["ENGINE_CACHE_DIR"] = str(folder / "cache")
        _import_commands()
        streams = ["pipe", "file", "file"]
        case = {"arguments": ["generate", *TINY], "streams": streams, "text": "Hello"}
        assert self.run(case).startswith("0")

    def run(self, case: dict[str, Any]) -> str:
        """Return the status and the kind of the last line of standard error."""
        names = {name: str(self._folder / name.lower()) for name in ("MODEL", "FIFO", "TEXT")}
        arguments = [names.get(one, one) for one in case["arguments"]]
        pid = os.fork()
        if pid == 0:
            _child(arguments, case, self._folder)
        status = _wait(pid, LIMITS.wall_seconds - 20)
        out, err = ((self._folder / name).read_bytes() for name in ("out", "err"))
        for name in ("out", "err"):
            (self._folder / name).unlink()
        text = err.decode("utf-8", "replace")
        assert b"Traceback" not in out + err and b"Exception ignored" not in err, text[-3000:]
        assert status in (0, 1, 2), f"status {status}: {text[-500:]}"
        lines = [line for line in text.splitlines() if not line.startswith("engine: device")]
        if status and case["streams"][1:] == ["file", "file"]:
            self._check_reason(case, status, lines, out)
        kind = lines[-1].split(";")[0][:60] if lines else ""
        return f"{status} {''.join(c for c in kind if not c.isdigit())}"

    def _check_reason(
        self, case: dict[str, Any], status: int, lines: list[str], out: bytes
    ) -> None:
        is_usage = any(line.startswith("usage:") for line in lines)
        errors = [line for line in lines if line.startswith("engine") and "error:" in line]
        if is_usage:
            assert status == 2 and errors, lines
            return
        reasons = [line for line in lines if line.startswith("engine")]
        is_report = case["arguments"][0] == "doctor" and b"FAIL" in out
        assert len(reasons) == 1 or is_report or b"error" in out, f"{status}: {lines}"
        assert max(map(len, lines)) < 3000


def _import_commands() -> None:
    import engine.commands.bench
    import engine.commands.chat
    import engine.commands.doctor
    import engine.commands.eval
    import engine.commands.generate
    import engine.commands.kernels
    import engine.commands.plan
    import engine.commands.pull  # noqa: F401


def _wait(pid: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the command did not end in {seconds:g} s")


def _child(arguments: list[str], case: dict[str, Any], folder: Path) -> NoReturn:
    """Run the command as a new process would, and end."""
    status = 70
    try:
        with open(folder / "log", "w") as log:
            _open_streams(case, folder)
            try:
                cli.main(arguments)
                status = 71  # main always exits
            except SystemExit as done:
                status = _status_of(done)
            except BaseException:
                status = 1
                (folder / "err").write_text(traceback.format_exc())
                traceback.print_exc(file=log)
            status = _flush(status, folder)
    finally:
        os._exit(status)


def _status_of(done: SystemExit) -> int:
    if isinstance(done.code, str):
        with contextlib.suppress(OSError):
            print(done.code, file=sys.stderr or open(os.devnull, "w"))  # noqa: SIM115
        return 1
    return int(done.code or 0)


def _flush(status: int, folder: Path) -> int:
    """Flush as the interpreter does at its end, which may fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError as error:
            (folder / "err").write_text(f"Exception ignored: {error}")
            return 120
    return status


def _open_streams(case: dict[str, Any], folder: Path) -> None:
    """Make descriptors 0, 1 and 2 and Python's streams around them."""
    kinds = case["streams"]
    data = case["text"].encode()
    (folder / "in").write_bytes(b"\xff\xfe\n" if kinds[0] == "not UTF-8" else data)
    for name in ("out", "err"):
        (folder / name).write_bytes(b"")
    paths = {"null": "/dev/null", "full": "/dev/full"}
    for number, (kind, name) in enumerate(zip(kinds, ("in", "out", "err"), strict=True)):
        os.close(number)
        if kind == "closed":
            continue
        if kind == "broken pipe":
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, number)
            continue
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY
        opened = os.open(paths.get(kind, str(folder / name)), flags)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
    modes = ("r", "w", "w")
    streams: list[Any] = [
        None if kind == "closed" else open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        for number, (kind, mode) in enumerate(zip(kinds, modes, strict=True))
    ]
    if streams[2] is not None:
        streams[2].reconfigure(errors="backslashreplace", line_buffering=True)
    sys.stdin, sys.stdout, sys.stderr = streams
