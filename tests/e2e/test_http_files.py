"""/v1/files: what is sent, kept, found and refused, by OpenAI's own client and by clients that mean harm."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket

import openai
import pytest

from llorch_serve.errors import UsageError
from llorch_serve.http.batches import runner, uploads
from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.server import HttpConfig, HttpFront
from llorch_serve.http.settings import HttpSettings
from support.fakes.generator import PATIENCE_S
from support.harness.batches import (
    begin,
    chat_lines,
    client_of,
    front_of,
    results,
    send_file,
    wait_for,
)
from support.harness.http import send
from support.harness.waiting import until

BOUNDARY = "7e3b"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A front that keeps files, its folder, and OpenAI's client of it."""
    folder = tmp_path_factory.mktemp("kept")
    with front_of(folder) as (front, _), client_of(front.port) as client:
        yield front, folder, client


def part(name, value, filename=None):
    """Return a part of a form."""
    told = f'form-data; name="{name}"' + (f'; filename="{filename}"' if filename is not None else "")
    return f"--{BOUNDARY}\r\nContent-Disposition: {told}\r\n\r\n".encode() + value + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()


def form(*parts, end=END):
    return b"".join(parts) + end


PURPOSE = part("purpose", b"batch")
FILE = part("file", b"{}\n", "a.jsonl")


def post(front, body, kind=f"multipart/form-data; boundary={BOUNDARY}", **headers):
    return send(front.port, "POST", "/v1/files", body, {"Content-Type": kind} | headers)


def left(folder):
    """Return what lies in a folder, but for its lock."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != ".worker.lock")


def test_a_file_comes_back_as_it_was_sent(served):
    _, _, client = served
    content = bytes(range(256)) * 5000 + b"\r\n--7e3b\r\n\r\n--7e3b--\r\n"
    file = client.files.create(file=("päth/to/Ünï.jsonl", content), purpose="batch")
    assert (file.bytes, file.status, file.expires_at) == (len(content), "processed", None)
    assert file.filename == "Ünï.jsonl"
    assert client.files.retrieve(file.id) == file
    answer = client.files.content(file.id)
    assert answer.content == content
    assert answer.response.headers["content-type"] == "application/octet-stream"
    assert answer.response.headers["content-disposition"] == "attachment"
    assert answer.response.headers["x-content-type-options"] == "nosniff"
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (file.id, "file", True)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_files_are_listed_by_pages_in_either_order(tmp_path):
    with front_of(tmp_path) as (front, _), client_of(front.port) as client:
        made = [send_file(client, chat_lines(1), f"{n}.jsonl") for n in range(5)]
        assert [file.id for file in client.files.list()] == made[::-1]
        assert [file.id for file in client.files.list(limit=2, order="asc")] == made
        page = client.files.list(limit=2, order="asc", after=made[0])
        assert ([file.id for file in page.data], page.has_more) == (made[1:3], True)
        assert list(client.files.list(purpose="batch_output")) == []
        wait_for(client, begin(client, chat_lines(1)).id)
        assert [file.purpose for file in client.files.list(purpose="batch_output")] == ["batch_output"]
        for query in ("limit=0", "limit=x", "limit=10001", "order=up", "limit=1&limit=2", "after=file-none"):
            answer = send(front.port, "GET", f"/v1/files?{query}")
            assert answer.status == (404 if "after" in query else 400), query


def test_a_file_that_a_batch_reads_stays_until_that_has_ended(tmp_path):
    with front_of(tmp_path, free_running=False) as (front, generator), client_of(front.port) as client:
        begun = begin(client, chat_lines(1))
        with pytest.raises(openai.BadRequestError, match=begun.id):
            client.files.delete(begun.input_file_id)
        generator.run_freely()
        wait_for(client, begun.id)
        client.files.delete(begun.input_file_id)


def test_files_are_there_after_a_restart(tmp_path):
    with front_of(tmp_path) as (front, _), client_of(front.port) as client:
        made = [send_file(client, chat_lines(n + 1)) for n in range(2)]
        client.files.delete(made[0])
    with front_of(tmp_path) as (front, _), client_of(front.port) as client:
        assert [file.id for file in client.files.list()] == made[1:]
        assert client.files.content(made[1]).content == chat_lines(2)
        third = send_file(client, chat_lines(1))
        assert [file.id for file in client.files.list()] == [third, made[1]]


def test_a_file_expires_when_it_was_told_to(tmp_path):
    with front_of(tmp_path) as (front, _), client_of(front.port) as client:
        after = {"anchor": "created_at", "seconds": 3600}
        file = client.files.create(file=("a", b"{}"), purpose="batch", expires_after=after)
        assert file.expires_at == file.created_at + 3600
        done = wait_for(
            client, begin(client, chat_lines(1), output_expires_after=after | {"seconds": 7200}).id
        )
        result = client.files.retrieve(done.output_file_id)
        assert result.expires_at == result.created_at + 7200
        for bad in ({"anchor": "now", "seconds": 3600}, {"anchor": "created_at", "seconds": 1}):
            with pytest.raises(openai.BadRequestError, match="expires_after"):
                client.files.create(file=("a", b"{}"), purpose="batch", expires_after=bad)
            with pytest.raises(openai.BadRequestError, match="output_expires_after"):
                begin(client, chat_lines(1), output_expires_after=bad)
    record = tmp_path / "files" / f"{file.id}.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"expires_at": 1}))
    with front_of(tmp_path) as (front, _), client_of(front.port) as client:
        assert file.id not in {other.id for other in client.files.list()}
        assert not record.with_suffix(".data").exists()


def test_no_path_of_a_request_touches_the_disk(served):
    front, folder, client = served
    (folder.parent / "secret.data").write_text("secret")
    for name in ("../../secret", "..%2f..%2fsecret", "%2e%2e%2f%2e%2e%2fsecret", "/etc/passwd", "%00", "."):
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
            answer = send(front.port, "GET", path)
            assert answer.status in (404, 405), path
            assert b"secret" not in answer.body.replace(name.encode(), b"").replace(b"../../secret", b"")
    for name in ("../../../evil", "/etc/cron.d/evil", "C:\\windows\\evil", "a\r\nX-Evil: 1", "x" * 5000):
        before = left(folder)
        with contextlib.suppress(openai.APIStatusError):
            file = client.files.create(file=(name, b"{}"), purpose="batch")
            assert "/" not in file.filename
            assert len(file.filename) <= 255
            client.files.delete(file.id)
        assert left(folder) == before
    assert not list(folder.parent.glob("**/*evil*"))


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (form(PURPOSE), "file", "not set"),
        (form(FILE), "purpose", "not set"),
        (form(PURPOSE, part("file", b"", "a")), "file", "empty"),
        (form(FILE, part("purpose", b"assistants")), "purpose", "'assistants'"),
        (form(FILE, PURPOSE, PURPOSE), "purpose", "twice"),
        (form(FILE, PURPOSE, part("zz", b"1")), "zz", "unknown"),
        (form(FILE, PURPOSE, part("expires_after[seconds]", b"x")), "expires_after[anchor]", "created_at"),
        (form(FILE, PURPOSE, FILE), None, "two fields"),
        (form(FILE, PURPOSE, end=b""), None, "before its last boundary"),
        (form(PURPOSE, part("file", b"{}", "a")[:-9], end=b""), None, "before its last boundary"),
        (b"", None, "before its last boundary"),
        (b"nothing of the kind" * 9, None, "no multipart form"),
        (form(part("purpose", b"x" * 2000), FILE), None, "more than 1024 bytes"),
        (form(*[part(f"z{n}", b"") for n in range(20)]), None, "more than 16 fields"),
        (form(FILE, PURPOSE) + b"x" * 70_000, None, "beside the file"),
        (form(f"--{BOUNDARY}\r\n".encode() + b"A: b\r\n" * 30 + b"\r\nx\r\n"), None, "no multipart form"),
        (form(f"--{BOUNDARY}\r\nA: ".encode() + b"b" * 9000 + b"\r\n\r\nx\r\n"), None, "no multipart form"),
    ],
)
def test_a_form_that_is_none_is_refused_and_leaves_nothing(served, caplog, body, field, words):
    front, folder, _ = served
    before = left(folder)
    answer = post(front, body)
    assert answer.status == 400
    error = answer.document["error"]
    assert error["param"] == field
    assert words in error["message"]
    assert left(folder) == before
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 415),
        ("", 415),
        ("multipart/form-data", 400),
        ("multipart/form-data; boundary=" + "b" * 300, 400),
        ("multipart/mixed; boundary=7e3b", 415),
    ],
)
def test_a_body_of_another_type_is_refused(served, kind, status):
    assert post(served[0], form(FILE, PURPOSE), kind).status == status


def test_a_page_of_elsewhere_cannot_have_a_browser_send_files(served):
    front, _, client = served
    for origin in ("https://evil.example", "null", f"http://evil.example:{front.port}"):
        answer = post(front, form(FILE, PURPOSE), Origin=origin)
        assert (answer.status, answer.document["error"]["code"]) == (403, "origin_not_allowed")
        begun = begin(client, chat_lines(1))
        answer = send(front.port, "POST", f"/v1/batches/{begun.id}/cancel", b"", {"Origin": origin})
        assert answer.status == 403
    assert post(front, form(FILE, PURPOSE), Origin=f"http://127.0.0.1:{front.port}").status == 200


def test_room_is_bounded_for_each_caller_and_for_all(tmp_path):
    with (
        front_of(tmp_path, token="mine", caller_bytes=1000, total_bytes=1500, caller_files=3) as (front, _),
        client_of(front.port, "mine") as mine,
        client_of(front.port, "another") as other,
    ):
        first = send_file(mine, b"x" * 600)
        with pytest.raises(openai.BadRequestError, match="1000 bytes") as refused:
            send_file(mine, b"x" * 401)
        assert refused.value.code == "quota_exceeded"
        send_file(other, b"x" * 900)
        with pytest.raises(openai.BadRequestError, match="all files"):
            send_file(mine, b"x")
        assert len(left(tmp_path)) == 4
        mine.files.delete(first)
        for _ in range(3):
            send_file(mine, b"x")
        with pytest.raises(openai.BadRequestError, match="3 files"):
            send_file(mine, b"x")
        assert len(list(mine.files.list())) == 3


def test_results_that_outgrow_the_room_end_their_batch_and_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "LOOK_S", 0.01)
    content = chat_lines(100)
    with (
        front_of(tmp_path, caller_bytes=len(content) + 50, in_flight=1, free_running=False) as (
            front,
            generator,
        ),
        client_of(front.port) as client,
    ):
        begun = begin(client, content)
        generator.wait_for(lambda g: g.live_ids)
        generator.step(3)
        ended = wait_for(client, begun.id)
        assert (ended.status, ended.errors.data[0].code) == ("failed", "quota_exceeded")
        assert "--batch-quota" in ended.errors.data[0].message
        assert ended.request_counts.completed == 1
        assert len(results(client, ended.output_file_id)) == 1
        with pytest.raises(openai.BadRequestError, match="quota"):
            send_file(client, b"x")


def test_the_oldest_batch_that_has_ended_makes_room_for_a_new_one(tmp_path):
    with (
        front_of(tmp_path, caller_files=8, free_running=False, in_flight=1) as (front, generator),
        client_of(front.port) as client,
    ):
        generator.run_freely()
        file = send_file(client, chat_lines(1))
        asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        made = []
        for _ in range(9):
            made.append(client.batches.create(**asked).id)
            client.files.delete(wait_for(client, made[-1]).output_file_id)
        assert [batch.id for batch in client.batches.list()] == made[:0:-1]


def test_a_client_that_leaves_or_sends_too_much_leaves_nothing(served, monkeypatch):
    front, folder, client = served
    before = left(folder)
    with socket.create_connection(("127.0.0.1", front.port), PATIENCE_S) as sent:
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        head = f"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
        sent.sendall(
            head.encode() + b"Content-Length: 100000\r\n\r\n" + PURPOSE + part("file", b"x" * 9000, "a")
        )
        until(lambda: not front.http_desk.idle_s())
    until(front.http_desk.idle_s)
    assert left(folder) == before
    monkeypatch.setattr(uploads, "MAX_FILE_BYTES", 1000)
    with pytest.raises(openai.APIStatusError) as refused:
        send_file(client, b"x" * 1001)
    assert (refused.value.status_code, refused.value.code) == (413, "file_too_large")
    assert left(folder) == before


def test_a_body_that_says_it_is_too_large_is_not_waited_for(served):
    front, _, _ = served
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/v1/files")
        connection.putheader("Content-Type", f"multipart/form-data; boundary={BOUNDARY}")
        connection.putheader("Content-Length", str(2**40))
        connection.endheaders()
        assert connection.getresponse().status == 413


def test_two_workers_cannot_keep_files_in_one_folder(tmp_path):
    with front_of(tmp_path) as (front, _):
        config = HttpConfig("127.0.0.1", 0, settings=HttpSettings(batches=BatchSettings(tmp_path)))

        async def bind():
            second = HttpFront(config, lambda: None, lambda: (b"", ""))
            try:
                await second.bind()
            finally:
                await second.close()

        with pytest.raises(UsageError, match="another worker keeps files"):
            front.on_loop(bind())
        with client_of(front.port) as client:
            send_file(client, chat_lines(1))
