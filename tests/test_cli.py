"""The command line: output, exit status, and no progress bars in pipes.

Command lines run in this process, except where streams, signals or the environment of a new process
are what is tested.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from engine.cli import COMMANDS, main
from engine.commands._parser import CommandParser
from tests.attack.target import write_tiny_model

ENGINE = [sys.executable, "-m", "engine"]
GREEDY = ["--device", "cpu", "--temperature", "0", "--max-tokens", "8", "--max-model-len", "512"]


def _run(*arguments, text="", status=0, **env):
    done = subprocess.run(
        [*ENGINE, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture
def command(capsys, monkeypatch):
    """A function that runs a command line in this process and returns its output and errors."""

    def run(*arguments, text="", status=0):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        done = capsys.readouterr()
        assert ended.value.code == status, done.out + done.err
        return SimpleNamespace(stdout=done.out, stderr=done.err)

    return run


def test_help_names_every_command(command):
    text = command("--help").stdout
    for name in ("generate", "chat", "run-batch", "pull", "doctor", "plan", "bench", "eval",
                 "kernels"):  # fmt: skip
        assert name in text and "usage" in command(name, "--help").stdout


def test_without_a_command_the_help_has_an_example_of_each(command):
    text = command().stdout
    for name, (about, example) in COMMANDS.items():
        assert f"  {name}" in text and about in text and f"$ {example}\n" in text
        words = shlex.split(example)[1:]
        assert words[0] == name
        parser = CommandParser()
        importlib.import_module(f"engine.commands.{name.replace('-', '_')}").add_arguments(parser)
        parser.read(words[1:])


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("genrate", "x"), "there is no command 'genrate'; did you mean 'generate'?"),
        (("run", "smollm2"), "there is no command 'run'; did you mean 'chat'?"),
        (("zzz",), "there is no command 'zzz'; commands: chat, generate"),
        (("generate", "--temprature=1", "x"), "--temprature=1; did you mean '--temperature'?"),
        (("ps", "--port", "1"), "unrecognized arguments: --port 1 (see engine ps --help)"),
        (("bench", "thruput"), "got 'thruput'; did you mean 'throughput'?"),
        (("bench", "smollm2", "thruput"), "got 'thruput'; did you mean 'throughput'?"),
        (("eval", "perplexty", "--file", "x"), "got 'perplexty'; did you mean 'perplexity'?"),
        (("kernels", "rmsnrom", "--arch", "sm_90a"), "did you mean 'rmsnorm'?"),
        (("kernels", "nosuch", "--arch", "sm_90a"), "profile, headers); got 'nosuch'\n"),
        (("kernels", "bench", "rmsnrom"), "did you mean 'rmsnorm'?"),
        (("kernels", "--arch", "sm_90a", "check", "x.py"), "'check' must be the first word after"),
        (("plan", "smollm2", "--gpu", "h220"), "did you mean 'h200'?"),
        (("generate", "x", "--model", "smolm2"), "did you mean 'smollm2'?"),
        (("bench", "qwen3-0.6", "--device", "cpu"), "did you mean 'qwen3-0.6b'?"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(command, arguments, hint):
    done = command(*arguments, status=2)
    assert hint in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["chat", "generate", "serve", "bench", "eval", "plan"])
def test_every_command_takes_the_model_as_its_argument_or_as_an_option(name):
    parser = CommandParser(prog=name)
    importlib.import_module(f"engine.commands.{name}").add_arguments(parser)
    needed = {"eval": ["--file", "x"], "plan": ["--gpu", "h200"], "generate": ["x"]}.get(name, [])
    first = parser.read(["one", *needed])
    assert (getattr(first, "kind", None) or first.named_model) == "one"
    option = parser.read(["--model", "one", *needed])
    assert option.model == "one"


@pytest.mark.parametrize(
    "arguments",
    [
        ("chat", "one", "--model", "two"),
        ("generate", "one", "x", "--model", "two"),
        ("serve", "one", "--model", "two"),
        ("bench", "latency", "one", "--model", "two"),
        ("bench", "one", "--model", "two"),
        ("eval", "one", "--model", "two", "--file", "x"),
        ("plan", "one", "--model", "two", "--gpu", "h200"),
    ],
)
def test_two_models_are_an_error(command, arguments):
    assert "give one model; got 'one' and --model 'two'" in command(*arguments, status=2).stderr


def test_generate_takes_a_model_a_prompt_or_both(command):
    prompt = "The capital of France is"
    both = command("generate", "smollm2", *GREEDY, prompt).stdout
    assert "Paris" in both
    assert command("generate", "smollm2", *GREEDY, text=prompt).stdout == both
    assert command("generate", "--model", "smollm2", prompt, *GREEDY).stdout == both
    done = command("generate", "someone/model", *GREEDY, status=2)
    assert "may be a model or a prompt: engine generate MODEL PROMPT" in done.stderr


def test_version():
    from engine import __version__

    assert _run("--version").stdout.strip() == f"engine {__version__}"


def test_generate_prompt_file_and_stdin_agree(command, tmp_path):
    prompt = "The capital of France is"
    (tmp_path / "prompt.txt").write_text(prompt, "utf-8-sig")  # some editors begin with a BOM
    by_argument = command("generate", prompt, *GREEDY)
    assert "Paris" in by_argument.stdout
    assert "8 tokens after 5" in by_argument.stderr
    assert "cpu, 1 thread, float32" in by_argument.stderr  # the tests set OPENBLAS_NUM_THREADS
    assert "%|" not in by_argument.stderr  # no progress bar: stderr is no terminal
    assert command("generate", "--file", str(tmp_path / "prompt.txt"), *GREEDY).stdout == (
        by_argument.stdout
    )
    from_stdin = _run("generate", text=prompt, *GREEDY)  # noqa: B026
    assert from_stdin.stdout == by_argument.stdout


def test_generate_json(command):
    done = command("generate", "--chat", "What is the capital of France?", "--json", *GREEDY)
    record = json.loads(done.stdout)
    assert record["text"] == "The capital of France is Paris."
    assert record["finish_reason"] in ("stop", "length") and record["dtype"] == "float32"
    assert record["ttft_seconds"] > 0 and len(record["token_ids"]) <= 8


@pytest.fixture
def tiny(tmp_path):
    """Folders of a model, of one without a chat template, and of a damaged one."""
    folders = [tmp_path / name for name in ("tiny", "plain", "damaged")]
    for folder in folders:
        write_tiny_model(folder, has_template=folder.name != "plain")
    (folders[0] / "generation_config.json").write_text('{"temperature": 0.3, "do_sample": true}')
    (folders[2] / "config.json").write_text('{"model_type": "llama"}')
    return folders


TINY = ("--device", "cpu", "--load-format", "dummy", "--max-tokens", "3", "--seed", "1")


def test_chat_goes_on_with_another_model(command, tiny):
    model, plain, damaged = tiny
    other = model.with_name("other")
    shutil.copytree(model, other)
    lines = ("one", "/model nowhere", f"/model {damaged}", f"/model {plain}", "two")
    lines = (*lines, f"/model {other}", "three", "/model")
    done = command("chat", str(model), *TINY, text="\n".join(lines))
    first, second, third = map(int, re.findall(r"3 tokens after (\d+)", done.stderr))
    assert first < second < third  # the whole conversation goes to the new model
    errors = [line for line in done.stderr.splitlines() if line.startswith("engine chat: ")]
    assert "model 'nowhere' is not known" in errors[0] and "config.json" in errors[1]
    assert "no chat template" in errors[2] and len(errors) == 3
    assert done.stderr.count(f"model: {other}") == 2


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_an_answer_that_an_error_ends_tells_it(command, tiny, name):
    file = tiny[0].with_name("mine.py")
    file.write_text("def fails(ids, logits):\n    raise ValueError('no logits today')\n")
    options = ("--model", str(tiny[0]), *TINY, "--logits-processors", f"{file}:fails")
    done = command(name, *options, text="one", status=name == "generate")
    assert "no logits today" in done.stderr


def test_a_model_whose_loading_is_stopped_leaves_the_former_one(command, tiny, monkeypatch):
    from engine.commands import chat

    def load(arguments, load=chat._load):
        if arguments.model == "stopped":
            raise KeyboardInterrupt
        return load(arguments)

    monkeypatch.setattr(chat, "resolve_model", lambda *_, **__: None)
    monkeypatch.setattr(chat, "_load", load)
    done = command("chat", str(tiny[0]), *TINY, text="one\n/model stopped\ntwo")
    first, second = map(int, re.findall(r"3 tokens after (\d+)", done.stderr))
    assert first < second and done.stdout.splitlines()[1] == "[stopped]"
    assert f"model: {tiny[0]}" in done.stderr.splitlines()


def test_set_tells_the_defaults_of_the_model(command, tiny):
    done = command("chat", str(tiny[0]), *TINY, text="/set\n/set top_k 3\n/set temperature")
    rows = [line.split(maxsplit=2) for line in done.stderr.splitlines()]
    assert ["temperature", "0.3", "the model's default"] in rows[:-2]
    assert ["top_p", "1.0"] in rows and ["max_tokens", "3", "set here"] in rows
    assert rows[-2:] == [["top_k", "3", "set here"], ["temperature", "0.3", "the model's default"]]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("generate", "--chat", "x"), "leave out --chat to continue the prompt as text"),
        (("chat",), "engine generate MODEL PROMPT continues a text"),
    ],
)
def test_a_model_without_a_template_is_answered_with_advice(command, tiny, words, advice):
    done = command(*words, "--model", str(tiny[1]), *TINY, status=2)
    assert advice in done.stderr and "load_tokenizer" not in done.stderr
    if words[0] == "generate":
        assert command("generate", "x", "--model", str(tiny[1]), *TINY).stdout


def test_unencodable_characters_are_replaced():
    done = _run("generate", "--chat", "Write an emoji and é", *GREEDY, PYTHONIOENCODING="ascii")
    assert "?" in done.stdout


def test_chat_remembers_and_resets(command):
    lines = "My name is Tom.\nWhat is my name?\n/reset\n\nMy name is Tom.\n"
    options = ("--temperature", "0", "--max-tokens", "12", "--device", "cpu")
    done = command("chat", *options, text=lines)
    first, second, third = map(int, re.findall(r"tokens after (\d+)", done.stderr))
    assert second > first + 12 and third == first
    answers = done.stdout.splitlines()
    assert len(answers) == 3 and answers[0] == answers[2] and answers[0]
    assert "(forgotten)" in done.stderr


def test_ctrl_c_stops_the_answer_and_not_the_program():
    arguments = ["chat", "--device", "cpu", "--ignore-eos", "--max-tokens", "900"]
    process = subprocess.Popen(
        [*ENGINE, *arguments, "--temperature", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
        # Where the suite runs in a shell's background, SIGINT is ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("Count from one to one thousand.\n")
    process.stdin.flush()
    assert process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    out = ""
    while "[stopped]" not in out and (read := process.stdout.read(1)):
        out += read
    assert process.poll() is None, "Ctrl-C ended the program"
    _, err = process.communicate("/exit\n", timeout=60)
    assert process.returncode == 0, err
    assert "[stopped]" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "x", "--device", "gpu"), "device must be 'cpu', 'cuda'"),
        (("generate", "x", "--model", "/no/such/model"), "/no/such/model"),
        (("generate", "x", "--device", "cpu", "--top-p", "0"), "top_p must be a number in (0.0"),
        (("generate", "x", "--device", "cpu", "--temperature", "nan"), "temperature must be"),
        (("generate", "x", "--device", "cpu", "--max-tokens", "-1"), "max_tokens must be"),
        (("generate", "--file", "/no/such/file"), "--file /no/such/file cannot be read"),
        (("generate", "", "--device", "cpu"), "prompt must have 1 to"),
        (("generate", "x", "--device", "cpu", "-q", "int3"), "quantization must be one of"),
        (("chat", "--device", "cpu", "--quantization", "int3"), "got 'int3'"),
        (("bench", "latency", "--device", "cpu", "-q", "int3"), "quantization must be one of"),
        (("bench", "startup", "--device", "cpu", "-q", "int3"), "quantization must be one of"),
        *(
            (("kernels", "--arch", arch), f"like sm_80 or sm_90a; got '{arch}' (compute capability")
            for arch in ("hopper", "sm_75", "sm_60a", "sm_81", "sm_999", "sm_90b", "sm_")
        ),
        (("quantize",), "(usage: engine quantize [options] --format FORMAT model out)"),
        (
            ("quantize", "m", "q", "--format", "fp8", "--calibration-tokens", "8"),
            "--calibration-tokens needs --calibrate; got 8 alone",
        ),
        (("run-batch",), "(usage: engine run-batch [options] -o OUT file)"),
        (("doctor", "--arch", "sm_75"), "got 'sm_75' (compute capability 8.0 or newer: sm_80, "),
    ],
)
def test_bad_usage_is_one_line_and_status_2(command, arguments, message):
    done = command(*arguments, status=2)
    assert message in done.stderr and "Traceback" not in done.stderr


def test_bad_usage_in_a_shell_is_one_line_and_status_2():
    done = _run("generate", "x", "--device", "cuda", status=2, CUDA_VISIBLE_DEVICES="")
    assert "engine generate: device 'cuda' was asked for" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_option_is_an_error(command):
    done = command("generate", "--temprature", "1", "x", status=2)
    assert "unrecognized arguments: --temprature" in done.stderr


def test_an_invalid_environment_variable_is_an_error():
    done = _run("doctor", status=1, ENGINE_KERNEL_TIER="fastest")
    assert "ENGINE_KERNEL_TIER must be one of auto, portable; got 'fastest'" in done.stdout


def test_doctor_hides_the_secret_and_names_misspelt_variables():
    settings = dict(ENGINE_PIPELINE_SECRET="correct horse battery", ENGINE_DEBGU="1")
    text = _run("doctor", ENGINE_SOMETHING_ELSE="1", **settings).stdout
    assert "ENGINE_PIPELINE_SECRET=" in text and "horse" not in text
    assert "ENGINE_DEBGU is not read; did you mean 'ENGINE_DEBUG'?" in text
    assert "SOMETHING_ELSE" not in text
    text = _run("doctor", status=1, ENGINE_PIPELINE_SECRET="tooshort").stdout
    assert "at least 16 characters" in text and "tooshort" not in text


def test_doctor_reports_what_is_there():
    text = _run("doctor").stdout
    for word in ("engine", "python", "packages", "cache", "driver", "nvrtc", "kernel"):
        assert f" {word}" in text
    assert re.search(r"^ok   threads +1 of \d+ cores?: ", text, re.MULTILINE)
    assert "CPU: ready" in text


def test_doctor_lists_the_kernels_of_an_architecture():
    text = _run("doctor", "--arch", "sm_90a").stdout
    tuned, portable = text.removeprefix("sm_90a: sm90 kernels for ").split("; portable ones for ")
    assert {"gemm", "attention_decode", "mla_decode"} <= set(tuned.split(", "))
    assert "rmsnorm" not in tuned.split(", ") and int(portable.split()[0]) > 40
    text = _run("doctor", "--arch", "sm_100").stdout
    assert text.startswith("sm_100: portable kernels for all of the ") and "never run" in text
    text = _run("doctor", "--arch", "sm_90a", ENGINE_KERNEL_TIER="portable").stdout
    assert text.startswith("sm_90a: portable kernels for all of the ")
    done = _run("doctor", "--arch", "sm_90a", "--memory", "80GB", status=2)
    assert "--memory needs --plan" in done.stderr
    done = _run("doctor", "--arch", "hopper", status=2)
    assert "--arch must be an architecture like sm_80 or sm_90a; got 'hopper'" in done.stderr


def _no_options():
    from engine.commands import doctor

    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args([])


def test_doctor_without_a_gpu_calls_nothing_a_failure(monkeypatch, capsys):
    from engine import device
    from engine.commands import doctor
    from engine.errors import CompileError
    from engine.kernels import _nvrtc

    def no_compiler():
        raise CompileError("NVRTC was not found")

    monkeypatch.setattr(device, "driver_version", lambda: None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(_nvrtc, "version", no_compiler)
    monkeypatch.setattr(_nvrtc, "include_dirs", no_compiler)
    assert doctor.run(_no_options()) == 0
    text = capsys.readouterr().out
    assert "FAIL" not in text and text.count("not here") == 7
    *_, cpu, cuda = text.splitlines()
    assert cpu == "CPU: ready" and cuda.startswith("CUDA: no GPU here") and "pip install" in cuda


def test_doctor_with_a_driver_calls_a_broken_compiler_a_failure(monkeypatch, capsys):
    from engine import device
    from engine.commands import doctor
    from engine.errors import CompileError
    from engine.kernels import _nvrtc

    def no_compiler():
        raise CompileError("NVRTC was not found")

    monkeypatch.setattr(device, "driver_version", lambda: 12090)
    monkeypatch.setattr(_nvrtc, "version", no_compiler)
    assert doctor.run(_no_options()) == 0
    text = capsys.readouterr().out
    assert "FAIL nvrtc          CompileError: NVRTC was not found" in text
    assert "CUDA: not ready, see FAIL above" in text


def test_kernels_is_a_short_table_with_every_op(command):
    from engine.commands.kernels import op_names

    lines = command("kernels", "--arch", "sm_90a").stdout.splitlines()
    assert lines[0] == "architecture sm_90a" and len(lines) < len(op_names()) + 8
    rows = {line.split()[0] for line in lines[2:]}
    assert rows >= set(op_names())
    column = lines[1].index("tiers")  # no name is longer than its column
    assert {line[column - 1 : column + 8] for line in lines[2 : 2 + len(op_names())]} == {
        " portable"
    }


def test_kernels_of_one_op_and_of_all(command):
    options = ("--arch", "sm_90a", "--dtype", "bfloat16")
    one = command("kernels", "rmsnorm", *options).stdout.splitlines()
    assert {line.split()[0] for line in one[2:]} == {"rmsnorm"}
    everything = command("kernels", "--all", *options).stdout.splitlines()
    assert set(one) <= set(everything) and len(everything) > 5 * len(one)
    done = command("kernels", "rmsnrom", *options, status=2)
    assert "op must be one of" in done.stderr and "got 'rmsnrom'" in done.stderr


def _shell(command, text=b""):
    """Run a shell line in which `engine` is the command; return status, stdout, stderr."""
    engine = f"{sys.executable} -m engine"
    done = subprocess.run(
        ["bash", "-c", command.replace("engine", engine, 1)],
        input=text,
        capture_output=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    ("command", "text", "status", "reason"),
    [
        ("engine chat --device cpu <&-", b"", 2, "standard input must be open"),
        ("engine generate --device cpu <&-", b"", 2, "standard input must be open"),
        ("engine doctor >&-", b"", 1, "standard output must be open"),
        ("engine doctor >/dev/full", b"", 1, "No space left on device"),
        ("engine kernels >/dev/full", b"", 1, "No space left on device"),
        ("engine generate --device cpu -", b"\xff\xfe\n", 2, "input must be valid utf-8"),
        ("engine chat --device cpu", b"\xff\xfe\n", 2, "input must be valid utf-8"),
    ],
)
def test_a_stream_that_is_closed_or_broken_gives_one_line_and_a_status(
    command, text, status, reason, monkeypatch
):
    monkeypatch.setenv("PYTHONUTF8", "1")
    got, _, stderr = _shell(command, text)
    lines = [line for line in stderr.splitlines() if not line.startswith("engine: device")]
    assert got == status and len(lines) == 1 and reason in lines[0], stderr


@pytest.mark.slow
def test_commands_run_without_standard_error_and_input():
    """As daemons do; what would go to standard error goes nowhere, not into another file."""
    for streams in ("2>&-", "<&-", "<&- 2>&-"):
        status, stdout, _ = _shell(f"engine doctor {streams}")
        assert status == 0 and "CPU: ready" in stdout
    arguments = " ".join(GREEDY)
    expected = _shell(f"engine generate Hello {arguments}")
    status, stdout, stderr = _shell(f"engine generate Hello {arguments} <&- 2>&-")
    assert (status, stdout, stderr) == (0, expected[1], "")


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("engine doctor 2>/dev/full", 0),
        ("engine nothing 2>/dev/full", 2),
        ("engine generate --top-p 0 x 2>/dev/full", 2),
        ("engine doctor >&- 2>/dev/full", 1),
    ],
)
def test_a_full_standard_error_changes_no_status(command, status):
    assert _shell(command)[0] == status


def test_a_name_of_a_file_is_shortened_in_the_reason(command):
    done = command("generate", "--file", "a" * 5000, status=2)
    assert "cannot be read" in done.stderr and len(done.stderr) < 500


def test_a_prompt_file_without_an_end_is_refused(command):
    result = command("generate", "--model", "nowhere", "--file", "/dev/zero", status=2)
    assert "--file /dev/zero must have at most 67108864 bytes" in result.stderr


@pytest.mark.parametrize(
    "command",
    [("generate", "-"), ("chat", "--device", "cpu"), ("eval", "perplexity", "--file", "-")],
    ids=lambda command: command[0],
)
def test_standard_input_without_an_end_is_refused(command):
    with open("/dev/zero", "rb") as endless:
        done = subprocess.run([*ENGINE, *command], stdin=endless, capture_output=True, timeout=120)
    assert done.returncode == 2
    assert b"standard input must have at most 67108864 characters" in done.stderr
