"""The table of deliberate faults fits the tree; `make mutants` applies them."""

from __future__ import annotations

import pytest

from tests.mutants import FAULTS, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.old.strip()}")
def test_a_fault_can_be_applied(fault):
    text = (ROOT / "engine" / fault.file).read_text()
    assert text.count(fault.old) == 1, "write the fault anew for the code as it is now"
    assert fault.old != fault.new
    for name in fault.tests.split():
        assert (ROOT / "tests" / name.partition("::")[0]).exists(), name
