"""Runs JSON-Schema-Test-Suite through the schemas that requests may constrain their output to.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite /tmp/suite
    python -m tests.json_schema_suite /tmp/suite [--draft draft7] [--json FILE] [--verbose]

Each schema is compiled as the server compiles it. Each instance is tried as compact text and with
white space. Accepted invalid instances are errors, and make the exit status 1; rejected valid ones
are counted: whole numbers written as 1.0, and properties in another order than the schema's.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

from engine.structured import check_worker, sources
from engine.structured.spec import StructuredOutput

_DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
_MAX_NAMED = 20


@functools.cache
def _library() -> tuple[Any, Any]:
    module = sources.library()
    vocabulary = check_worker.ByteVocabulary()
    return module, module.LLTokenizer(vocabulary, n_vocab=257, eos_token=[256])


def compiled(schema: Any) -> tuple[Any, str]:
    """Return the matcher of a schema and "", or None and why it is refused."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    kind, text = sources.source_of(StructuredOutput(json=text))
    found = check_worker.check(kind, text)
    if found.why:
        return None, found.why
    return sources.compile_matcher(*_library(), kind, found.text), ""


def accepts(matcher: Any, text: str) -> bool:
    """Return whether a text is complete and allowed."""
    matcher = matcher.deep_copy()
    ids = list(text.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@dataclasses.dataclass
class Found:
    """What one draft's tests gave."""

    schemas: int = 0
    compiled: int = 0
    valid: int = 0
    rejected_valid: int = 0
    invalid: int = 0
    accepted_invalid: list[str] = dataclasses.field(default_factory=list)
    refusals: dict[str, int] = dataclasses.field(default_factory=collections.Counter)
    rejected: list[str] = dataclasses.field(default_factory=list)


def run(folder: Path, draft: str) -> Found:
    """Run the tests of a draft, the required ones."""
    found = Found()
    for path in sorted((folder / "tests" / draft).glob("*.json")):
        for group in json.loads(path.read_text()):
            _run_group(group, f"{path.stem}: {group['description']}", _DRAFTS[draft], found)
    return found


def _run_group(group: dict[str, Any], name: str, dialect: str, found: Found) -> None:
    found.schemas += 1
    schema = group["schema"]
    if isinstance(schema, dict):  # the suite's schemas of draft 7 do not say so
        schema = {"$schema": dialect} | schema
    matcher, why = compiled(schema)
    if matcher is None:
        found.refusals[_kind(why)] += 1
        return
    found.compiled += 1
    for test in group["tests"]:
        texts = [
            json.dumps(test["data"], ensure_ascii=False, separators=(",", ":")),
            json.dumps(test["data"], ensure_ascii=False, indent=1),
        ]
        are_accepted = [accepts(matcher, text) for text in texts]
        case = f"{name}: {test['description']}"
        if test["valid"]:
            found.valid += 1
            found.rejected_valid += not all(are_accepted)
            found.rejected += [] if all(are_accepted) else [case]
        else:
            found.invalid += 1
            found.accepted_invalid += [case] if any(are_accepted) else []


def _kind(why: str) -> str:
    """Return a refusal without what is particular to the schema."""
    why = re.sub(r" \(at .*\)$", "", why.replace("(at #)", ""))
    if "that is not in the schema" in why:
        return "a reference to another document"
    if why.startswith("$dynamicRef"):
        return "$dynamicRef that depends on the path"
    if "are not disjoint" in why:
        return "patternProperties that overlap"
    if why.startswith("$schema must"):
        return "an unknown $schema"
    return why.strip()


def main() -> int:
    """Print a table for each draft; return 1 if an invalid instance was accepted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="checkout of JSON-Schema-Test-Suite")
    parser.add_argument("--draft", choices=_DRAFTS, action="append")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--verbose", action="store_true", help="name the rejected valid instances")
    arguments = parser.parse_args()
    version = importlib.metadata.version("llguidance")
    record: dict[str, Any] = {"llguidance": version, "date": str(datetime.date.today())}
    is_wrong = False
    for draft in arguments.draft or _DRAFTS:
        found = run(arguments.folder, draft)
        is_wrong |= bool(found.accepted_invalid)
        record[draft] = vars(found)
        print(f"{draft}: {found.compiled} of {found.schemas} schemas compile")
        print(f"  accepted invalid instances: {len(found.accepted_invalid)} of {found.invalid}")
        print(f"  rejected valid instances: {found.rejected_valid} of {found.valid}")
        for case in found.accepted_invalid[:_MAX_NAMED]:
            print(f"  ACCEPTED  {case}")
        for case in found.rejected if arguments.verbose else ():
            print(f"  rejected  {case}")
        for why, count in sorted(found.refusals.items(), key=lambda pair: -pair[1]):
            print(f"  {count:4}  {why}")
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
