"""From the bytes of a JSON body to a typed structure, with every bad field named at once.

msgspec stops at the first error of a document, so the document is cut into its top-level values first, which
are skipped over and not built, and each is read as its field's type. Whatever no field knows is never built
at all. An integer may be written as a float without a fraction, as some clients write all numbers.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.http.unknown_fields import fields_of, is_null, listed, unknown_fields, unknown_names
from llorch_serve.http.values import check_values

BODY: Final = "body"  # names what is wrong with a document as a whole
MAX_LISTED: Final = 32  # bad fields that are named one by one
MAX_COUNTED: Final = 1024  # unknown fields of one value that are looked at

S = TypeVar("S", bound=msgspec.Struct)


def read_struct(raw: bytes, kind: type[S], ignored: list[str] | None = None, *, ignorable: bool = True) -> S:
    """Return the document as ``kind``; a field that is null or absent takes its default.

    ignored: gets the paths of unknown fields, at most MAX_LISTED; None: they are refused.
    ignorable: a worker can be told to ignore them, which a refusal says.
    Raises InvalidRequestError with every unknown field, every value of the wrong type and every missing
    field.
    """
    check_values(raw, BODY)
    values = _split(raw)
    known = fields_of(kind)
    unknown = list(islice(unknown_names(values, kind), MAX_COUNTED))
    bad: list[FieldViolation] = []
    read: dict[str, Any] = {}
    for name, (type_, required) in known.items():
        raw_value = values.get(name)
        if raw_value is None or is_null(raw_value):
            if required:
                bad.append(FieldViolation(name, f"not set, expected {_shown(type_)}"))
            continue
        try:
            str(memoryview(raw_value), "utf-8")  # msgspec does not look into what is kept as it came
            read[name] = _decoded(raw_value, type_)
            unknown += islice(unknown_fields(raw_value, type_, name), MAX_COUNTED)
        except NOT_JSON as error:
            bad.append(_violation(name, error))
    if ignored is not None:
        ignored += listed([field.path for field in unknown], MAX_LISTED)
    else:  # a body has room for hundreds of thousands
        told = ((field.path, field.description(ignorable=ignorable)) for field in unknown[:MAX_LISTED])
        bad = [*(FieldViolation(path, found) for path, found in told), *bad]
    if bad:
        refuse_fields(bad, unlisted=max(0, len(unknown) - MAX_LISTED) if ignored is None else 0)
    return kind(**read)


def _decoded(raw: msgspec.Raw, type_: Any) -> Any:
    """Decode a value; a list of structures one by one, since decoding thousands at once would hold every
    other thread up.
    """
    (item,) = typing.get_args(type_) if typing.get_origin(type_) is list else (None,)
    if not (isinstance(item, type) and issubclass(item, msgspec.Struct)):
        # Not strict, it would also make numbers of texts.
        strict = not _is_integral(type_) or b'"' in bytes(raw)
        return msgspec.json.decode(raw, type=type_, strict=strict)
    found = []
    for index, each in enumerate(msgspec.json.decode(raw, type=list[msgspec.Raw])):
        try:
            found.append(msgspec.json.decode(each, type=item))
        except msgspec.ValidationError as error:
            text, at, path = str(error).partition(" - at `$")
            raise msgspec.ValidationError(f"{text} - at `$[{index}]{path if at else '`'}") from error
    return found


def refuse_fields(bad: Sequence[FieldViolation], *, unlisted: int = 0) -> NoReturn:
    """Raise InvalidRequestError with the first bad fields, and a count of the others, ``unlisted`` ones among
    them.
    """
    raise InvalidRequestError(first_fields(bad, unlisted=unlisted))


def first_fields(bad: Sequence[FieldViolation], *, unlisted: int = 0) -> tuple[FieldViolation, ...]:
    """Return the first bad fields, and a count of the others, ``unlisted`` ones among them."""
    left = len(bad) + unlisted - MAX_LISTED
    more = [FieldViolation(BODY, f"at least {left} more fields are bad")] if left > 0 else []
    return (*bad[:MAX_LISTED], *more)


def _split(raw: bytes) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except NOT_JSON as error:
        found = (
            f"not a JSON object ({error}); expected one, in UTF-8" if raw else "empty, expected a JSON object"
        )
        raise InvalidRequestError([FieldViolation(BODY, found)]) from error


@functools.cache
def _is_integral(type_: Any) -> bool:
    """Tell whether a type has integers and no other numbers, in lists perhaps."""
    if typing.get_origin(type_) in (list, typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(type_) if part not in (str, types.NoneType)]
        return bool(parts) and all(map(_is_integral, parts))
    return type_ is int


def _violation(name: str, error: Exception) -> FieldViolation:
    """Turn msgspec's ``Expected `int`, got `str` - at `$[0].x``` into the path ``name[0].x`` and the rest."""
    if isinstance(error, RecursionError):
        return FieldViolation(name, "nested too deeply")
    text, _, path = str(error).partition(" - at `$")
    return FieldViolation(name + path.rstrip("`"), text)


def _shown(type_: Any) -> str:
    return getattr(type_, "__name__", None) or str(type_).replace("llorch_serve.http.", "")
