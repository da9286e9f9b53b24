"""The project's documents, taken apart: lines outside of code, headings as anchors, links, and examples.

An example is a fenced block of the language ``console``. Lines that begin with ``$`` are commands, and may go
on behind a backslash; the others are what they print. A comment above the fence says how it is run:
``<!-- not run: REASON -->``, or ``<!-- example: tiny -->`` for the tiny model under the real one's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
_FENCE: Final = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([\w-]*)\s*$")
_COMMENT: Final = re.compile(r"^<!-- (.*) -->$")
_LINK: Final = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
_SPAN: Final = re.compile(r"(`+)(.+?)\1")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code.

    line: of its fence, from 1. comment: what an HTML comment right above the fence says.
    """

    path: Path
    line: int
    language: str
    comment: str
    lines: tuple[str, ...]

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"{self.path.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of an example, and the lines that it is said to print."""

    text: str
    expected: tuple[str, ...]


def documents() -> list[Path]:
    """Return every Markdown file that people read."""
    folders = [ROOT / name for name in ("docs", "deploy", "examples", "artifacts", "ci")]
    found = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]
    # Artifacts are exported next to their README.
    return sorted(path for path in found if path.parent.parent != ROOT / "artifacts")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line outside of fenced code."""
    inside = {number for block in blocks(path) for number in _numbers(block)}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if number not in inside:
            yield number, line


def _numbers(block: Block) -> range:
    return range(block.line, block.line + len(block.lines) + 2)


@cache
def blocks(path: Path) -> tuple[Block, ...]:
    """Return the fenced blocks of a document."""
    found: list[Block] = []
    comment, start, end, language = "", 0, "", ""
    held: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = _FENCE.match(line)
        if start:
            if line.strip() == end:
                found.append(Block(path, start, language, comment, tuple(held)))
                comment, start, held = "", 0, []
            else:
                held.append(line)
        elif match:
            start, end, language = number, match[2], match[3]
        else:
            above = _COMMENT.match(line)
            comment = above[1] if above else ""
    assert not start, f"{path}: the fence of line {start} is not closed"
    return tuple(found)


def examples(path: Path) -> list[Block]:
    """Return the blocks of commands."""
    return [block for block in blocks(path) if block.language == "console"]


def commands(block: Block) -> list[Command]:
    """Return the commands of an example. Fails on lines before the first command."""
    found: list[tuple[str, list[str]]] = []
    goes_on = False
    for line in block.lines:
        if goes_on:
            text, _ = found[-1]
            found[-1] = (f"{text}\n{line}", [])
        elif line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            assert found, f"{block.place}: expected a command, found {line!r}"
            found[-1][1].append(line)
            continue
        goes_on = line.endswith("\\")
    return [Command(text, tuple(expected)) for text, expected in found]


def links(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and target of each link and picture."""
    for number, line in prose(path):
        for match in _LINK.finditer(_SPAN.sub(_without_brackets, line)):
            yield number, match[1]
    # A link's text may be broken over lines.
    text = "\n".join(line for _, line in prose(path))
    for match in _LINK.finditer(_SPAN.sub(_without_brackets, text)):
        if "\n" in match[0]:
            yield 0, match[1]


def _without_brackets(span: re.Match[str]) -> str:
    return re.sub(r"[\[\]()]", "", span[0])


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    found: list[str] = []
    slugs: list[str] = []
    for _, line in prose(path):
        if match := re.match(r"#{1,6} (.+?)\s*#*$", line):
            words = re.sub(r"!?\[([^\[\]]*)\]\([^()]*\)", r"\1", match[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            again = slugs.count(slug)
            slugs.append(slug)
            found.append(f"{slug}-{again}" if again else slug)
    return frozenset(found)


def spans(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each piece of code within a sentence."""
    for number, line in prose(path):
        for match in _SPAN.finditer(line):
            yield number, match[2]
