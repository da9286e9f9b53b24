"""The documents: links lead somewhere, files that they name are there, lines and pages have a length that can
be read, every example says whether it runs, and flags in examples are the commands' own.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import command_pages
import families_page
from llorch_serve.cli import COMMANDS, app
from support.harness.documents import (
    ROOT,
    anchors,
    blocks,
    commands,
    documents,
    examples,
    links,
    prose,
    spans,
)

DOCUMENTS = documents()
PAGES = [path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")]
WIDTH = 110
# What a document may name although it is not kept: exports.
_MADE = re.compile(r"^artifacts/(?!.*\.(md|json)$)")
_PATH = re.compile(r"^(?:serve|export|tests|ci|deploy|docs|examples|artifacts)/[\w./-]*[\w-]/?$")


def by_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(params=DOCUMENTS, ids=by_name)
def document(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    dead = []
    for number, target in links(document):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        if not file.is_relative_to(ROOT) or not file.exists():
            dead.append(f"{number}: {target}")
        elif anchor and anchor not in anchors(file):
            dead.append(f"{number}: {target} (no such heading)")
    assert not dead


def test_files_that_are_named_are_there(document: Path) -> None:
    words = [(number, word) for number, text in spans(document) for word in text.split()]
    named = [(number, word) for number, word in words if _PATH.match(word) and not _MADE.match(word)]
    assert [(number, word) for number, word in named if not (ROOT / word).exists()] == []


def test_lines_are_not_too_long(document: Path) -> None:
    long = [
        number
        for number, line in prose(document)
        if len(line) > WIDTH and not line.startswith("|") and not re.search(r"\]\([^()\s]+\)|https?://", line)
    ]
    assert long == []


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_the_doors_are_short(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 90


def test_every_page_is_in_an_index() -> None:
    indices = [ROOT / "docs" / place / "README.md" for place in ("", "commands", "decisions")]
    linked = {(index.parent / target).resolve() for index in indices for _, target in links(index)}
    assert [by_name(page) for page in PAGES if page not in linked and page != indices[0]] == []


def test_decisions_are_listed_by_their_titles() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = (folder / "README.md").read_text(encoding="utf-8")
    for page in sorted(folder.glob("*.md")):
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert page.name == "README.md" or f"[{title}]({page.name})" in listed, page.name


def test_every_page_begins_with_what_it_is_for_and_an_example() -> None:
    """Except for generated pages and decisions, which have a form of their own."""
    written = [
        path
        for path in [*PAGES, ROOT / "deploy" / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
        if path.parent.name not in ("commands", "decisions") and path != ROOT / "docs" / "README.md"
    ]
    for path in written:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[2].startswith("After this page you"), path
        assert blocks(path), path
        # Before the first further heading and within a screen.
        assert blocks(path)[0].line < 25, path


def test_every_example_says_how_it_is_run(document: Path) -> None:
    for block in examples(document):
        assert block.comment in ("", "example: tiny") or re.match(r"not run: \S", block.comment), block.place
        assert commands(block), block.place


def test_commands_are_not_hidden_in_other_blocks(document: Path) -> None:
    """Where they would not be run."""
    if document.parent.name == "commands":
        return
    for block in blocks(document):
        if block.language != "console":
            assert not any(line.lstrip("$ ").startswith("llorch ") for line in block.lines), block.place


def test_examples_in_python_compile(document: Path) -> None:
    for block in blocks(document):
        if block.language == "python":
            compile("\n".join(block.lines), block.place, "exec")


def test_the_pages_of_commands_are_those_of_their_help() -> None:
    folder = ROOT / "docs" / "commands"
    kept = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    assert kept == command_pages.pages(), "run ci/generate-commands"


def test_the_page_of_families_is_that_of_their_rows() -> None:
    assert (ROOT / "docs" / "families.md").read_text(encoding="utf-8") == families_page.text(), (
        "run ci/generate-families"
    )


@cache
def parsers() -> dict[str, Any]:
    group = get_command(app)
    context = group.make_context("llorch", ["doctor"], resilient_parsing=True)
    return {name: group.get_command(context, name) for name in COMMANDS}


def lines_of_commands(document: Path) -> list[tuple[str, str]]:
    """Return place and text of each command that begins with ``llorch``, run or not."""
    found = []
    for block in blocks(document):
        if block.language == "console":
            lines = [command.text for command in commands(block)]
        elif block.language == "sh":
            lines = list(block.lines)
        else:
            continue
        found += [(block.place, line.replace("\\\n", " ")) for line in lines]
    return found


def test_flags_in_examples_exist(document: Path) -> None:
    known = parsers()
    for place, line in lines_of_commands(document):
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words[:1] != ["llorch"]:
            continue
        name = " ".join(words[1:3]) if " ".join(words[1:3]) in known else words[1]
        assert name in known, f"{place}: llorch {words[1]}"
        options = {option for param in known[name].params for option in (*param.opts, *param.secondary_opts)}
        flags = {word.partition("=")[0] for word in words if word.startswith("--") and word != "--"}
        assert flags <= options | {"--help"}, f"{place}: {sorted(flags - options)}"
