"""The help of the commands: defaults, groups, and `--help=WORD`."""

from __future__ import annotations

import dataclasses
import re

import pytest

from engine.cli import main
from engine.commands._parser import CommandParser
from engine.commands._serve_options import ALIASES, GROUPS, LLM_OPTIONS
from engine.server.server_config import ServerConfig


@pytest.fixture
def command(capsys):
    """A function that runs a command line; returns its output, or its errors if it fails."""

    def run(*arguments, status=0):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        done = capsys.readouterr()
        assert ended.value.code == status, done.out + done.err
        return done.err if status else done.out

    return run


def _flags(text):
    return re.findall(r"^  (?:-\w+ \w+, )?(--[\w-]+)", text, re.MULTILINE)


def _entries(text):
    """Return each option's text in one line, by its flag."""
    parts = re.split(r"^  (?=-)", text, flags=re.MULTILINE)[1:]
    entries = [" ".join(part.split("\n\n")[0].split()) for part in parts]
    return {re.search(r"--[\w-]+", entry)[0]: entry for entry in entries}


def test_every_option_of_the_server_is_in_one_group():
    fields = {f.name for f in dataclasses.fields(ServerConfig) if "help" in f.metadata}
    names = [name for group in GROUPS.values() for name in group]
    assert len(set(names)) == len(names)
    assert set(names) == fields | set(LLM_OPTIONS) | set(ALIASES) | {"api_key", "admin_api_key"}


def test_every_option_of_the_server_has_its_default(command):
    text = command("serve", "--help")
    assert text.startswith("usage: engine serve [options] [MODEL]\n")
    for title in GROUPS:
        assert f"\n{title}:\n" in text
    entries = _entries(text)
    assert len(entries) == 3 + sum(map(len, GROUPS.values()))
    for flag, entry in entries.items():
        if flag not in ("--help", "--model", "--config", "--gpu-memory-utilization"):
            assert entry.count("(default: ") == 1, entry
    for flag, default in {
        "--port": "8000",
        "--max-body-bytes": "8388608",
        "--shutdown-timeout": "30",
        "--json-logs": "off",
        "--access-log": "on",
        "--allowed-methods": "GET, POST",
        "--enable-prefix-caching": "on",
        "--block-size": "16",
        "--max-loras": "8",
        "--tensor-parallel-size": "1",
        "--kv-cache-dtype": "auto",
        "--max-num-seqs": "256 on CUDA, 16 on the CPU",
    }.items():
        assert entries[flag].endswith(f"(default: {default})"), entries[flag]


@pytest.mark.parametrize(
    ("word", "flags"),
    [
        ("max-num-seqs", ["--max-num-seqs"]),
        ("MAX_NUM_SEQS", ["--max-num-seqs"]),
        ("num-b", ["--num-blocks", "--max-num-batched-tokens"]),
        ("tls", ["--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"]),
        ("speculative", ["--speculative-config", "--max-draft-tokens"]),
        ("certificate of these", ["--ssl-ca-certs"]),  # in the text only
    ],
)
def test_a_word_selects_options_and_groups(command, word, flags):
    assert _flags(command("serve", f"--help={word}")) == flags


def test_a_word_may_follow_other_options(command):
    text = command("serve", "smollm2", "--port", "1", "--help=lora")
    assert text.startswith("LoRA:\n") and len(_flags(text)) == 5
    assert _flags(command("generate", "--help=xtc")) == ["--xtc-probability", "--xtc-threshold"]
    assert _flags(command("bench", "serve", "--help=request-rate")) == ["--request-rate"]


@pytest.mark.parametrize("word", ["groups", "listgroup"])
def test_the_groups_can_be_listed(command, word):
    lines = command("serve", f"--help={word}").splitlines()
    assert lines[2:] == [f"{title} ({len(names)})" for title, names in GROUPS.items()]


def test_a_word_that_matches_nothing_is_an_error(command):
    text = command("serve", "--help=max-nun-seqs", status=2)
    assert "no option matches 'max-nun-seqs'; did you mean 'max-num-seqs'?" in text
    assert "groups: positional arguments, options, address" in command(
        "serve", "--help=zzzz", status=2
    )


def test_other_commands_show_the_defaults_of_their_parser(command):
    entries = _entries(command("bench", "serve", "--help"))
    assert entries["--num-prompts"].endswith("requests per run (default: 1000)")
    assert entries["--request-rate"].endswith("inf: all at once (default: inf)")
    assert "default" not in entries["--help"]


def test_a_percent_sign_in_a_default_is_itself():
    parser = CommandParser(prog="test")
    parser.add_argument("--format", default="%d %%", help="of numbers")
    assert "of numbers (default: %d %%)" in parser.format_help()
