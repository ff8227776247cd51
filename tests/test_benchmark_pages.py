"""Published figures: each comes with card, date, commit and command."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.bench.__main__ import main
from tests.bench.bench_deterministic import CASES

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"
DATA = sorted(FOLDER.glob("*.json"))
PAGES = sorted(set(FOLDER.glob("*.md")) - {FOLDER / "README.md"})


@pytest.mark.parametrize("file", DATA, ids=lambda file: file.stem)
def test_data_say_where_they_come_from(file):
    record = json.loads(file.read_text())
    assert {"card", "date", "commit", "command", "rows"} <= set(record)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"]) and record["rows"]


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_pages_say_under_which_conditions(file):
    text = file.read_text()
    head = text.split("\n## ")[0]
    assert "H200" in head or "x86" in head
    assert re.search(r"20\d\d-\d\d-\d\d", head)
    assert re.search(r"\b[0-9a-f]{7}\b", text), "no commit"
    assert re.search(r"python -m tests\.bench|engine bench|[Cc]ommand", text), "no command"
    assert f"{file.stem}.json" in text


def test_every_file_is_in_the_list():
    text = (FOLDER / "README.md").read_text()
    names = {path.name for path in FOLDER.iterdir()} - {"README.md"}
    assert names == {name for name in names if f"]({name})" in text}
    assert all((FOLDER / target).exists() for target in re.findall(r"\]\(([^)#:]+)\)", text))


def test_the_command_of_batch_invariance_measures_what_is_published():
    rows = json.loads((FOLDER / "deterministic.json").read_text())["rows"]
    assert [case.name for case in CASES] == [row["case"] for row in rows]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "tpu"], "got 'tpu'"),
        (["--device", "cpu", "--json", "/no/such/folder/x"], "--json must be a file in a folder"),
        (["--device", "cpu", "--json", "/"], "got /"),
    ],
)
def test_the_command_names_a_bad_option(options, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tests.bench", "residual_add", *options])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and said in capsys.readouterr().err
