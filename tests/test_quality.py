"""`python -m tests.quality`: the text, the measurement, and what is published of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import engine
from tests.quality import __main__ as quality
from tests.quality.make_text import make_text
from tests.quality.text import FILE, text

PAGE = Path(__file__).parents[1] / "docs" / "quantization.md"


def test_the_text_is_long_enough_and_small():
    assert text().startswith("CHAPTER I: DISCUSSION AND BED\n\nUp at the League, says a friend, ")
    assert FILE.stat().st_size < 150 << 10
    ids = engine.load("smollm2", device="cpu").tokenizer.encode(text())
    assert quality.NUM_TOKENS <= len(ids) < 1.1 * quality.NUM_TOKENS


def test_the_text_is_made_of_whole_paragraphs():
    paragraph = "these are half-\r\nbroken lines of  a\r\nparagraph\r\n\r\n\r\n"
    source = "license CHAPTER I: DISCUSSION AND BED\r\n\r\n" + paragraph * 9000
    made = make_text(source + "***END OF THE PROJECT GUTENBERG EBOOK")
    lines = made.split("\n\n")
    assert lines[0] == "CHAPTER I: DISCUSSION AND BED" and lines[-1] == ""
    assert set(lines[1:-1]) == {"these are half-broken lines of a paragraph"}
    assert 223_000 <= len(made) < 223_100


def test_the_page_shows_the_data():
    record = json.loads(quality.FILE.read_text())
    page = PAGE.read_text()
    assert quality.table(record["rows"]) in page
    assert record["date"] in page and record["commit"] in page
    assert [row["format"] for row in record["rows"]] == [case.name for case in quality.CASES]
    assert record["text tokens"] == quality.NUM_TOKENS


def _run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["tests.quality", *map(str, arguments)])
    quality.main()


@pytest.mark.slow
def test_formats_are_measured(monkeypatch, capsys, tmp_path):
    out = tmp_path / "result.json"
    names = ["float32", "bfloat16", "int8, weights only", "q8_0, weights only"]
    names.append("q8_0 of gguf, weights only")
    options = ["--device", "cpu", "--max-tokens", 70, "--context", 32, "--json", out]
    _run(monkeypatch, *names, *options)
    record = json.loads(out.read_text())
    assert {"card", "date", "commit", "command", "rows"} <= set(record)
    first, half, *rounded = record["rows"]
    assert [row["format"] for row in record["rows"]] == names
    assert first["weight MB"] > 1.9 * half["weight MB"] and "kl_mean" not in first
    for row in (half, *rounded):
        assert 0 < row["kl_mean"] < 0.02 and 0.98 < row["ratio"] < 1.02
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 7 and printed[2].startswith("| float32 | 540 MB | ")
    _run(monkeypatch, "--print", out)
    assert capsys.readouterr().out.splitlines() == printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["int3"], "no format is called 'int3'; there are float32, bfloat16"),
        (["--json", "/no/folder/x"], "--json must name a file in an existing folder"),
    ],
)
def test_bad_options_are_named(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        _run(monkeypatch, *arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err
