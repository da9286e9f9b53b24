"""``llorch batch``: each line of a file once, whatever becomes of the process, the disk and the worker."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from llorch_serve.requests import ModelInfo
from llorch_serve.rpc.server import ServerConfig
from support.fakes.generator import FakeGenerator
from support.harness.broken_off import broken_off
from support.harness.processes import WorkerProcess, llorch_here, running, serving
from support.harness.rpc import RunningServer

LINES, SOME = 500, 120
WORDS = ("time", "water", "light", "house", "garden", "river", "stone", "music", "paper", "window")


def chat(custom_id: str, text: str, **more: object) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(custom_id: str, text: str, **more: object) -> dict[str, Any]:
    body = {"prompt": text, "max_tokens": 3, **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """500 lines: half of them sampled, a quarter with a beginning that others have too."""
    draw = random.Random(4)
    shared = " ".join(draw.choices(WORDS, k=12))
    lines = []
    for number in range(LINES):
        text = f"{shared if number % 4 == 0 else ''} {' '.join(draw.choices(WORDS, k=draw.randint(1, 8)))}"
        more = {"max_tokens": draw.randint(1, 6)} | ({"temperature": 1.0} if number % 2 else {})
        lines.append(completion(f"q-{number}", text, **more))
    return write(tmp_path_factory.mktemp("batch") / "in.jsonl", lines)


@pytest.fixture(scope="module")
def some(many: Path) -> Path:
    """The first lines of them."""
    path = many.with_name("some.jsonl")
    path.write_text("".join(many.read_text().splitlines(keepends=True)[:SOME]))
    return path


@pytest.fixture(scope="module")
def whole(tiny: Path, many: Path) -> bytes:
    """What a run that nothing interrupts writes in the input's order."""
    output = many.with_name("whole.jsonl")
    summary = llorch_here("batch", many, output, tiny, "--ordered", "--json").document()
    assert (summary["answered"], summary["failed"]) == (LINES, 0)
    return output.read_bytes()


def ids(path: Path) -> list[str]:
    return [one["custom_id"] for one in read(path)]


# Exactly once.


def test_a_run_that_is_killed_twice_writes_the_bytes_of_one_that_never_was(tiny, many, whole, tmp_path):
    output = tmp_path / "out.jsonl"
    command = ("batch", many, output, tiny, "--ordered")
    assert broken_off("killed", 50_000, output, *command).code == -signal.SIGKILL
    first = output.read_bytes()
    assert not first.endswith(b"\n")  # killed while it wrote
    assert broken_off("killed", 120_000, output, *command).code == -signal.SIGKILL
    second = output.read_bytes()
    assert len(second) > len(first)
    outcome = llorch_here(*command, "--json")
    summary = outcome.document()
    assert summary["answered_before"] == second.count(b"\n") > first.count(b"\n") > 0
    assert summary["answered"] == LINES
    assert output.read_bytes() == whole
    assert len(set(ids(output))) == LINES
    assert llorch_here(*command).code == 0  # there is nothing left to do
    assert output.read_bytes() == whole


@pytest.fixture(scope="module")
def exact_worker(tiny: Path) -> Iterator[WorkerProcess]:
    """A worker whose answers are the same bits whatever it was asked before."""
    with serving(tiny, "--strict-reuse", "--kv-dtype", "float32") as worker:
        yield worker


def test_a_worker_answers_as_a_model_here_does(exact_worker: WorkerProcess, some, whole, tmp_path):
    output, unbroken = tmp_path / "out.jsonl", tmp_path / "unbroken.jsonl"
    there = ("--connect", exact_worker.address, "--ordered")
    assert broken_off("killed", 20_000, output, "batch", some, output, *there).code == -signal.SIGKILL
    outcome = llorch_here("batch", some, output, *there)
    assert outcome.code == 0
    assert "--strict-reuse" in outcome.stderr.splitlines()[0]  # how it was started cannot be seen from here
    assert llorch_here("batch", some, unbroken, *there).code == 0
    assert output.read_bytes() == unbroken.read_bytes()
    # Ids are other ones, as nothing is known of the worker's settings.
    assert choices(output.read_bytes()) == choices(whole)[:SOME]


def choices(answers: bytes) -> list[Any]:
    return [json.loads(line)["response"]["body"]["choices"] for line in answers.splitlines()]


def test_a_full_disk_leaves_whole_lines_and_says_how_to_go_on(tiny, some, tmp_path):
    output = tmp_path / "out.jsonl"
    command = ("batch", some, output, tiny, "--order", "longest")
    full = broken_off("full", 30_000, output, *command)  # in which the plan has room
    assert full.code == 6
    assert "run the same command again" in full.stderr.splitlines()[-1]
    assert "Traceback" not in full.stderr
    kept = output.read_bytes()
    assert kept.endswith(b"\n")
    assert kept.count(b"\n") < SOME
    assert llorch_here(*command).code == 0
    assert output.read_bytes().startswith(kept)
    assert sorted(ids(output)) == sorted(f"q-{number}" for number in range(SOME))


@contextlib.contextmanager
def served(generator: FakeGenerator, port: int = 0) -> Iterator[RunningServer]:
    """Serve a fake on a port."""
    server = RunningServer(ServerConfig(port=port, stream_interval=1))
    try:
        server.call(server.server.set_ready(generator))
        yield server
    finally:
        generator.close()
        if not server.loop.is_closed():
            server.close()


def some_answered(generator: FakeGenerator) -> None:
    """Let the first lines be answered, and wait until others have begun."""
    generator.wait_for(lambda it: len(it.live_ids) >= 8)
    generator.step(3)
    generator.wait_for(lambda it: len(it.submitted) > 12)


class Other(FakeGenerator):
    """A fake of another model."""

    def model_info(self) -> ModelInfo:
        return replace(super().model_info(), fingerprint="e" * 64)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    return write(tmp_path / "few.jsonl", [chat(f"q-{number}", "Hi") for number in range(40)])


def test_a_worker_that_is_restarted_is_waited_for(few, tmp_path):
    output = tmp_path / "out.jsonl"
    stuck = FakeGenerator(free_running=False)
    with served(stuck) as first:
        port = int(first.address.rpartition(":")[2])
        with running("batch", few, output, "--connect", first.address) as command:
            some_answered(stuck)
            first.close()
            command.wait_for_line(r"^note: .*127\.0\.0\.1")
            with served(FakeGenerator(), port):
                assert command.wait() == 0
            assert any("answers again" in line for line in command.log)
    assert sorted(ids(output)) == sorted(f"q-{number}" for number in range(40))


def test_a_worker_that_comes_back_with_another_model_ends_the_run(few, tmp_path):
    output = tmp_path / "out.jsonl"
    stuck = FakeGenerator(free_running=False)
    with served(stuck) as first:
        port = int(first.address.rpartition(":")[2])
        with running("batch", few, output, "--connect", first.address) as command:
            some_answered(stuck)
            first.close()
            with served(Other(), port) as other:
                assert command.wait() == 2
                done = len(ids(output))
                assert f"{done} of 40 lines" in command.log[-2]
                assert "fingerprint" in command.log[-1]
                again = llorch_here("batch", few, output, "--connect", other.address)
    assert again.code == 2
    assert "another model (fingerprint ffffffffffff, now eeeeeeeeeeee)" in again.error()
    assert len(ids(output)) == done


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_is_done(few, tmp_path, number):
    output = tmp_path / "out.jsonl"
    stuck = FakeGenerator(free_running=False)
    with served(stuck) as worker:
        with running("batch", few, output, "--connect", worker.address) as command:
            some_answered(stuck)
            command.process.send_signal(number)
            assert command.wait() == 130
        stuck.wait_for(lambda it: not it.live_ids)
        done = len(ids(output))
        assert command.log[-2:] == [
            f"note: done so far: {done} of 40 lines; run the same command again to go on",
            "interrupted",
        ]
        assert 0 < done < 40
        stuck.run_freely()
        assert llorch_here("batch", few, output, "--connect", worker.address).code == 0
    assert sorted(ids(output)) == sorted(f"q-{number}" for number in range(40))


def test_nobody_comes_within_patience(few, tmp_path):
    output = tmp_path / "out.jsonl"
    stuck = FakeGenerator(free_running=False)
    with (
        served(stuck) as worker,
        running("batch", few, output, "--connect", worker.address, "--patience", "0.5", "--json") as command,
    ):
        stuck.wait_for(lambda it: len(it.submitted) > 2)
        worker.close()
        assert command.wait() == 7
    assert "no line was answered for 0.5 s" in command.log[-1]


# What lines may be, and what becomes of those that are not.


def test_lines_of_every_kind_and_those_that_fail(tiny, tmp_path):
    responses = {"custom_id": "r", "url": "/v1/responses", "body": {"input": "Hi", "max_output_tokens": 2}}
    source = write(
        tmp_path / "in.jsonl",
        [
            chat("a", "Hi", n=2),
            completion("b", "Once"),
            responses,
            {"prompt": "Once upon"},
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "custom_id": "own"},
            completion("stream", "Once", stream=True),
            completion("hot", "Once", temperature=9),
            {"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "Hi"}},
        ],
    )
    output, errors = tmp_path / "out.jsonl", tmp_path / "out.jsonl.errors.jsonl"
    command = ("batch", source, output, tiny, "--max-tokens", "2", "--ordered")
    outcome = llorch_here(*command, "--json")
    assert outcome.code == 1
    assert "3 of 8 lines failed" in outcome.stderr
    assert str(errors) in outcome.stderr
    summary = json.loads(outcome.stdout)
    assert (summary["answered"], summary["failed"], summary["errors"]) == (5, 3, str(errors))
    found = {one["custom_id"]: one for one in read(output)}
    assert list(found) == ["a", "b", "r", "line-4", "own"]
    tokens = {name: one["response"]["body"]["usage"].get("completion_tokens") for name, one in found.items()}
    assert tokens == {"a": 6, "b": 3, "r": None, "line-4": 2, "own": 1}
    assert summary["completion_tokens"] == 6 + 3 + 2 + 2 + 1
    failed = {one["custom_id"]: one for one in read(errors)}
    assert "stream" in failed["stream"]["error"]["message"]
    assert failed["hot"]["response"]["status_code"] == 400
    assert failed["e"]["response"]["status_code"] == 422
    kept = output.read_bytes()
    again = llorch_here(*command, "--retry-failed")
    assert again.code == 1
    assert output.read_bytes() == kept
    assert {one["custom_id"] for one in read(errors)} == {"stream", "hot", "e"}


def test_a_model_that_embeds_gives_vectors(tiny_source, export_here, tmp_path):
    folder = export_here(tiny_source, tmp_path / "embeds", "--embed", "mean")
    lines = [
        {"custom_id": f"e-{number}", "url": "/v1/embeddings", "body": {"input": ["Hi", "time " * number]}}
        for number in range(1, 9)
    ]
    output = tmp_path / "out.jsonl"
    outcome = llorch_here("batch", write(tmp_path / "in.jsonl", lines), output, folder)
    assert outcome.code == 0
    vectors = [one["response"]["body"]["data"][1]["embedding"] for one in read(output)]
    assert [len(vector) for vector in vectors] == [64] * 8


def test_beginnings_that_lines_share_are_computed_once_where_the_order_is_theirs(tiny, tmp_path):
    draw = random.Random(2)
    prompts = [" ".join(draw.choices(WORDS, k=14)) for _ in range(10)]
    lines = [
        completion(f"{number}-{place}", f"{prompt} {WORDS[number]}", max_tokens=1)
        for number in range(5)
        for place, prompt in enumerate(prompts)
    ]
    source = write(tmp_path / "in.jsonl", lines)
    cached = {}
    for order in ("given", "prefix"):
        flags = ("--order", order, "--concurrency", "2", "--json")
        cached[order] = llorch_here("batch", source, tmp_path / order, tiny, *flags).document()
    assert cached["given"]["prompt_tokens"] == cached["prefix"]["prompt_tokens"]
    assert cached["prefix"]["cached_tokens"] > 0.6 * cached["prefix"]["prompt_tokens"]
    assert cached["given"]["cached_tokens"] < 0.2 * cached["given"]["prompt_tokens"]
    answers = [
        {one["custom_id"]: one["response"]["body"]["usage"] for one in read(tmp_path / order)}
        for order in cached
    ]
    assert answers[0] == answers[1]


def test_tables_in_and_out(tiny, tmp_path):
    columns = {"custom_id": ["a", "b", "c"], "prompt": ["Once", "Twice", "x" * 500], "shelf": [1, 2, 3]}
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    parquet.write_table(pyarrow.table(columns), source)
    outcome = llorch_here("batch", source, output, tiny, "--max-tokens", "2", "--ordered", "--json")
    assert outcome.code == 1
    assert outcome.stderr.startswith("note: columns that no line is made of: shelf\n")
    rows = parquet.read_table(output).to_pylist()
    assert [(row["custom_id"], row["status_code"]) for row in rows] == [("a", 200), ("b", 200), ("c", 400)]
    assert (
        rows[0]["text"] == read(tmp_path / "out.parquet.jsonl")[0]["response"]["body"]["choices"][0]["text"]
    )
    assert json.loads(outcome.stdout)["output"] == str(output)


# Refusals.


def test_check_reads_all_and_runs_nothing(tmp_path):
    source = write(tmp_path / "in.jsonl", [chat("a", "Hi"), {"prompt": "x"}])
    outcome = llorch_here("batch", source, tmp_path / "out.jsonl", "--check", "--json")
    assert outcome.document() | {"tokens": 0} == {"lines": 2, "bad": 0, "bare": 1, "tokens": 0}
    write(source, [chat("a", "Hi"), {"custom_id": "b", "url": "/cancel", "body": {}}])
    bad = llorch_here("batch", source, tmp_path / "out.jsonl", "--check")
    assert bad.code == 1
    assert bad.stderr.splitlines()[1].startswith("line 2 has the url '/cancel'")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([chat("a", "x"), chat("a", "y")], "line 2 has the custom_id of line 1"),
        ([{"url": "/v1/completions", "body": {}}], "line 1 has no custom_id"),
        ([], "no lines"),
    ],
)
def test_an_input_whose_lines_cannot_be_told_apart_is_refused(tiny, tmp_path, lines, found):
    source = write(tmp_path / "in.jsonl", lines)
    outcome = llorch_here("batch", source, tmp_path / "out.jsonl", tiny)
    assert outcome.code == 2
    assert found in outcome.error()
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((), "no model given"),
        (("--connect", "127.0.0.1:1", "--kv-dtype", "int8"), "--kv-dtype has no effect on the worker"),
        (("--connect", "127.0.0.1:1", "--served-model-name", "a"), "--served-model-name has no effect"),
        (("--wait", "3", "dir"), "--wait has no effect without --connect"),
        (("--logit-bias", "x", "dir"), "--logit-bias is 'x'"),
    ],
)
def test_flags_that_mean_nothing_are_refused(tmp_path, flags, found):
    source = write(tmp_path / "in.jsonl", [chat("a", "Hi")])
    outcome = llorch_here("batch", source, tmp_path / "out.jsonl", *flags)
    assert outcome.code == 2
    assert found in outcome.error()


def test_settings_of_bare_lines_are_told_where_there_are_none(tiny, tmp_path):
    source = write(tmp_path / "in.jsonl", [chat("a", "Hi")])
    outcome = llorch_here("batch", source, tmp_path / "out.jsonl", tiny, "--temperature", "1")
    assert outcome.code == 0
    assert outcome.stderr.startswith("note: --temperature has no effect")


def test_other_settings_do_not_go_on_with_an_output(tiny, tmp_path):
    source = write(tmp_path / "in.jsonl", [{"prompt": "Once"}])
    output = tmp_path / "out.jsonl"
    assert llorch_here("batch", source, output, tiny, "--max-tokens", "2").code == 0
    for flags, told in (
        (("--max-tokens", "3"), "max_tokens 2, now 3"),
        (("--max-tokens", "2", "--ordered"), "answers as they were done (now answers in the input's order)"),
        (("--max-tokens", "2", "--no-prefix-cache"), "prefix_cache"),
    ):
        outcome = llorch_here("batch", source, output, tiny, *flags)
        assert outcome.code == 2
        assert told in outcome.error()


def test_a_place_that_cannot_be_written_is_named(tiny, tmp_path):
    source = write(tmp_path / "in.jsonl", [chat("a", "Hi")])
    for output, found in (
        (tmp_path / "none" / "out.jsonl", "is no folder"),
        (Path("/proc/out.jsonl"), "/proc"),
    ):
        outcome = llorch_here("batch", source, output, tiny)
        assert outcome.code == 2
        assert found in outcome.error()


def test_a_library_that_is_missing_is_named_with_its_pip_line(tmp_path, monkeypatch):
    for name in [each for each in sys.modules if each.startswith(("llorch_serve.http", "starlette"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "llorch_serve.terminal.batch_job", raising=False)
    monkeypatch.setitem(sys.modules, "starlette", None)
    source = write(tmp_path / "in.jsonl", [chat("a", "Hi")])
    outcome = llorch_here("batch", source, tmp_path / "out.jsonl", "dir")
    assert outcome.code == 4
    assert "pip install 'llorch[http]'" in outcome.error()
