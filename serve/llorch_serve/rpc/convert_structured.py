"""The part of ``convert.py`` for forms of answers: the oneof ``structured`` and the types of
``structured/spec.py``.
"""

from __future__ import annotations

from llorch_serve.errors import FieldViolation
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.structured.spec import (
    MAX_CHOICES,
    Choice,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    Structured,
)


def read_form(message: pb.Sampling) -> Structured | None:
    """Return the form that a message asks for. Of too many options only one too many is read; that is told
    later.
    """
    match message.WhichOneof("structured"):
        case "json_schema":
            return JsonSchema(message.json_schema)
        case "regex":
            return Regex(message.regex)
        case "choice":
            return Choice(tuple(message.choice.options[: MAX_CHOICES + 1]))
        case "grammar":
            return Grammar(message.grammar)
        case "json_object" if message.json_object:
            return JsonObject()
    return None


def fill_form(message: pb.Sampling, form: Structured, bad: list[FieldViolation]) -> None:
    """Write a form; add what no message can carry (lone surrogates) to ``bad``."""
    try:
        match form:
            case JsonSchema(schema):
                message.json_schema = schema
            case Regex(pattern):
                message.regex = pattern
            case Choice(options):
                message.choice.SetInParent()
                message.choice.options.extend(options)
            case Grammar(lark):
                message.grammar = lark
            case JsonObject():
                message.json_object = True
    except ValueError as error:
        bad.append(FieldViolation(f"sampling.{form.field}", f"cannot be sent: {error}"))
