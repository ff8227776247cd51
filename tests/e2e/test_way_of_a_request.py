"""docs/engine.md lists the calls that serve one greedy request: the list is true, and short."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from engine import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
MAX_FILES = 15


def _printed_way():
    """Return (file, function) of each line of the table, in order."""
    page = (ROOT / "docs" / "engine.md").read_text()
    section = page.split("## The call path of one greedy request")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(engine/[\w/]+\.py)` \| `([\w.]+)` \|", section, re.MULTILINE)
    return [(file, function.split(".")[-1]) for file, function in rows]


@pytest.fixture(scope="module")
def calls():
    """Return (caller, callee) of every call while a request is served, by first call."""
    found = {}

    def place(frame):
        """Return file and function; of a comprehension or decorator, those of its caller."""
        while frame is not None:
            path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
            if path.is_relative_to(ROOT) and name != "guarded" and name[0] != "<":
                return str(path.relative_to(ROOT)), name
            frame = frame.f_back
        return "", ""

    def profile(frame, event, _):
        if event == "call":
            found.setdefault((place(frame.f_back), place(frame)))

    with LLM("smollm2", device="cpu", dtype="float32", max_model_len=128) as llm:
        sys.setprofile(profile)
        try:
            params = SamplingParams(temperature=0, max_tokens=1)  # first calls are in one step
            [output] = llm.generate("The capital of France is", params)
        finally:
            sys.setprofile(None)
    assert "Paris" in output.outputs[0].text
    return list(found)


def test_the_way_is_short():
    way = _printed_way()
    assert way[0] == ("engine/llm.py", "generate") and len(set(way)) == len(way)
    assert len({file for file, _ in way}) <= MAX_FILES


def test_each_function_on_the_way_is_called_by_one_before_it(calls):
    """So a reader of the listed functions finds the call of each next one."""
    way = _printed_way()
    for index, place in enumerate(way[1:], 1):
        callers = {caller for caller, callee in calls if callee == place}
        assert callers & set(way[:index]), f"{place} is called by {callers}"


def test_the_way_is_printed_in_the_order_of_the_calls(calls):
    way = _printed_way()
    seen = [callee for _, callee in calls]
    places = [seen.index(place) for place in way[1:]]
    assert places == sorted(places), [p for _, p in sorted(zip(places, way[1:], strict=True))]
