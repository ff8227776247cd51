"""answer_formats: tokens per second of gpt-oss's answers, read as harmony and as plain text.

One server (`engine serve`) of gpt-oss-20b's shape: random weights in the published layout, a made
vocabulary. A scripted sampler says the same tokens on both sides, from the same prompts: analysis,
a call, final text. "harmony" are chats with a tool, whose answers are split into reasoning, calls
and content; "plain" are completions of the chats' token ids. All streams begin together, so each
figure includes the prompts; on the "harmony" side it includes rendering and tokenizing the chats.
A process of its own reads the streams.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from engine.text.tokenizer import load_tokenizer
from tests.bench import harmony_model
from tests.bench.harmony_model import TOOLS, Vocabulary

_STREAMS = {"cuda": (64, 1024), "cpu": (4, 256)}  # streams; tokens per answer
_ROUNDS = 3
_SMALL = {  # on the CPU
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}
_QUESTION = 64  # words, one token each
_ROOM = 20 << 30  # bytes that keep the weights off the disk
_START_SECONDS = 400


@contextlib.contextmanager
def _server(folder, device):
    """Serve the model of a folder; yield the server's URL."""
    command = [sys.executable, "-m", "engine", "serve", str(folder), "--port", "0"]
    command += ["--device", device, "--max-model-len", "4096"]
    command += ["--kernels", f"sample={folder}/sampler.py:scripted"]
    log = folder / "server.log"
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not (found := re.search(r"ready at (\S+)", log.read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server has not started:\n{log.read_text()[-4000:]}")
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()


def _loads(folder, vocabulary, lines):
    """Write the script of the answers `lines`; return the path and the bodies of each side."""
    tokenizer = load_tokenizer(folder)
    rng = random.Random(0)
    texts = ["".join(rng.choices(vocabulary.words, k=_QUESTION)) for _ in lines]
    chats = [[{"role": "user", "content": text}] for text in texts]
    rendered = [tokenizer.render_chat(c, add_generation_prompt=True, tools=TOOLS) for c in chats]
    prompts = [tokenizer.encode_prompt(prompt) for prompt in rendered]
    [first] = {len(prompt) for prompt in prompts}  # positions are the same in all streams
    ids = np.array([vocabulary.ids(line) for line in lines], np.int32)
    harmony_model.write_script(folder, ids, first)
    options = {"max_tokens": ids.shape[1], "ignore_eos": True}
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    plain = [options | {"seed": i, "prompt": ids} for i, ids in enumerate(prompts)]
    tools = options | {"tools": TOOLS}
    harmony = [tools | {"seed": i, "messages": chat} for i, chat in enumerate(chats)]
    return {"plain": ("/v1/completions", plain), "harmony": ("/v1/chat/completions", harmony)}


def _measure(url, path, bodies):
    """Send all requests of a side at once; return the client's report."""
    where = urlsplit(url)
    load = {"host": where.hostname, "port": where.port, "path": path, "bodies": bodies}
    command = [sys.executable, "-m", "tests.bench.stream_client"]
    done = subprocess.run(
        command, input=json.dumps(load), stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def _check(side, streams, lines):
    """Check that each stream has said its line; on the side "harmony", in its parts."""
    usages = {(s["usage"]["prompt_tokens"], s["usage"]["completion_tokens"]) for s in streams}
    assert len(usages) == 1 and usages.pop()[1] == len(lines[0]), usages
    for said, line in zip(streams, lines, strict=True):
        text = "".join(line)
        if side == "plain":
            assert said["text"] == re.sub(r"<\|.*?\|>", "", text), said
            continue
        thought, call, final = re.findall(r"<\|message\|>(.*?)(?:<\|end\|>|<\|call\|>|$)", text)
        assert said["reasoning"] == thought, said
        assert said["arguments"] == call and json.loads(call), said
        assert said["content"].strip() == final.strip(), said


def main(device):
    """Measure both sides in turn, print each figure, and return the rows."""
    count, num_tokens = _STREAMS[device.kind]
    vocabulary = Vocabulary()
    lines = [harmony_model.answer(vocabulary, i, num_tokens) for i in range(count)]
    config = harmony_model.make_config(**({} if device.is_cuda else _SMALL))
    in_memory = Path("/dev/shm")
    has_room = in_memory.is_dir() and shutil.disk_usage(in_memory).free > _ROOM
    rates = {"plain": [], "harmony": []}
    with tempfile.TemporaryDirectory(dir=in_memory if has_room else None) as name:
        folder, start = Path(name), time.perf_counter()
        harmony_model.write_tokenizer(folder, vocabulary, config)
        loads = _loads(folder, vocabulary, lines)
        harmony_model.write_weights(folder, config)
        print(f"  model written in {time.perf_counter() - start:.0f} s", flush=True)
        start = time.perf_counter()
        with _server(folder, device.kind) as url:
            print(f"  server ready in {time.perf_counter() - start:.0f} s", flush=True)
            for number in range(1 + _ROUNDS):  # the first round compiles
                for side, load in loads.items():
                    report = _measure(url, *load)
                    _check(side, report["streams"], lines)
                    rates[side].append(count * num_tokens / report["seconds"])
                    frames = sum(stream["frames"] for stream in report["streams"])
                    print(
                        f"  {f'round {number}' if number else 'warm-up'}, {side}: "
                        f"{rates[side][-1]:.0f} tokens/s, the last stream begun after "
                        f"{max(report['begun']):.3f} s, {frames} frames",
                        flush=True,
                    )
    plain, rows = statistics.median(rates["plain"][1:]), []
    for side, found in rates.items():
        rate = statistics.median(found[1:])
        rows.append({"op": "answer_formats", "case": f"{side}, {count} streams"})
        rows[-1] |= {"tokens/s": rate, "x plain": rate / plain}
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else v for k, v in rows[-1].items()))
    return rows
