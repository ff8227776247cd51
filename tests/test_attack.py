"""A short run of the attack on a real server; the whole one is `python -m tests.attack`."""

from __future__ import annotations

import json

import pytest

from tests.attack import __main__ as attack


@pytest.mark.slow
@pytest.mark.parametrize("kind, scale", [("framing", 0.1), ("crowd", 0.05)])
def test_what_strangers_can_do_is_within_its_limits(kind, scale, tmp_path, capsys):
    file = tmp_path / "figures.json"
    status = attack.main([kind, "--scale", str(scale), "--json", str(file)])
    assert status == 0, capsys.readouterr().out
    figures = json.loads(file.read_text())["figures"]
    assert {figure["kind"] for figure in figures} == {kind}
    values = {figure["figure"]: figure["value"] for figure in figures}
    if kind == "framing":
        assert all(value > 0.05 for name, value in values.items() if name.endswith(": sent"))
    else:
        assert values["slow connections"] > 200 and values["at once: clients"] == 500
