"""What a person at a terminal is told when a worker serves, and text that a terminal cannot show."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator

from llorch_serve import cli
from llorch_serve.terminal import console
from llorch_serve.terminal.greeting import Welcome


def test_the_address_a_call_and_a_page() -> None:
    address, call, page = Welcome("127.0.0.1:50051", "http://127.0.0.1:8080", True, False).lines()
    assert "http://127.0.0.1:8080/v1" in address
    assert "127.0.0.1:50051 (gRPC)" in address
    assert "curl http://127.0.0.1:8080/v1/chat/completions" in call
    assert "Authorization" not in call
    assert json.loads(call.rpartition("-d ")[2].strip("'"))["messages"]
    assert page.endswith("http://127.0.0.1:8080/")


def test_the_call_is_one_that_works() -> None:
    _, call, _ = Welcome("0.0.0.0:50051", "https://[::]:8443", False, True).lines()
    assert "curl https://127.0.0.1:8443/v1/completions" in call
    assert 'Bearer $LLORCH_API_TOKEN"' in call


def test_without_http_a_person_is_told_how_to_get_it() -> None:
    address, call, page = Welcome("127.0.0.1:50051", None, True, False).lines()
    assert "127.0.0.1:50051 (gRPC)" in address
    assert "llorch generate --connect 127.0.0.1:50051 --chat Hello" in call
    assert "--http 8080" in page


def test_a_model_that_embeds_is_asked_for_a_vector() -> None:
    _, call, _ = Welcome("127.0.0.1:50051", "http://127.0.0.1:8080", True, False, embeds=True).lines()
    assert "curl http://127.0.0.1:8080/v1/embeddings" in call
    assert json.loads(call.rpartition("-d ")[2].strip("'")) == {"input": "Hello"}
    _, call, _ = Welcome("127.0.0.1:50051", None, True, False, embeds=True).lines()
    assert "llorch embed --connect 127.0.0.1:50051 --text Hello" in call


@contextlib.contextmanager
def ascii_stdout() -> Iterator[io.BytesIO]:
    raw = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(raw, encoding="ascii", write_through=True)):
        cli._write_what_can_be_written()
        yield raw


def test_what_stdout_lacks_is_replaced() -> None:
    with ascii_stdout() as written:
        console.write("Größe 🙂\n")
        assert written.getvalue() == b"Gr??e ?\n"


def test_json_loses_nothing() -> None:
    document = {"text": 'Größe 🙂 "quoted" \\ and plain'}
    with ascii_stdout() as written:
        console.write_json(document)
        assert json.loads(written.getvalue()) == document
