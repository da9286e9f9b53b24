"""The flags that hold an answer to a form, and what they make of files and texts."""

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

JsonSchemaFlag = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE|TEXT",
        help="The answer is JSON of this schema: a file, or the schema itself if it begins with {.",
        show_default=False,
    ),
]
JsonObjectFlag = Annotated[bool, typer.Option("--json-object", help="The answer is a JSON object.")]
RegexFlag = Annotated[
    str | None,
    typer.Option("--regex", help="The whole answer matches this expression.", show_default=False),
]
ChoiceFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--choice", help="The answer is this text, or that of another --choice.", show_default=False
    ),
]
GrammarFlag = Annotated[
    str | None,
    typer.Option(
        "--grammar",
        metavar="FILE",
        help="The answer is text of this Lark grammar, as llguidance reads it.",
        show_default=False,
    ),
]


def read_form(
    *,
    json_schema: str | None,
    json_object: bool,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Structured | None:
    """Return the form that the flags ask for, or None. Raises UsageError for two forms, or a file that cannot
    be read.
    """
    asked = {
        "--json-schema": json_schema is not None,
        "--json-object": json_object,
        "--regex": regex is not None,
        "--choice": bool(choice),
        "--grammar": grammar is not None,
    }
    given = [flag for flag, is_given in asked.items() if is_given]
    if len(given) > 1:
        raise UsageError(f"found {' and '.join(given)}; an answer has one form, give one of them")
    if json_schema is not None:
        is_text = json_schema.lstrip().startswith("{")
        return JsonSchema(json_schema if is_text else _read(json_schema, "--json-schema"))
    if json_object:
        return JsonObject()
    if regex is not None:
        return Regex(regex)
    if choice:
        return Choice(tuple(choice))
    return None if grammar is None else Grammar(_read(grammar, "--grammar"))


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
