"""``llorch bench`` on a tiny model: the document's shape, here and against a worker. Its speed is not looked at."""

from __future__ import annotations

import json

import pytest

from processes import llorch, llorch_here

QUICK = ("--prompt-tokens", "20", "--max-tokens", "64", "--repeat", "1", "--streams", "1,2", "--json")
KEYS = ["schema_version", "recipe", "provider", "load_s", "peak_rss_mib", "results", "fidelity"]


def check(document):
    assert list(document) == KEYS
    assert document["schema_version"] == 1
    assert (document["recipe"]["precision"], document["provider"]) == ("int8", "CPUExecutionProvider")
    assert [row["streams"] for row in document["results"]] == [1, 2]
    for row in document["results"]:
        assert list(row) == ["streams", "prefill_tokens_per_s", "decode_tokens_per_s", "ttft_ms", "itl_ms"]
        assert list(row["ttft_ms"]) == list(row["itl_ms"]) == ["p50", "p99"]
        assert row["prefill_tokens_per_s"] > 0
        # Of two streams this short, one may end before the other has begun; nothing is then left to count.
        assert row["decode_tokens_per_s"] > 0 or row["streams"] > 1
        assert row["ttft_ms"]["p99"] >= row["ttft_ms"]["p50"] > 0


def test_json_is_one_document_on_stdout(tiny):
    outcome = llorch("bench", tiny, *QUICK)
    document = outcome.document()
    check(document)
    assert outcome.stderr == ""
    assert document["load_s"] > 0
    assert document["peak_rss_mib"] > 10


def test_a_worker_can_be_measured(tiny_worker):
    document = llorch_here("bench", "--connect", tiny_worker.address, *QUICK).document()
    check(document)
    assert document["load_s"] is None
    assert document["peak_rss_mib"] is None


def test_more_streams_than_slots_is_said(tiny_worker):
    flags = ("--prompt-tokens", "5", "--max-tokens", "2", "--repeat", "1", "--streams", "9")
    outcome = llorch_here("bench", "--connect", tiny_worker.address, *flags)
    assert outcome.code == 0
    assert "8 slots" in outcome.stderr


def test_a_table_for_people(tiny):
    outcome = llorch_here("bench", tiny, *QUICK[:-1])
    assert [line.split()[0] for line in outcome.stdout.splitlines()[1:]] == ["streams", "1", "2"]


@pytest.mark.parametrize("remote", [False, True])
def test_prompt_ids_are_read_from_a_file(tiny, tiny_worker, tmp_path, remote):
    path = tmp_path / "ids.json"
    where = ("--connect", tiny_worker.address) if remote else (tiny,)
    flags = ("--max-tokens", "4", "--repeat", "1", "--streams", "1", "--prompt-ids", path, "--json")
    path.write_text(json.dumps([5, 6, 7]))
    assert len(llorch_here("bench", *where, *flags).document()["results"]) == 1
    path.write_text(json.dumps([5] * 125))
    outcome = llorch_here("bench", *where, *flags)
    assert outcome.code == 2
    assert "125 prompt tokens" in outcome.error()
    path.write_text(json.dumps([5, 512]))
    outcome = llorch_here("bench", *where, *flags)
    assert outcome.code == 2
    assert "512" in outcome.error()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--streams", "1,x"), "--streams"),
        (("--streams", "0"), "--streams"),
        (("--prompt-tokens", "0"), "--prompt-tokens"),
        (("--prompt-tokens", "4", "--prompt-ids", "ids.json"), "--prompt-ids"),
        (("--prompt-ids", "/no/such/file"), "/no/such/file"),
        (("--wait", "1"), "--wait"),
        (("--prompt-tokens", "120", "--max-tokens", "9"), "128"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(tiny, flags, named):
    outcome = llorch_here("bench", tiny, *flags)
    assert outcome.code == 2
    assert named in outcome.error()


@pytest.mark.parametrize("flag", [("DIR",), ("--model", "m"), ("--max-context", "64"), ("--threads", "1")])
def test_flags_that_a_worker_cannot_follow_are_refused(flag):
    outcome = llorch_here("bench", "--connect", "127.0.0.1:1", *flag)
    assert outcome.code == 2
    assert flag[0] in outcome.error()


def test_model_path_is_honoured(tiny):
    check(llorch_here("bench", *QUICK, MODEL_PATH=tiny).document())
