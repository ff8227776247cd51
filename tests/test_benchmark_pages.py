"""Published figures: each comes with card, date, commit and command."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.bench import listing
from tests.bench.__main__ import main
from tests.bench.bench_deterministic import CASES

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"
BENCH = Path(__file__).parent / "bench"
DATA = sorted(FOLDER.glob("*.json"))
PAGES = sorted(set(FOLDER.glob("*.md")) - {FOLDER / "README.md"})


@pytest.mark.parametrize("file", DATA, ids=lambda file: file.stem)
def test_data_say_where_they_come_from(file):
    record = json.loads(file.read_text())
    assert {"card", "date", "commit", "command", "rows"} <= set(record)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"]) and record["rows"]


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_pages_say_under_which_conditions(file):
    head = file.read_text().split("\n## ")[1]
    assert head.startswith("What is measured")
    assert re.search(r"H[12]00|x86", head)
    assert re.search(r"20\d\d-\d\d-\d\d", head)
    assert re.search(r"\b[0-9a-f]{7,8}\b", head), "no commit"
    assert re.search(rf"\]\({file.stem}\w*\.json\)", head), "no data"
    again = file.read_text().split("\n## Run it again\n")[1].split("\n## ")[0]
    assert re.search(r"^\$ (python -m tests\.bench|engine bench)", again, re.MULTILINE)


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_pages_name_benchmarks_that_exist(file):
    known = {path.stem.removeprefix("bench_") for path in BENCH.glob("bench_*.py")}
    for line in re.findall(r"^\$ python -m tests\.bench (.*)", file.read_text(), re.MULTILINE):
        words = re.split(r"\s(?:#|--)", line)[0].split()
        assert words and set(words) <= known, line


def test_every_picture_is_drawn_from_the_data():
    pytest.importorskip("matplotlib")
    from tests.bench.figure import color
    from tests.bench.plot import PICTURES

    assert set(PICTURES) == {path.stem for path in FOLDER.glob("*.png")}
    for name, build in PICTURES.items():
        picture = build()
        assert re.search(r"(H[12]00|x86).*20\d\d-\d\d-\d\d", picture.source), name
        for panel in picture.panels:
            series = getattr(panel, "series", None) or panel.points
            assert any(label.startswith("ours") for label in series), name
            assert all(color(label.partition(":")[0], list(series)) for label in series), name


def test_the_list_names_every_benchmark_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tests.bench", "--list"])
    main()
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    names = sorted(path.stem.removeprefix("bench_") for path in BENCH.glob("bench_*.py"))
    assert [line.split()[0] for line in lines] == names
    for line, name in zip(lines, names, strict=True):
        device, command, measures = re.split(r"  +", line)[1:]
        assert device in listing.DEVICES
        assert command == f"python -m tests.bench {name}"
        assert len(measures) > 20, f"bench_{name}.py: say in its docstring what it measures"


def test_benchmarks_that_need_a_gpu_say_so_in_the_list():
    listed = {each.name for each in listing.benchmarks() if each.device == "GPU"}
    refuse = {
        path.stem.removeprefix("bench_")
        for path in BENCH.glob("bench_*.py")
        if re.search(r"if not device\.is_cuda:\s*raise SystemExit", path.read_text())
    }
    assert listed == refuse


def test_the_deterministic_command_measures_what_is_published():
    rows = json.loads((FOLDER / "deterministic.json").read_text())["rows"]
    assert [case.name for case in CASES] == [row["case"] for row in rows]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "tpu"], "got 'tpu'"),
        (["no_such_op"], "no benchmark is called 'no_such_op'"),
        (["--device", "cpu", "--json", "/no/such/folder/x"], "--json must be a file in a folder"),
        (["--device", "cpu", "--json", "/"], "got /"),
    ],
)
def test_the_command_names_a_bad_option(options, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tests.bench", "residual_add", *options])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and said in capsys.readouterr().err
