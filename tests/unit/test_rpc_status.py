"""Errors to statuses and back."""

from __future__ import annotations

import logging

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from llorch_serve.errors import (
    AuthenticationError,
    CancelledError,
    FieldViolation,
    InvalidRequestError,
    LlorchError,
    ModelMismatchError,
    NonFiniteLogitsError,
    QueueFullError,
    ResourceError,
    UnavailableError,
    UnreachableError,
    UnsupportedError,
    WorkerError,
)
from llorch_serve.rpc.status import MAX_STATUS_BYTES, read_status, write_status


class Failed(grpc.RpcError):
    """A failed call as a client sees it."""

    def __init__(self, code, details, trailers=()):
        self._fields = code, details, trailers

    def code(self):
        return self._fields[0]

    def details(self):
        return self._fields[1]

    def trailing_metadata(self):
        return self._fields[2]


def there_and_back(error):
    return read_status(Failed(*write_status(error, method="M")), address="host:1")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (
            InvalidRequestError([FieldViolation("a", "b"), FieldViolation("sampling.stop[3]", "é")]),
            "INVALID_ARGUMENT",
        ),
        (ModelMismatchError("other model"), "FAILED_PRECONDITION"),
        (QueueFullError("full", retry_after_s=2.5), "RESOURCE_EXHAUSTED"),
        (UnavailableError("loading"), "UNAVAILABLE"),
        (UnsupportedError("not here"), "UNIMPLEMENTED"),
        (CancelledError("aborted"), "CANCELLED"),
        (AuthenticationError("a token is asked for"), "UNAUTHENTICATED"),
    ],
)
def test_a_request_error_comes_back_as_it_was(error, code):
    assert write_status(error, method="M")[0].name == code
    back = there_and_back(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_logits_that_are_not_finite_are_internal_and_told_to_both_sides(caplog):
    error = NonFiniteLogitsError("the model gave 3 logits of 8 that are not finite")
    with caplog.at_level(logging.ERROR):
        code, text, _ = write_status(error, method="Generate")
    assert (code, text) == (grpc.StatusCode.INTERNAL, str(error))
    assert f"Generate: {error}" in caplog.text
    assert str(there_and_back(error)).endswith(f"answered INTERNAL: {error}")


def test_a_full_memory_asks_to_try_again_and_the_log_has_the_rest(caplog):
    error = ResourceError("no memory for the cache of one more sequence; choose fewer --slots")
    with caplog.at_level(logging.ERROR):
        code, text, trailers = write_status(error, method="Generate")
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--slots" not in text
    assert "--slots" in caplog.text
    assert f"Generate failed, error id {text.rsplit(' ', 1)[1]}" in caplog.text
    failed = Failed(code, text, trailers)
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in rpc_status.from_call(failed).details)
    assert retry.retry_delay.ToNanoseconds() > 0
    back = read_status(failed, address="host:1")
    assert (type(back), str(back)) == (ResourceError, text)


@pytest.mark.parametrize("error", [ValueError("secret prompt"), LlorchError("secret path")])
def test_a_bug_shows_an_id_only_and_the_log_has_the_rest(error, caplog):
    with caplog.at_level(logging.ERROR):
        code, text, trailers = write_status(error, method="Generate")
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in text
    assert trailers == ()
    error_id = text.rsplit(" ", 1)[1]
    assert f"Generate failed, error id {error_id}" in caplog.text
    assert "secret" in caplog.text


@pytest.mark.parametrize("letter", ["x", "é", "🎉"])
@pytest.mark.parametrize("count", [1, 40, 20_000])
def test_details_stay_small_and_count_what_they_leave_out(letter, count):
    error = InvalidRequestError([FieldViolation(f"sampling.stop[{i}]", letter * 300) for i in range(count)])
    _, text, ((_, details),) = write_status(error, method="M")
    assert len(details) <= MAX_STATUS_BYTES
    assert len(details) * 4 / 3 < 4096
    assert len(text.encode()) <= 800
    back = there_and_back(error)
    assert isinstance(back, InvalidRequestError)
    if count == 1:
        assert back.violations[0].field == "sampling.stop[0]"
        assert back.violations[0].description.startswith(letter * 90)
        return
    listed = back.violations[:-1]
    assert [v.field for v in listed] == [f"sampling.stop[{i}]" for i in range(len(listed))]
    assert back.violations[-1] == FieldViolation(
        "others", f"{count - len(listed)} more bad fields are not listed here"
    )


def test_a_lone_surrogate_in_a_message_does_not_break_the_status():
    back = there_and_back(InvalidRequestError([FieldViolation("a", "found '\ud800'")]))
    assert str(back) == r"a: found '\ud800'"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("UNAVAILABLE", "no worker answers at host:1 (refused); start one with: llorch serve"),
        ("DEADLINE_EXCEEDED", "did not finish in time"),
        ("RESOURCE_EXHAUSTED", "answered RESOURCE_EXHAUSTED: refused"),
        ("UNIMPLEMENTED", "answered UNIMPLEMENTED: refused"),
        ("INTERNAL", "answered INTERNAL: refused"),
    ],
)
def test_a_status_that_is_no_worker_refusal_becomes_a_worker_error(code, says):
    back = read_status(Failed(grpc.StatusCode[code], "refused"), address="host:1")
    assert type(back) is (UnreachableError if code == "UNAVAILABLE" else WorkerError)
    assert says in str(back)


@pytest.mark.parametrize("details", [b"\xff\xff", b"\x08\x05"])
def test_details_that_are_damaged_or_of_another_status_are_passed_over(details):
    failed = Failed(grpc.StatusCode.INVALID_ARGUMENT, "bad", (("grpc-status-details-bin", details),))
    assert str(read_status(failed, address="host:1")) == "request: bad"
