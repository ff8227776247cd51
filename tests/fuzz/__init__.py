"""Attacks the engine with hostile files, templates, texts, calls and command lines.

    python -m tests.fuzz --cases 100000 --seed 1   # all targets; --seconds N, --only TARGET
    python -m tests.fuzz --replay .fuzz/FILE.json

A target is a module with three names:

- ``make(rng) -> dict`` makes a case, which JSON can hold, from a `random.Random` only;
- ``LIMITS``: what a case may take (`tests.fuzz.limits.Limits`);
- ``Runner(folder)`` with ``run(case) -> str``: the oracle. It returns the outcome, and raises
  whatever the engine should not have raised, or AssertionError.

Cases run in a worker process, many in a row (`tests.fuzz.worker`). A case that crashes, hangs or
exceeds its limits costs the worker; the driver keeps the case and starts another worker.
"""

import os

# A folder with further targets, with which the fuzzer itself is tested.
if os.environ.get("ENGINE_TEST_TARGETS"):
    __path__.append(os.environ["ENGINE_TEST_TARGETS"])
