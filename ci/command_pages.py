"""Writes a page of Markdown for each command of ``llorch``: ``python ci/command_pages.py docs/commands``.

Input: the commands' own help, as ``llorch COMMAND --help`` shows it. Output: ``README.md``, which lists the
commands, and one page a command. ``ci/check`` fails where the committed pages differ from these.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from typer.main import get_command

from llorch_serve.cli import COMMANDS, app

_WIDTH: Final = 110
_NOTE: Final = "<!-- Written by ci/generate-commands from the command's own help. Edit the help instead. -->"
_EXTRAS: Final = re.compile(r"^(.*?)(?:\s\s\[([^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\])?$", re.DOTALL)


def pages() -> dict[str, str]:
    """Return file name -> text of every page."""
    group = get_command(app)
    # Any command will do: only its context is wanted, and nothing is run.
    context = group.make_context("llorch", ["doctor"], resilient_parsing=True)
    commands = {name: group.get_command(context, name) for name in COMMANDS}
    found = {"README.md": _index(group, context, commands)}
    for name, command in commands.items():
        found[f"{name.replace(' ', '-')}.md"] = _page(name, command, context)
    return found


def _index(group: Any, context: Any, commands: dict[str, Any]) -> str:
    rows = [
        f"| [`llorch {name}`]({name.replace(' ', '-')}.md) | {_cell(_first_sentence(command.help))} |"
        for name, command in commands.items()
    ]
    return _join(
        "# Commands",
        _NOTE,
        _prose(group.help),
        "Flags before the command:",
        _table("flag", group.params, context),
        "\n".join(["| command | does |", "|---|---|", *rows]),
    )


def _page(name: str, command: Any, parent: Any) -> str:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    usage = " ".join(command.collect_usage_pieces(context))
    return _join(
        f"# llorch {name}",
        _NOTE,
        f"    llorch {name} {usage}",
        _prose(command.help),
        _table("argument", arguments, context) if arguments else "",
        _table("flag", options, context),
    )


def _prose(text: str) -> str:
    """Return help as Markdown: paragraphs are filled, and indented ones become one block of commands."""
    parts: list[str] = []
    commands: list[str] = []
    for paragraph in [*re.split(r"\n\s*\n", text.strip()), ""]:
        if paragraph.startswith("    "):
            commands.append(" ".join(paragraph.split()))
            continue
        if commands:
            parts.append("\n".join(["```sh", *commands, "```"]))
            commands = []
        parts.append(
            "\n".join(wrap(_plain(paragraph), _WIDTH, break_long_words=False, break_on_hyphens=False))
        )
    return _join(*parts).rstrip("\n")


def _table(title: str, params: list[Any], context: Any) -> str:
    rows = []
    for param in params:
        declared, text = param.get_help_record(context) or (param.metavar or param.name, param.help or "")
        match = _EXTRAS.match(text)
        assert match is not None
        sentence, extras = match.groups()
        cells = [f"`{_bars(declared)}`", _cell(sentence), _cell(extras or "")]
        rows.append(f"| {' | '.join(cells)} |".replace(" |  |", " | |"))
    return "\n".join([f"| {title} | what it does | variable, default, range |", "|---|---|---|", *rows])


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0]


def _cell(text: str) -> str:
    return _bars(_plain(text))


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;").replace("*", "\\*")


def _bars(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _join(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    made = pages()
    for page in folder.glob("*.md"):
        if page.name not in made:
            page.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")
