"""Write what every command's ``--help`` prints and which parameters it has, so that two states can be
compared: ``ci/measurement command_help before``, change the code, ``ci/measurement command_help after``, and
``diff -r before after``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from llorch_serve import cli
from llorch_serve.python_child import module_command

WIDTHS = (80, 120)
COMPLETIONS = {
    "commands": "llorch ",
    "generate": "llorch generate --",
    "serve": "llorch serve --",
    "kv_dtype": "llorch generate --kv-dtype ",
    "prompt_ids": "llorch bench --prompt-ids ",
    "target": "llorch export m.gguf --target ",
}


def main() -> None:
    """Write the files into the folder that the command line names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for command in ("", *cli.COMMANDS):
        name = command.replace(" ", "-") or "llorch"
        for width in WIDTHS:
            shown = _run([*command.split(), "--help"], COLUMNS=str(width))
            (folder / f"{name}.{width}.txt").write_text(shown)
        (folder / f"{name}.json").write_text(json.dumps(_parameters(command), indent=1) + "\n")
    for name, line in COMPLETIONS.items():
        offered = _run([], _LLORCH_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line)
        (folder / f"completion.{name}.txt").write_text(offered)


def _run(arguments: list[str], **variables: str) -> str:
    done = subprocess.run(
        module_command(sys.executable, "llorch_serve", *arguments),
        env={**os.environ, "TERM": "dumb", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return f"{done.stdout}{done.stderr}exit {done.returncode}\n"


def _parameters(command: str) -> list[dict[str, Any]]:
    group: Any = typer.main.get_command(cli.app)
    found = group.get_command(None, command) if command else group
    return [
        {
            name: value if isinstance(value, str | list) else _described(value)
            for name, value in _settings(parameter)
        }
        for parameter in found.params
    ]


def _described(value: object) -> str:
    """Return what a value is, without its address."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _settings(parameter: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is set of a parameter; its type as the annotation, where Typer keeps that."""
    for name, value in vars(parameter).items():
        if value is not None and not name.startswith("_"):
            yield name, getattr(value, "annotation", value)


if __name__ == "__main__":
    main()
