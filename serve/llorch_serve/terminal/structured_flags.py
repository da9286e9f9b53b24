"""Flags that hold an answer to a form, and the form that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llorch_serve.errors import UsageError
from llorch_serve.structured.spec import (
    MAX_TEXT_BYTES,
    Choice,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    Structured,
)
from llorch_serve.terminal.groups import FlagGroup


class StructuredFlags(FlagGroup, frozen=True):
    """What the answer must be like. At most one of them is given."""

    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema",
            metavar="FILE|TEXT",
            help="The answer is JSON of this schema: a file, or the schema itself if it begins with {.",
            show_default=False,
        ),
    ] = None
    json_object: Annotated[bool, typer.Option("--json-object", help="The answer is a JSON object.")] = False
    regex: Annotated[
        str | None,
        typer.Option("--regex", help="The whole answer matches this expression.", show_default=False),
    ] = None
    choice: Annotated[
        list[str] | None,
        typer.Option(
            "--choice", help="The answer is this text, or that of another --choice.", show_default=False
        ),
    ] = None
    grammar: Annotated[
        str | None,
        typer.Option(
            "--grammar",
            metavar="FILE",
            help="The answer is text of this Lark grammar, as llguidance reads it.",
            show_default=False,
        ),
    ] = None

    def structured(self) -> Structured | None:
        """Return the form that the flags ask for, or None.

        Raises UsageError for two forms, or a file that cannot be read.
        """
        if len(given := self.given()) > 1:
            raise UsageError(f"found {' and '.join(given)}; an answer has one form, give one of them")
        if self.json_schema is not None:
            is_text = self.json_schema.lstrip().startswith("{")
            return JsonSchema(self.json_schema if is_text else _read(self.json_schema, "--json-schema"))
        if self.json_object:
            return JsonObject()
        if self.regex is not None:
            return Regex(self.regex)
        if self.choice:
            return Choice(tuple(self.choice))
        return None if self.grammar is None else Grammar(_read(self.grammar, "--grammar"))


def _read(name: str, flag: str) -> str:
    try:
        with Path(name).open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise UsageError(
                f"{flag} names {name}, which has more than {MAX_TEXT_BYTES} bytes; give a smaller one"
            )
        return data.decode()
    except OSError as error:
        raise UsageError(f"{flag} names {name}, which cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} names {name}, which is not UTF-8; expected text") from error
