"""`Target`: a server of a tiny model, in processes of its own, and what an attack asks about it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine.text.token_bytes import byte_alphabet
from tests.attack.watch import health_seconds

ROOT = Path(__file__).parents[2]
_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 3,
    "bos_token_id": 1,
}
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_START_SECONDS = 60
_API = "engine.server.api_process"
_ENGINE = "engine.server.engine_process"


class Target:
    """A running server; a context manager, which ends it.

    Parameters
    ----------
    *options : str
        Further options of `engine serve`.
    source : Path, optional
        Repository whose engine is served; another one allows comparing two commits.

    Attributes
    ----------
    port : int
    folder : Path
        The server's TMPDIR, in which the engine's sockets are.
    """

    def __init__(self, *options: str, source: Path = ROOT) -> None:
        self._options = options
        self._source = source.resolve()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Target:
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attack-")))
            self._start()
            stack.callback(self._end)
            self._wait_until_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        model = self.folder / "model"
        write_tiny_model(model)
        self._log = self.folder / "stderr"
        code = (
            f"import sys; sys.path[0] = {str(self._source)!r}\nfrom engine.cli import main; main()"
        )
        options = ["--device", "cpu", "--load-format", "dummy", "--num-blocks", "4096"]
        options += ["--port", "0", *self._options]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "serve", str(model), *options],
                cwd=self._source,
                stderr=log,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "TMPDIR": str(self.folder)},
                start_new_session=True,
            )

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while not (found := re.search(r"ready at https?://.*:(\d+)", self.log())):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {self.log()[-2000:]}")
            time.sleep(0.05)
        self.port = int(found[1])

    def _end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its children end when their pipe from it closes
            self.process.wait()

    # ---- what an attack asks

    def log(self) -> str:
        """Return what the server has written to standard error."""
        return self._log.read_text(errors="replace")

    def is_alive(self) -> bool:
        """Return whether the server's main process runs."""
        return self.process.poll() is None

    def api_pids(self) -> list[int]:
        """Return the ids of the API processes; another set after an attack means one has died."""
        return self._children(_API)

    def engine_pids(self) -> list[int]:
        """Return the ids of the engine's processes."""
        return self._children(_ENGINE)

    def _children(self, module: str) -> list[int]:
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return sorted(pid for pid in map(int, pids.split()) if module in _command(pid))

    def memory(self) -> int:
        """Return the resident bytes of the API processes."""
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.api_pids()]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float:
        """Return the CPU time that the API processes have used."""
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in self.api_pids()]
        ticks = sum(sum(map(int, text.rpartition(")")[2].split()[11:13])) for text in stats)
        return ticks / os.sysconf("SC_CLK_TCK")

    def connect(self, timeout: float = 20.0) -> socket.socket:
        """Return a connection to the server."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def ask(self, request: bytes, timeout: float = 20.0) -> bytes:
        """Send a request on a connection of its own; return what comes until it is closed."""
        found = b""
        with self.connect(timeout) as connection, contextlib.suppress(OSError):
            connection.sendall(request)
            while data := connection.recv(65536):
                found += data
        return found

    def health_seconds(self, timeout: float = 20.0) -> float:
        """Return the time that /health takes; `timeout` if the answer is not 200."""
        return health_seconds(self.port, timeout)

    @contextlib.contextmanager
    def watched(self, interval: float = 0.05, begins: list[float] | None = None):
        """Ask for /health all the time, from another process, which the attack does not hold up.

        Yields a list. Once the context has ended, it has the seconds that each answer has taken,
        and `begins` when they were asked for (`time.monotonic`).
        """
        taken: list[float] = []
        watcher = subprocess.Popen(
            [sys.executable, "-m", "tests.attack.watch", str(self.port), str(interval)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            yield taken
        finally:
            found, _ = watcher.communicate(timeout=60)
            answers = json.loads(found)
            taken += [seconds for _, seconds in answers]
            if begins is not None:
                begins += [begin for begin, _ in answers]


def write_tiny_model(folder: Path, *, has_template: bool = True) -> None:
    """Write a model without weights, for `--load-format dummy`, into a new folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    if has_template:
        (folder / "chat_template.jinja").write_text(_TEMPLATE)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _tokenizer() -> dict:
    """Return a tokenizer with a token for each ASCII character."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = True
    letters = {letter: byte for letter, byte in byte_alphabet().items() if byte < 128}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }
