"""/v1/files and /v1/batches through OpenAI's own client, over a real socket, around a fake generator."""

from __future__ import annotations

import json

import openai
import pytest

from llorch_serve.http.unknown_fields import UnknownFields
from support.fakes.generator import INFO
from support.harness.batches import (
    begin,
    chat_lines,
    client_of,
    drain,
    front_of,
    results,
    send_file,
    wait_for,
)
from support.harness.http import fake_front, send

pytestmark = pytest.mark.usefixtures("way_at_leisure")


@pytest.fixture
def served(tmp_path):
    """A front, its generator, and OpenAI's client of it."""
    with front_of(tmp_path / "kept") as (front, generator), client_of(front.port) as client:
        yield front, generator, client


def test_a_file_of_chats_is_answered_whole(served):
    _, _, client = served
    file = client.files.create(file=("asked.jsonl", chat_lines(5)), purpose="batch")
    assert (file.object, file.filename, file.purpose, file.bytes) == (
        "file",
        "asked.jsonl",
        "batch",
        len(chat_lines(5)),
    )
    begun = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"nightly": "yes"},
    )
    assert (begun.object, begun.status, begun.input_file_id) == ("batch", "validating", file.id)
    assert begun.expires_at == begun.created_at + 24 * 3600
    ended = wait_for(client, begun.id)
    assert (ended.status, ended.errors, ended.error_file_id) == ("completed", None, None)
    assert ended.metadata == {"nightly": "yes"}
    assert ended.model == INFO.model_id
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 5, 0)
    assert ended.created_at <= ended.in_progress_at <= ended.finalizing_at <= ended.completed_at
    assert (ended.failed_at, ended.expired_at, ended.cancelled_at, ended.cancelling_at) == (None,) * 4
    answered = results(client, ended.output_file_id)
    assert sorted(answered) == ["a0", "a1", "a2", "a3", "a4"]
    one = answered["a3"]
    assert (one["error"], one["response"]["status_code"]) == (None, 200)
    assert one["response"]["body"]["choices"][0]["message"]["content"] == "w0 w1 w2 "
    assert ended.usage.output_tokens == 15
    assert ended.usage.total_tokens == ended.usage.input_tokens + 15
    result = client.files.retrieve(ended.output_file_id)
    assert (result.purpose, result.filename) == ("batch_output", f"{ended.id}_output.jsonl")


def test_texts_and_items_are_answered_too(served):
    _, _, client = served
    for url, body in (
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ):
        line = {"custom_id": "one", "method": "POST", "url": url, "body": body}
        ended = wait_for(client, begin(client, json.dumps(line).encode(), endpoint=url).id)
        assert (ended.status, ended.request_counts.completed) == ("completed", 1)
        assert results(client, ended.output_file_id)["one"]["response"]["status_code"] == 200
        assert ended.usage.output_tokens == 2


def test_lines_that_fail_are_in_a_file_of_their_own(served):
    _, _, client = served
    bad = chat_lines(1, temprature=1).replace(b'"a0"', b'"bad"')
    elsewhere = chat_lines(1, url="/v1/completions").replace(b'"a0"', b'"elsewhere"')
    ended = wait_for(client, begin(client, chat_lines(2) + bad + elsewhere).id)
    counts = ended.request_counts
    assert (ended.status, counts.total, counts.completed, counts.failed) == ("completed", 4, 2, 2)
    assert sorted(results(client, ended.output_file_id)) == ["a0", "a1"]
    failed = results(client, ended.error_file_id)
    assert sorted(failed) == ["bad", "elsewhere"]
    assert failed["bad"]["response"]["status_code"] == 400
    assert "temprature" in failed["bad"]["response"]["body"]["error"]["message"]
    assert "/v1/completions" in failed["elsewhere"]["error"]["message"]


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"{]\n" + chat_lines(1), 1, "JSON"),
        (chat_lines(1) + b"\n" + chat_lines(1), 3, "custom_id of line 1"),
        (chat_lines(1, url="/v1/completions"), 1, "/v1/completions"),
        (b"\n\n", None, "no lines"),
        ("{}".encode("utf-16"), None, "UTF-16"),
    ],
    ids=["no JSON", "ids twice", "other endpoint", "blank", "UTF-16"],
)
def test_a_file_that_cannot_be_read_fails_the_batch_and_says_where(served, content, line, words):
    _, generator, client = served
    ended = wait_for(client, begin(client, content).id)
    assert (ended.status, ended.output_file_id, ended.error_file_id) == ("failed", None, None)
    assert ended.failed_at >= ended.created_at
    fault = ended.errors.data[0]
    assert fault.line == line
    assert words in fault.message
    assert "/files/" not in fault.message
    assert generator.submitted == []


def test_a_batch_is_asked_for_by_what_exists(served):
    _, _, client = served
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(input_file_id="file-none", endpoint="/v1/nothing", completion_window="soon")
    told = {item["field"] for item in refused.value.body["errors"]}
    assert told == {"endpoint", "completion_window"}
    with pytest.raises(openai.BadRequestError, match="no file 'file-none'") as refused:
        client.batches.create(input_file_id="file-none", endpoint="/v1/completions", completion_window="24h")
    assert refused.value.param == "input_file_id"
    done = wait_for(client, begin(client, chat_lines(1)).id)
    with pytest.raises(openai.BadRequestError, match="batch_output"):
        client.batches.create(
            input_file_id=done.output_file_id, endpoint="/v1/completions", completion_window="24h"
        )
    for metadata in ({"k" * 65: "v"}, {"k": "v" * 513}, {str(n): "v" for n in range(17)}):
        with pytest.raises(openai.BadRequestError) as refused:
            begin(client, chat_lines(1), metadata=metadata)
        assert refused.value.param == "metadata"
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")
    with pytest.raises(openai.NotFoundError):
        client.batches.cancel("batch_none")


def test_fields_that_are_not_known_are_refused_or_told(tmp_path, served):
    front, _, client = served
    file = send_file(client, chat_lines(1))
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h", "zz": 1}
    refused = send(front.port, "POST", "/v1/batches", body)
    assert (refused.status, refused.document["error"]["param"]) == (400, "zz")
    assert send(front.port, "GET", "/v1/files?zz=1").document["error"]["param"] == "zz"
    assert send(front.port, "GET", "/v1/batches?order=asc").document["error"]["param"] == "order"
    with (
        front_of(tmp_path / "lenient", unknown=UnknownFields.IGNORE) as (lenient, _),
        client_of(lenient.port) as client,
    ):
        body["input_file_id"] = send_file(client, chat_lines(1))
        taken = send(lenient.port, "POST", "/v1/batches", body)
        assert (taken.status, taken.document["llorch"]) == (200, {"ignored": ["zz"]})
        file = client.files.create(file=("a", chat_lines(1)), purpose="batch", extra_body={"zz": "1"})
        assert file.model_extra["llorch"] == {"ignored": ["zz"]}


def test_a_batch_that_is_cancelled_keeps_what_it_has(tmp_path):
    with (
        front_of(tmp_path, in_flight=2, free_running=False) as (front, generator),
        client_of(front.port) as client,
    ):
        begun = begin(client, chat_lines(20))
        generator.wait_for(lambda g: len(g.live_ids) == 2)
        generator.step(3)
        generator.wait_for(lambda g: len(g.submitted) == 4)
        assert wait_for(client, begun.id, {"in_progress"}).request_counts.total == 20
        cancelling = client.batches.cancel(begun.id)
        assert cancelling.status in ("cancelling", "cancelled")
        ended = wait_for(client, begun.id)
        assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == (
            "cancelled",
            2,
            0,
        )
        assert ended.cancelling_at <= ended.cancelled_at
        assert sorted(results(client, ended.output_file_id)) == ["a0", "a1"]
        generator.wait_for(lambda g: not g.live_ids)
        assert client.batches.cancel(begun.id).status == "cancelled"
        generator.run_freely()
        done = wait_for(client, begin(client, chat_lines(1)).id)
        with pytest.raises(openai.BadRequestError, match="is completed"):
            client.batches.cancel(done.id)


def test_no_more_lines_run_at_once_than_may_and_others_are_answered_beside(tmp_path):
    with (
        front_of(tmp_path, in_flight=2, free_running=False) as (front, generator),
        client_of(front.port) as client,
    ):
        first = begin(client, chat_lines(4) + chat_lines(1, n=9).replace(b"a0", b"nine"))
        generator.wait_for(lambda g: len(g.live_ids) == 2)
        with client_of(front.port) as person:
            stream = person.completions.create(model=INFO.model_id, prompt="Hi", max_tokens=2, stream=True)
            generator.wait_for(lambda g: len(g.live_ids) == 3)
            generator.step(2)
            assert "".join(chunk.choices[0].text for chunk in stream) == "w0 w1 "
        clients = {request.client_id for request in generator.submitted}
        assert len(clients) == 2  # the queue has them take turns
        generator.run_freely()
        assert wait_for(client, first.id).request_counts.completed == 5


def test_a_batch_goes_on_after_a_restart_with_what_is_left(tmp_path):
    with (
        front_of(tmp_path, in_flight=2, free_running=False) as (front, generator),
        client_of(front.port) as client,
    ):
        begun = begin(client, chat_lines(9), metadata={"k": "v"})
        generator.wait_for(lambda g: len(g.live_ids) == 2)
        generator.step(3)
        generator.wait_for(lambda g: len(g.submitted) == 4)
        waiting = begin(client, chat_lines(2))
        wait_for(client, waiting.id, {"in_progress"})
        drain(front)
        assert not generator.live_ids
    with front_of(tmp_path) as (front, again), client_of(front.port) as client:
        ended = wait_for(client, begun.id)
        assert (ended.status, ended.metadata) == ("completed", {"k": "v"})
        assert ended.request_counts.completed == 9
        assert sorted(results(client, ended.output_file_id)) == [f"a{n}" for n in range(9)]
        assert wait_for(client, waiting.id).request_counts.completed == 2
        assert len(again.submitted) == 7 + 2
        assert [batch.id for batch in client.batches.list()] == [waiting.id, begun.id]


def test_what_a_batch_has_not_answered_in_time_expires(tmp_path):
    with (
        front_of(tmp_path, in_flight=1, free_running=False) as (front, generator),
        client_of(front.port) as client,
    ):
        begun = begin(client, chat_lines(3), completion_window="1h")
        generator.wait_for(lambda g: len(g.live_ids) == 1)
        generator.step(3)
        generator.wait_for(lambda g: len(g.submitted) == 2)
        drain(front)
    record = tmp_path / "batches" / f"{begun.id}.json"
    written = json.loads(record.read_text())
    record.write_text(json.dumps(written | {"created_at": written["created_at"] - 3600}))
    with front_of(tmp_path) as (front, again), client_of(front.port) as client:
        ended = wait_for(client, begun.id)
        assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == (
            "expired",
            1,
            2,
        )
        assert ended.expired_at >= ended.expires_at
        assert sorted(results(client, ended.output_file_id)) == ["a0"]
        failed = results(client, ended.error_file_id)
        assert sorted(failed) == ["a1", "a2"]
        assert failed["a1"]["error"]["code"] == "batch_expired"
        assert again.submitted == []


def test_nobody_sees_what_belongs_to_another(tmp_path):
    with (
        front_of(tmp_path, token="mine") as (front, _),
        client_of(front.port, "mine") as mine,
        client_of(front.port, "another") as other,
        client_of(front.port, "wrong") as stranger,
    ):
        with pytest.raises(openai.AuthenticationError):
            stranger.files.list()
        with pytest.raises(openai.AuthenticationError):
            send_file(stranger, chat_lines(1))
        ended = wait_for(mine, begin(mine, chat_lines(1)).id)
        ids = (ended.input_file_id, ended.output_file_id)
        assert [file.id for file in other.files.list()] == []
        assert [batch.id for batch in other.batches.list()] == []
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            for name in ids:
                with pytest.raises(openai.NotFoundError):
                    call(name)
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(ended.id)
        with pytest.raises(openai.BadRequestError, match="no file"):
            other.batches.create(
                input_file_id=ended.input_file_id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            )
        with pytest.raises(openai.NotFoundError):
            other.files.list(after=ended.input_file_id)
        assert {file.id for file in mine.files.list()} == set(ids)


def test_batches_are_listed_by_pages_the_newest_first(served):
    _, _, client = served
    made = [begin(client, chat_lines(1)).id for _ in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
    page = client.batches.list(limit=2, after=made[3])
    assert ([batch.id for batch in page.data], page.has_more) == ([made[2], made[1]], True)
    assert (page.model_extra["first_id"], page.model_extra["last_id"]) == (made[2], made[1])
    assert client.batches.list(after=made[1]).has_more is False
    with pytest.raises(openai.BadRequestError, match="1 to 100"):
        client.batches.list(limit=101)


def test_a_worker_that_keeps_none_says_how_it_would():
    with fake_front() as (front, _), client_of(front.port) as client:
        for call in (client.files.list, client.batches.list, lambda: send_file(client, b"{}")):
            with pytest.raises(openai.NotFoundError, match="--batch-folder"):
                call()
