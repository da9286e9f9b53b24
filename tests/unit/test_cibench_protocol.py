"""What ``ci/bench`` and the processes of other engines say to each other, and how they are started."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from bench_peers import processes
from bench_peers.processes import first_output, run_process
from bench_peers.protocol import (
    Arrivals,
    Engine,
    Measurement,
    ProtocolError,
    Task,
    encode,
    measure,
    parse_measurements,
    parse_task,
    speeds,
)
from llorch_serve.bench.measure import StreamRecord, figures
from llorch_serve.errors import ResourceError

TASK = Task(model="m.gguf", threads=2, prompts=((1, 2), (3, 2)), new_tokens=3, streams=(1, 2), repeat=2)
FOUND = Measurement("e", "1.0", "int4", 8, 512, 128, 900.5, 80.25, 300.0)


def test_tasks_and_measurements_survive_the_pipe():
    assert parse_task(encode(TASK)) == TASK
    lines = encode(FOUND) + "\n\n" + encode(replace(FOUND, streams=1, peak_mib=None)) + "\n"
    assert parse_measurements(lines) == [FOUND, replace(FOUND, streams=1, peak_mib=None)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "no measurement"),
        ("Loading model...", "not a JSON object"),
        ("[1]", "not a JSON object"),
        (json.dumps(asdict(FOUND) | {"streams": 0}), "streams is 0"),
        (json.dumps(asdict(FOUND) | {"new_tokens": "128"}), "new_tokens is '128'"),
        (json.dumps(asdict(FOUND) | {"decode_tokens_per_s": 0}), "expected a speed"),
        (json.dumps(asdict(FOUND) | {"prefill_tokens_per_s": float("nan")}), "expected a speed"),
        (json.dumps(asdict(FOUND) | {"extra": 1}), "other fields than expected: extra"),
        (json.dumps({"engine": "e"}), "other fields than expected: decode_tokens_per_s"),
    ],
)
def test_other_lines_are_refused(line, words):
    with pytest.raises(ProtocolError, match=words):
        parse_measurements(line)


def test_speeds_are_those_of_llorch_bench():
    arrivals = [[0.5, 0.75, 1.0, 1.5], [1.0, 1.25, 1.5, 2.0]]
    # Both have begun at 1.0; behind it lie one token of the first and three of the second stream, up to 2.0.
    assert speeds(arrivals, prompt_tokens=10) == (20.0, 4.0)
    ours = figures([StreamRecord(times) for times in arrivals], prompt_tokens=10)
    assert (ours.prefill_tokens_per_s, ours.decode_tokens_per_s) == (20.0, 4.0)


def arrived(*streams):
    arrivals = Arrivals(len(streams))
    arrivals.times = [list(times) for times in streams]
    return arrivals


def test_the_first_run_does_not_count_and_the_median_of_the_others_does():
    runs = iter([arrived((9, 18, 27)), *(arrived((1, 1 + step, 1 + 2 * step)) for step in (0.5, 0.1, 0.25))])
    engine = Engine("e", "1", "int4", lambda streams: next(runs))
    (found,) = measure(engine, replace(TASK, streams=(1,), repeat=3))
    assert (found.streams, found.prompt_tokens, found.new_tokens) == (1, 2, 3)
    assert found.prefill_tokens_per_s == 2.0
    assert found.decode_tokens_per_s == 4.0


def test_a_stream_that_ends_early_is_no_measurement():
    engine = Engine("e", "1", "int4", lambda streams: arrived((1, 2, 3), (1, 2)))
    with pytest.raises(ProtocolError, match="2 tokens of 3"):
        list(measure(engine, replace(TASK, streams=(2,))))


def test_arrivals_are_counted_by_stream():
    arrivals = Arrivals(2)
    arrivals.mark(1, 2)
    arrivals.mark(0)
    first, second = arrivals.times
    assert len(first) == 1
    assert second[0] == second[1] <= first[0]


def test_a_failed_process_is_told_by_its_last_line():
    code = "import sys; print('so far'); print('a\\nno such model', file=sys.stderr); sys.exit(3)"
    with pytest.raises(ResourceError, match=r"ended with 3: no such model$"):
        run_process(sys.executable, "-c", code)
    assert run_process(sys.executable, "-c", code, accept=(0, 3)) == "so far\n"


def test_a_peer_sees_the_one_folder_that_it_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    code = "import os, sys; print(os.environ['PYTHONPATH'], sys.stdin.read())"
    assert run_process(sys.executable, "-c", code, stdin="x", python_path=(tmp_path,)) == f"{tmp_path} x\n"
    monkeypatch.setenv("VIRTUAL_ENV", "ours")
    code = "import os, sys; print('elsewhere' in sys.path, os.environ.get('VIRTUAL_ENV'))"
    assert run_process(sys.executable, "-P", "-c", code, python_path=()) == "False None\n"


def test_the_first_byte_is_timed_while_the_program_goes_on(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "go")
    code = f"import sys; print(sys.stdin.read(), flush=True); open({str(tmp_path / 'go')!r}).read()"

    def clock():
        yield 10.0
        (tmp_path / "go").write_text("")  # which the program waits for, as this does for the program
        yield 12.5
        yield 14.0

    moments = clock()
    monkeypatch.setattr(processes, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    found = first_output(sys.executable, "-c", code, stdin="x")
    assert (found.first_s, found.whole_s) == (2.5, 4.0)
    assert 0 < found.processor_s < 60
    assert found.peak_mib > 1


@pytest.mark.parametrize(
    ("code", "words"),
    [("", "ended well and printed nothing"), ("raise SystemExit('no model')", "ended with 1: no model")],
)
def test_a_command_that_gives_no_token_is_no_measurement(code, words):
    with pytest.raises(ResourceError, match=words):
        first_output(sys.executable, "-c", code)


def test_a_task_to_continue_a_text_survives_the_pipe():
    task = Task(model="m", threads=2, text="The capital of France is")
    assert parse_task(encode(task)) == task
