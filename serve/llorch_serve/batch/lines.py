"""One line of a batch's input: OpenAI's form (custom_id, method, url, body), or a bare prompt or chat.

What a body may say is the business of the route that answers it; here a line is only told apart from its
neighbours and sent to the right route.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from llorch_serve.errors import LlorchError
from llorch_serve.files.json_errors import NOT_JSON

CHAT_URL: Final = "/v1/chat/completions"
COMPLETIONS_URL: Final = "/v1/completions"
URLS: Final = (CHAT_URL, COMPLETIONS_URL, "/v1/embeddings", "/v1/responses", "/v1/score", "/v1/rerank")
MAX_LINE_BYTES: Final = 16 * 2**20
MAX_ASKED_BYTES: Final = 4 * 2**20 + 2**16
"""Of a line that can be answered: no route takes a longer body. Of others only the id is read, as Python's
objects of a line of 16 MiB may take half a gigabyte, and stop all that the process does for a second.
"""
MAX_ID_CHARACTERS: Final = 512
MAX_SHOWN: Final = 80  # characters of what was found
_FIELDS: Final = ("custom_id", "method", "url", "body")
_BARE: Final = {"messages": CHAT_URL, "prompt": COMPLETIONS_URL}

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class _Named(msgspec.Struct):
    """Of a line, what says whose answer it gets."""

    custom_id: msgspec.Raw = msgspec.Raw()
    url: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()


_decode_named = msgspec.json.Decoder(_Named).decode


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch.

    number: of the line in its file, from 1; rows of a table are counted in the same way.
    body: a JSON object for the route at ``url``.
    is_bare: the line had no url and no body, and got settings.
    """

    number: int
    custom_id: str
    url: str
    body: bytes
    is_bare: bool = False


class UnreadableLineError(LlorchError):
    """Nobody could tell which line an answer to this one belongs to: it has no id that can be read."""


class BadLineError(LlorchError):
    """A line whose id can be read, and that cannot be answered. custom_id: that id."""

    def __init__(self, custom_id: str, message: str) -> None:
        self.custom_id = custom_id
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class LineForm:
    """How lines are read.

    settings: fields that the body of a bare line gets where it does not have them.
    urls: the routes that lines may ask for.
    """

    settings: Mapping[str, object] = field(default_factory=dict)
    urls: tuple[str, ...] = URLS

    def read(self, number: int, raw: bytes) -> BatchLine:
        """Return the line. Raises UnreadableLineError, or BadLineError where its custom_id can be read."""
        if len(raw) > MAX_ASKED_BYTES:
            raise BadLineError(
                _id_of_long(number, raw), f"has {len(raw)} bytes; expected at most {MAX_ASKED_BYTES}"
            )
        fields = _fields(raw)
        if "url" in fields or "body" in fields or not _BARE.keys() & fields.keys():
            return self._read_openai(number, fields)
        return self._read_bare(number, fields)

    def _read_openai(self, number: int, fields: dict[str, msgspec.Raw]) -> BatchLine:
        if "custom_id" not in fields:
            raise _without_id()
        custom_id = _custom_id(fields["custom_id"])
        if unknown := sorted(fields.keys() - set(_FIELDS)):
            raise BadLineError(
                custom_id, f"has {_shown(unknown[0])} beside custom_id, method, url and body; leave it out"
            )
        method = _text(fields.get("method"), "POST")
        if method != "POST":
            raise BadLineError(custom_id, f"has the method {_shown(method)}; expected POST")
        body = bytes(fields["body"]) if "body" in fields else b""
        if not body.startswith(b"{"):
            raise BadLineError(custom_id, f"has the body {_shown(body.decode())}; expected an object")
        url = _text(fields["url"], None) if "url" in fields else _url_of(body)
        if url not in self.urls:
            raise BadLineError(custom_id, f"has the url {_shown(url)}; expected {' or '.join(self.urls)}")
        return BatchLine(number, custom_id, str(url), body)

    def _read_bare(self, number: int, fields: dict[str, msgspec.Raw]) -> BatchLine:
        given = fields.pop("custom_id", None)
        custom_id = f"line-{number}" if given is None else _custom_id(given)
        asked = sorted(_BARE.keys() & fields.keys())
        if len(asked) > 1:
            raise BadLineError(custom_id, "has a prompt and messages; expected one of them")
        url = _BARE[asked[0]]
        if url not in self.urls:
            raise BadLineError(custom_id, f"asks for {url}; expected {' or '.join(self.urls)}")
        method = fields.pop("method", None)
        if method is not None and _text(method, None) != "POST":
            raise BadLineError(custom_id, f"has the method {_shown(_text(method, None))}; expected POST")
        return BatchLine(number, custom_id, url, _encode({**self.settings, **fields}), is_bare=True)


def _id_of_long(number: int, raw: bytes) -> str:
    """Return the id of a line of which nothing else is read."""
    _check_utf8(raw)
    try:
        found = _decode_named(raw)
    except RecursionError:
        raise _too_deep() from None
    except NOT_JSON as error:
        raise _no_object(raw, error) from None
    if memoryview(found.custom_id):
        return _custom_id(found.custom_id)
    if memoryview(found.url) or memoryview(found.body):
        raise _without_id()
    return f"line-{number}"


def _fields(raw: bytes) -> dict[str, msgspec.Raw]:
    _check_utf8(raw)
    try:
        return _decode(raw)
    except RecursionError:
        raise _too_deep() from None
    except NOT_JSON as error:
        if custom_id := _id_in_spite_of_faults(raw):
            fault = "NaN, Infinity or half a surrogate pair"
            raise BadLineError(custom_id, f"holds {fault}, which JSON has not; write it without") from None
        raise _no_object(raw, error) from None


def _check_utf8(raw: bytes) -> None:
    try:
        str(memoryview(raw), "utf-8")  # msgspec does not look into what is kept as it came
    except UnicodeDecodeError as error:
        raise UnreadableLineError(f"is not UTF-8 at byte {error.start}; write the file as UTF-8") from None


def _too_deep() -> UnreadableLineError:
    return UnreadableLineError("is nested too deeply to be read")


def _no_object(raw: bytes, error: Exception) -> UnreadableLineError:
    reason = str(error).removeprefix("JSON is malformed: ")
    return UnreadableLineError(f"is no object in JSON ({reason}): {_shown(raw.decode())}")


def _without_id() -> UnreadableLineError:
    return UnreadableLineError(
        "has no custom_id; a line has custom_id, method, url and body, or a prompt, or messages"
    )


def _id_in_spite_of_faults(raw: bytes) -> str | None:
    """Return the id of a line that holds what Python's writer lets through and JSON has not."""
    try:
        custom_id = json.loads(raw)["custom_id"]
        custom_id.encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return custom_id if 0 < len(custom_id) <= MAX_ID_CHARACTERS else None


def _url_of(body: bytes) -> str | None:
    """Return where a body belongs that came without a url, as some services have them."""
    names = _decode(body).keys()
    return next((url for name, url in _BARE.items() if name in names), None)


def _custom_id(raw: msgspec.Raw) -> str:
    custom_id = _text(raw, None)
    if not isinstance(custom_id, str):
        raise UnreadableLineError(f"has the custom_id {_shown(bytes(raw).decode())}; expected a text")
    if not 0 < len(custom_id) <= MAX_ID_CHARACTERS:
        raise UnreadableLineError(
            f"has a custom_id of {len(custom_id)} characters; expected 1 to {MAX_ID_CHARACTERS}"
        )
    return custom_id


def _text(raw: msgspec.Raw | None, absent: str | None) -> object:
    """Return the value of a field that should be a text, whatever it is; ``absent`` where it is not there."""
    if raw is None:
        return absent
    try:
        return msgspec.json.decode(raw)
    except NOT_JSON:
        return None


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return repr(text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "...")
