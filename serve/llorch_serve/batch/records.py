"""The lines of a batch's output, in OpenAI's form: the same bytes whenever a line has the same answer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import msgspec

from llorch_serve.batch.answering import LineAnswer
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.files.text import writable

FIRST_FAILURE: Final = 400

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Record:
    """One line to write, with its end. is_failure: it goes to the file of errors."""

    number: int
    data: bytes
    is_failure: bool


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Output(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


def derived_id(prefix: str, run_id: str, custom_id: str) -> str:
    """Return an id that is the same whenever the same line of the same run is answered."""
    named = f"{prefix}\0{run_id}\0{custom_id}".encode()
    return prefix + hashlib.blake2b(named, digest_size=12).hexdigest()


def answer_record(run_id: str, number: int, custom_id: str, answer: LineAnswer) -> Record:
    """Return the record of an answer, which a refusal is too."""
    try:
        body = _one_line(answer.body)
    except NOT_JSON:
        text = answer.body[:200].decode("utf-8", "backslashreplace")
        return failure_record(
            run_id, number, custom_id, "invalid_answer", f"the answer, {answer.status}, is no JSON: {text!r}"
        )
    response = _Response(answer.status, answer.request_id, body)
    is_failure = answer.status >= FIRST_FAILURE
    return _record(run_id, number, custom_id, response, None, is_failure=is_failure)


def failure_record(run_id: str, number: int, custom_id: str, code: str, message: str) -> Record:
    """Return the record of a line that has no answer at all."""
    error = _Error(code, writable(f"line {number}: {message}"))
    return _record(run_id, number, custom_id, None, error, is_failure=True)


def _record(
    run_id: str,
    number: int,
    custom_id: str,
    response: _Response | None,
    error: _Error | None,
    *,
    is_failure: bool,
) -> Record:
    output = _Output(derived_id("batch_req_", run_id, custom_id), custom_id, response, error)
    return Record(number, _encode(output) + b"\n", is_failure)


def _one_line(body: bytes) -> msgspec.Raw:
    """Return the body as it is, or without the line breaks between its fields."""
    if b"\n" in body or b"\r" in body:
        return msgspec.Raw(_encode(msgspec.json.decode(body)))
    return msgspec.json.decode(body, type=msgspec.Raw)
