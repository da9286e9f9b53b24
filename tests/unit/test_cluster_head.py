"""Which head of a cluster is joined: one that a person named, that answers, and that asks for a token."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from llorch_serve.cluster.head import HeadAddress, check_head, find_token, read_head
from llorch_serve.errors import UsageError, WorkerError

ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"


class Head(grpc.GenericRpcHandler):
    """Answers as Ray's head does. token: what it asks for; None: nothing."""

    def __init__(self, token: str | None, methods: tuple[str, ...] = (ALIVE,)) -> None:
        self._token = token
        self._methods = methods

    def service(self, details):
        if details.method not in self._methods:
            return None
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request, context):
        shown = dict(context.invocation_metadata()).get("authorization")
        if self._token is not None and shown != f"Bearer {self._token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""


@contextlib.contextmanager
def listening(head: Head, host: str = "127.0.0.1") -> Iterator[HeadAddress]:
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([head])
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    try:
        yield HeadAddress(host, port)
    finally:
        server.stop(0).wait()


def refuse_notes(note: str) -> None:
    raise AssertionError(note)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "auto",
        "local",
        "10.0.0.5",
        "ray://10.0.0.5:10001",
        "10.0.0.5:0",
        "10.0.0.5:65536",
        "h:6379/x",
        "a b:1",
    ],
)
def test_an_address_that_is_not_explicit_is_refused(value):
    with pytest.raises(UsageError, match="expected HOST:PORT of the head of a Ray cluster") as caught:
        read_head("--address", value)
    assert str(caught.value).startswith("--address is ")


@pytest.mark.parametrize(
    ("value", "loopback"),
    [
        ("127.0.0.1:6379", True),
        ("localhost:6379", True),
        ("[::1]:6379", True),
        ("10.0.0.5:6379", False),
        ("head.example:6379", False),
        ("[2001:db8::1]:6379", False),
    ],
)
def test_an_address_says_whether_it_is_this_machines_own(value, loopback):
    head = read_head("--address", value)
    assert str(head) == value
    assert head.is_loopback is loopback


def test_the_token_is_looked_for_where_ray_does(tmp_path):
    assert find_token({}, tmp_path) is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of the home\n")
    (tmp_path / "token").write_text("of a file\n")
    named = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    assert find_token({}, tmp_path) == "of the home"
    assert find_token(named, tmp_path) == "of a file"
    assert find_token(named | {"RAY_AUTH_TOKEN": "own"}, tmp_path) == "own"
    assert find_token(named | {"RAY_AUTH_MODE": "disabled"}, tmp_path) is None
    assert find_token(named | {"RAY_AUTH_MODE": "TOKEN"}, tmp_path) == "of a file"


def test_a_named_token_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"RAY_AUTH_TOKEN_PATH names .*none, which cannot be read"):
        find_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}, Path("/"))


def test_a_head_that_takes_the_token_is_joined():
    with listening(Head("secret")) as head:
        check_head(head, "secret", refuse_notes)


def test_a_head_that_refuses_the_token_is_not_joined():
    with listening(Head("secret")) as head, pytest.raises(WorkerError, match="refuses the token that is set"):
        check_head(head, "another", refuse_notes)


def test_a_head_that_asks_for_a_token_where_there_is_none_is_refused_with_how_to_make_one():
    with (
        listening(Head("secret")) as head,
        pytest.raises(UsageError, match="asks for a token, and there is none"),
    ):
        check_head(head, None, refuse_notes)


def test_an_open_head_on_the_loopback_is_told_of():
    notes: list[str] = []
    with listening(Head(None)) as head:
        check_head(head, None, notes.append)
    [note] = notes
    assert "asks callers for no token" in note


def test_beyond_the_loopback_a_token_is_needed_before_anything_is_asked():
    with pytest.raises(UsageError, match=r"head\.example:6379 is beyond this machine's loopback"):
        check_head(HeadAddress("head.example", 6379), None, refuse_notes)


def test_beyond_the_loopback_a_head_that_asks_nobody_is_refused():
    class Elsewhere(HeadAddress):
        is_loopback = False

    with listening(Head(None)) as head, pytest.raises(UsageError, match="whoever reaches it can run code"):
        check_head(Elsewhere(head.host, head.port), "token", refuse_notes)


def test_another_server_is_no_head():
    with (
        listening(Head(None, methods=())) as head,
        pytest.raises(WorkerError, match="is no head of a Ray cluster"),
    ):
        check_head(head, "token", refuse_notes)


def test_where_nothing_listens_the_refusal_comes_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(WorkerError, match=f"no cluster answers at 127.0.0.1:{port}"):
        check_head(HeadAddress("127.0.0.1", port), "token", refuse_notes)
