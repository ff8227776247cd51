"""The public CUDA headers: what `cuda_src/common/` offers to a user's kernel.

The headers are the only source. A header is public if its head comment ends with the line
"Public: sm_80 up."; every declaration's contract is the comment above it. `docs/headers.md` is made
from `headers()`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from engine.dtypes import FLOAT_NAMES
from engine.kernels._module import ARCHITECTURES, source_dir

__all__ = ["Declaration", "Header", "headers"]

_FOLDER = "common"
_PUBLIC = re.compile(r"^Public: (sm_\d+a?)( up)?(?:, ([\w ]+))?\.$", re.MULTILINE)
_INTERNAL = "ENGINE_"  # prefix of macros


@dataclass(frozen=True)
class Declaration:
    """A function, struct, constant or type that a header declares.

    Attributes
    ----------
    name : str
    text : str
        The declaration, without its body and without `__device__ __forceinline__`.
    comment : str
        Its contract.
    section : str
        Heading that it stands below, such as "warpgroups"; "" for none.
    """

    name: str
    text: str
    comment: str
    section: str = ""


@dataclass(frozen=True)
class Header:
    """A public header.

    Attributes
    ----------
    include : str
        What a kernel includes, such as "common/reduce.cuh".
    comment : str
        What it is for, and how to use it.
    architectures : tuple of str
        Architectures that it compiles for, of those the engine supports.
    requires : str
        Architectures and dtypes in words, such as "sm_90 up".
    dtypes : tuple of str
        What `scalar_t` may be.
    declarations : tuple of Declaration
    """

    include: str
    comment: str
    requires: str
    architectures: tuple[str, ...]
    dtypes: tuple[str, ...]
    declarations: tuple[Declaration, ...] = field(repr=False)

    @property
    def name(self) -> str:
        """Its name, such as "reduce"."""
        return self.include.removeprefix(f"{_FOLDER}/").removesuffix(".cuh")

    @property
    def title(self) -> str:
        """The first sentence of its comment, on one line."""
        paragraph = " ".join(self.comment.partition("\n\n")[0].split())
        return paragraph.partition(". ")[0].rstrip(".:")

    def __str__(self) -> str:
        lines = [f'#include "{self.include}"  // {self.requires}', "", self.comment]
        for comment, group in groupby(self.declarations, lambda member: member.comment):
            lines += ["", *(member.text for member in group)]
            lines += [f"    {line}" for line in comment.splitlines()]
        return "\n".join(lines)


def headers() -> dict[str, Header]:
    """Return the CUDA headers that a kernel may include, by name.

    Returns
    -------
    dict of str to Header
        For example "reduce", which `#include "common/reduce.cuh"` makes available.

    Examples
    --------
    >>> from engine import kernels
    >>> reduce = kernels.headers()["reduce"]
    >>> reduce.include, reduce.requires
    ('common/reduce.cuh', 'sm_80 up')
    >>> [declaration.name for declaration in reduce.declarations][-2:]
    ['block_sum', 'block_max']
    >>> print(reduce.declarations[2].text)
    float warp_sum(float x)
    """
    found = {}
    for path in sorted((source_dir() / _FOLDER).glob("*.cuh")):
        text = path.read_text()
        head, _, body = text.partition("#pragma once")
        comment = _uncomment(head.splitlines())
        if match := _PUBLIC.search(comment):
            header = Header(
                include=f"{_FOLDER}/{path.name}",
                comment=comment[: match.start()].rstrip(),
                requires=match[0].removeprefix("Public: ").removesuffix("."),
                architectures=_architectures(match[1], match[2] is not None),
                dtypes=tuple(match[3].split(" and ")) if match[3] else FLOAT_NAMES,
                declarations=tuple(_unique(_declarations(body.splitlines()))),
            )
            found[header.name] = header
    return found


def _architectures(first: str, and_later: bool) -> tuple[str, ...]:
    number = int(re.sub(r"\D", "", first))
    numbers = {arch: int(re.sub(r"\D", "", arch)) for arch in ARCHITECTURES}
    if not and_later:
        return tuple(arch for arch in numbers if arch == first)
    return tuple(arch for arch, n in numbers.items() if n >= number)


def _uncomment(lines: list[str]) -> str:
    return "\n".join(line.strip().removeprefix("//").removeprefix(" ") for line in lines).strip()


def _unique(declarations: Iterator[Declaration]) -> Iterator[Declaration]:
    """Merge what the branches of an `#if` declare under one name: its value depends on them."""
    found: dict[str, Declaration] = {}
    for declaration in declarations:
        key = declaration.text if "(" in declaration.text else declaration.name
        text = declaration.text.partition(" =")[0] if key in found else declaration.text
        found[key] = replace(found.get(key, declaration), text=text)
    yield from found.values()


_SECTION = re.compile(r"// -{3,} (.+?) -{3,}$")


def _declarations(lines: list[str], scope: str = "") -> Iterator[Declaration]:
    """Parse declarations at one level: a file, or the body of struct `scope`.

    A comment belongs to the declarations that follow it without a blank line between.
    """
    section = ""
    comment: list[str] = []
    is_new = True  # the next comment line starts a new comment
    position = 0
    while position < len(lines):
        line = lines[position].strip()
        if match := _SECTION.match(line):
            section = match[1]
        elif line.startswith("//"):
            comment = [*([] if is_new else comment), line]
            is_new = False
        elif not line:
            comment = []
            is_new = True
        elif line.startswith("#"):
            position = _end_of_directive(lines, position)
        elif line.startswith(_INTERNAL):
            pass  # a macro that expands to specialisations
        else:
            end, statement, body = _statement(lines, position)
            text = _uncomment(comment)
            yield from _declared(statement, body, text, section, scope)
            position = end
            is_new = True
        position += 1


def _end_of_directive(lines: list[str], position: int) -> int:
    while lines[position].endswith("\\"):
        position += 1
    return position


def _statement(lines: list[str], start: int) -> tuple[int, str, list[str]]:
    """Return the last line of a statement, its text up to "{" or ";", and the lines of its body."""
    depth = 0
    for position in range(start, len(lines)):
        code = lines[position].partition("//")[0]
        depth += code.count("{") - code.count("}")
        if depth == 0 and code.rstrip().endswith((";", "}")):
            break
    whole = lines[start : position + 1]
    text = "\n".join(line.partition("//")[0] for line in whole)
    return position, re.split(r"[{;]", text, maxsplit=1)[0], whole


_STRUCT = re.compile(r"struct (?:alignas\(.*\) )?(\w+)$")
_CONSTANT = re.compile(r"constexpr [\w ]+ (\w+) = .*")
_ALIAS = re.compile(r"using (\w+) =")
_FUNCTION = re.compile(r"(\w+)\(")
_QUALIFIERS = re.compile(r"\b(__device__|__forceinline__|explicit)\s+")


def _declared(
    statement: str, body: list[str], comment: str, section: str, scope: str
) -> Iterator[Declaration]:
    text = " ".join(statement.split())
    if text.startswith(("template <>", "static_assert")):
        return
    if match := _STRUCT.search(text):
        yield Declaration(match[1], text, comment, section)
        inner = "\n".join(body).partition("{")[2].rpartition("}")[0].splitlines()
        yield from (
            Declaration(member.name, member.text, member.comment, section)
            for member in _declarations(inner, match[1])
        )
    elif "__device__" in text and (match := _FUNCTION.search(text)):
        text = _QUALIFIERS.sub("", text)
        text = re.sub(r" : \w+\(.*", "", text)  # a constructor's initialisers
        prefix = f"{scope}::" if scope else ""
        name = _FUNCTION.search(text)
        assert name is not None
        yield Declaration(
            prefix + name[1], text.replace(name[1] + "(", prefix + name[0], 1), comment, section
        )
    elif not scope and ((match := _CONSTANT.match(text)) or (match := _ALIAS.match(text))):
        yield Declaration(match[1], text, comment, section)
