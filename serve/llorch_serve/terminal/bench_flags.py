"""Flags of ``llorch bench``: what is measured, on what, and where the report goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from llorch_serve.errors import UsageError
from llorch_serve.terminal.groups import FlagGroup
from llorch_serve.terminal.prompt_flags import PromptIds, read_prompt_ids
from llorch_serve.terminal.session_flags import AllowCpuNodes, EpLibrary

DEFAULT_PROMPT_TOKENS: Final = 512
TESTS: Final = "prefill,decode,mixed"


class EntryFlags(FlagGroup, frozen=True):
    """What is compared: providers, each with an interpreter and a folder of its own where that is wanted."""

    provider: Annotated[
        list[str] | None,
        typer.Option(
            "--provider",
            metavar="NAME[@PYTHON][=DIR]",
            help="A provider, the interpreter that has it, and an artifact for it; may be repeated. Default: "
            "cpu, this one, DIR.",
            show_default=False,
        ),
    ] = None
    provider_option: Annotated[
        list[str] | None,
        typer.Option(
            "--provider-option",
            metavar="[NAME:]KEY=VALUE",
            help="An option of a provider, named where there are several; may be repeated.",
            show_default=False,
        ),
    ] = None
    ep_library: EpLibrary = None
    allow_cpu_nodes: AllowCpuNodes = False


class LengthFlags(FlagGroup, frozen=True):
    """How long prompts and answers are; None: not set."""

    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of each stream's prompt. Default: 512.", show_default=False)
    ] = None
    prompt_ids: PromptIds = None
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens that each stream generates.")] = 128

    def read(self) -> tuple[int, ...] | None:
        """Return the token ids that are given as prompt, or None.

        Raises UsageError for ids that are none, and for ids and a length together.
        """
        if self.prompt_ids is None:
            return None
        if self.prompt_tokens is not None:
            raise UsageError("--prompt-ids and --prompt-tokens both name the prompt; give one of them")
        if not (ids := read_prompt_ids(self.prompt_ids)):
            raise UsageError("--prompt-ids is an empty list; at least one token id is needed")
        return ids

    @property
    def tokens(self) -> int:
        """How long a prompt is that is not given by its ids."""
        return DEFAULT_PROMPT_TOKENS if self.prompt_tokens is None else self.prompt_tokens


Depth = Annotated[
    str | None,
    typer.Option(
        metavar="0,512",
        help="Tokens that are in each stream's context before. Default: 0.",
        show_default=False,
    ),
]
Streams = Annotated[
    str | None,
    typer.Option(
        metavar="1,8", help="Numbers of streams that start together. Default: 1,8.", show_default=False
    ),
]


class ReportFlags(FlagGroup, frozen=True):
    """Where the report goes."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = (
        False
    )
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write every figure as CSV.", show_default=False)
    ] = None
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write tables in Markdown.", show_default=False)
    ] = None
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a page with plots, in one file.", show_default=False),
    ] = None

    def check(self) -> None:
        """Raise UsageError for a file that cannot be written, before minutes are spent on measuring."""
        for flag, path in (("--csv", self.csv), ("--markdown", self.markdown), ("--html", self.html)):
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise UsageError(f"{flag} is {path}; expected a file in a folder that exists")


def read_counts(flag: str, value: str, *, least: int) -> list[int]:
    """Return the numbers of a list like ``1,8``, each at least ``least``. Raises UsageError."""
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError as error:
        raise UsageError(f"{flag} is {value!r}; expected numbers separated by commas, like 1,8") from error
    if min(numbers) < least:
        raise UsageError(f"{flag} is {value!r}; every number must be at least {least}")
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{flag} is {value!r}; every number once is enough")
    return numbers
