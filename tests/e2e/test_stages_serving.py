"""Workers whose model is cut into stages: the answers of one graph, and ends that nothing hangs on."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.config import EngineConfig, SessionConfig, StageChoice
from llorch_serve.errors import CancelledError, LlorchError, UnavailableError
from llorch_serve.loading.worker import load_worker
from llorch_serve.requests import AnswerOptions, GenerationRequest, ScoreRequest, TextPrompt, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.stages import process as process_module
from llorch_serve.structured.spec import Regex
from llorch_serve.worker import worker as worker_module
from llorch_serve.worker.local import LocalClient
from llorch_serve.worker.worker import Worker
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import random_ids
from support.harness.processes import WorkerProcess, llorch_here, serving
from support.harness.worker import Sink

pytestmark = pytest.mark.usefixtures("every_core")  # which stages' processes share out

PATIENCE_S = 60.0
FLAGS = ("--stage-processes", "--slots", "4", "--max-context", "100000")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, whose context is so long that an answer does not end during a test."""
    config = {"max_position_embeddings": 200_000, "num_hidden_layers": 4}
    return write_hf_folder(tmp_path_factory.mktemp("stages") / "source", config)


@pytest.fixture(scope="module")
def whole(source: Path, export_here: Callable[..., Path]) -> Path:
    return export_here(source, source.parent / "whole")


@pytest.fixture(scope="module")
def staged(source: Path, export_here: Callable[..., Path]) -> Path:
    return export_here(source, source.parent / "staged", "--stages", "2")


def stages_of(worker: WorkerProcess) -> list[psutil.Process]:
    return stages_below(psutil.Process(worker.command.process.pid))


def stages_below(process: psutil.Process) -> list[psutil.Process]:
    """Return the processes of stages, in the order of the stages."""
    found = process.children(recursive=True)
    stages = [one for one in found if "llorch_serve.stages.child" in one.cmdline()]
    assert len(stages) == 2
    return sorted(stages, key=lambda one: one.pid)


def check_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, PATIENCE_S)
    assert alive == []


def endless(name: str) -> GenerationRequest:
    sampling = SamplingParams(temperature=0, max_tokens=90_000, ignore_eos=True)
    return GenerationRequest(name, TextPrompt("Once"), sampling)


class Stream:
    """An answer that is read on a thread until it ends. begun: its first token has come."""

    def __init__(self, address: str, name: str) -> None:
        self.begun = threading.Event()
        self.error: Exception | None = None
        self._client = WorkerClient(address)
        self._name = name
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self.begun.wait(PATIENCE_S)

    def _read(self) -> None:
        try:
            for _ in self._client.generate(endless(self._name)):
                self.begun.set()
        except LlorchError as error:
            self.error = error

    def ended(self) -> Exception | None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "it goes on"
        self._client.close()
        return self.error


def test_a_killed_stage_ends_every_request_and_the_worker(staged: Path) -> None:
    with serving(staged, *FLAGS) as worker:
        streams = [Stream(worker.address, name) for name in ("one", "two")]
        stages = stages_of(worker)
        if sys.platform == "linux":  # so that the worker need not wait for a core of theirs
            assert {os.sched_getscheduler(stage.pid) for stage in stages} == {os.SCHED_BATCH}
        stages[1].kill()
        for stream in streams:
            assert "error id" in str(stream.ended())
        assert worker.command.wait() == 1
    check_gone(stages)
    log = "\n".join(worker.command.log)
    assert "of staged ended with signal SIGKILL (as the system ends one where memory is short)" in log
    assert "error: internal error; the worker's log says more under error id" in log


def test_a_stage_that_ends_while_nothing_runs_ends_the_worker(staged: Path) -> None:
    config = SessionConfig(threads=1, slots=2, stages=StageChoice(processes=True))
    worker = load_worker(staged, EngineConfig(session=config), lambda _: None)
    dead = threading.Event()
    worker.when_dead(lambda _error: dead.set())
    stages = stages_below(psutil.Process())
    stages[0].kill()
    assert dead.wait(PATIENCE_S)
    with pytest.raises(UnavailableError, match="the engine has stopped"):
        LocalClient(worker).complete(endless("one"))
    worker.close()
    check_gone(stages)


def test_a_stage_that_hangs_does_not_keep_a_worker_from_closing(
    staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_STUCK_S", 0.2)
    monkeypatch.setattr(process_module, "_END_S", 0.2)
    config = SessionConfig(threads=1, slots=2, stages=StageChoice(processes=True))
    worker = load_worker(staged, EngineConfig(session=config), lambda _: None)
    stages = stages_below(psutil.Process())
    stages[1].suspend()
    sink = Sink()
    worker.submit(endless("one"), sink)
    worker.close()
    (answer,) = sink.answers("one").values()
    assert answer.updates[-1].is_last
    check_gone(stages)


def test_stages_end_with_a_worker_that_is_killed(staged: Path) -> None:
    with serving(staged, *FLAGS) as worker:
        Stream(worker.address, "one")
        stages = stages_of(worker)
        worker.command.process.kill()
        check_gone(stages)


def test_a_worker_in_stages_cancels_tells_and_drains(staged: Path) -> None:
    with serving(staged, *FLAGS, "--http", "0") as worker, WorkerClient(worker.address) as client:
        stages = stages_of(worker)
        for stage in stages:
            stage.send_signal(signal.SIGINT)  # as a terminal does, and a service manager, to the whole group
            stage.send_signal(signal.SIGTERM)
        check_cancelling(worker.address, client)
        check_figures(worker.command.wait_for_line(r"(http://[^/\s]+)").group(1))
        worker.command.process.terminate()
        assert worker.command.wait() == 0
    check_gone(stages)


def check_cancelling(address: str, client: WorkerClient) -> None:
    """Cancel one of two answers that are in the pipe, several times, with a third one beside the other."""
    for turn in range(3):
        stream, other = Stream(address, f"one {turn}"), Stream(address, f"two {turn}")
        assert client.load().running == 2
        assert client.abort(f"one {turn}") == (f"one {turn}",)
        assert isinstance(stream.ended(), CancelledError)
        sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        short = GenerationRequest("short", TextPrompt("Once"), sampling)
        assert sum(len(update.token_ids) for update in client.generate(short)) == 5
        client.abort(f"two {turn}")
        assert isinstance(other.ended(), CancelledError)
    assert client.load().running == 0


def check_figures(url: str) -> None:
    """See that /metrics and /load tell what each stage does."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        metrics = answer.read().decode()
    for stage in "01":
        for name in ("stage_calls", "stage_busy_seconds", "stage_waiting_seconds"):
            assert f'llorch:{name}_total{{stage="{stage}"}}' in metrics
    with urllib.request.urlopen(f"{url}/load", timeout=PATIENCE_S) as answer:
        assert [stage["calls"] > 0 for stage in json.load(answer)["stages"]] == [True, True]


def open_lanes(folder: Path, lanes: int | None, **options: Any) -> AbstractContextManager[Worker]:
    """Return a worker in this process. lanes: of a model in stages; None: it is one graph."""
    session = SessionConfig(threads=1, slots=6, max_context=400, stages=StageChoice(lanes=lanes))
    return closing(load_worker(folder, EngineConfig(session=session, **options), lambda _: None))


def asked(number: int) -> GenerationRequest:
    """Return one of several requests that ask for what workers can give."""
    ids = TokenPrompt(tuple(random_ids(20 + 13 * (number % 5), seed=number % 7)))
    sampling: dict[str, Any] = {"temperature": 0.8, "seed": number, "max_tokens": 24, "ignore_eos": True}
    answers: dict[str, Any] = {}
    match number % 4:
        case 0:
            answers = {"prompt_logprobs": 2}
        case 1:
            answers = {"n": 3}
            sampling["logprobs"] = 3
        case 2:
            sampling |= {"temperature": 0, "repetition_penalty": 1.3}
        case 3:
            sampling |= {"structured": Regex("[a-z]{3,9}"), "ignore_eos": False}
    return GenerationRequest(f"r{number}", ids, SamplingParams(**sampling), AnswerOptions(**answers))


def told(worker: Worker, numbers: range) -> dict[int, Any]:
    """Return what requests that come together are told, without times."""
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        answers = LocalClient(worker).complete(asked(number))
        found[number] = [(each.text, each.token_ids, each.logprobs, each.prompt_logprobs) for each in answers]

    threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return found


def test_lanes_answer_as_one_graph_does(whole: Path, staged: Path) -> None:
    # What is reused of a cache in int8 has been rounded, and lanes reuse other things than one engine does.
    options: dict[str, Any] = {"prefill_chunk": 32, "prefix_cache": False}
    numbers = range(16)
    score = ScoreRequest("s", TextPrompt("Once"), (TextPrompt(" upon"), TextPrompt(" a time there")), 2)
    with open_lanes(whole, None, **options) as one, open_lanes(staged, 3, **options) as lanes:
        expected, found = told(one, numbers), told(lanes, numbers)
        scores = [
            [replace(s, cached_tokens=0) for s in LocalClient(each).score(score)] for each in (one, lanes)
        ]
        load, info = lanes.load(), lanes.model_info()
    assert expected.keys() == set(numbers)
    assert found == expected
    assert scores[0] == scores[1]
    assert (load.slots, info.slots) == (6, 6)
    assert [times.calls > 0 for times in load.stages] == [True, True]


def test_what_may_queue_is_shared_among_lanes(staged: Path) -> None:
    with open_lanes(staged, 3, max_waiting=10, max_waiting_tokens=100) as lanes:
        rules = [engine._scheduler._config for engine in lanes._engines]
    assert [(each.max_waiting, each.max_waiting_tokens) for each in rules] == [(4, 34)] * 3


def test_a_prompt_is_taken_up_and_guesses_are_checked_where_they_lie(staged: Path) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    ids = tuple(random_ids(200, seed=99))
    with open_lanes(staged, 2, lookup=3) as lanes:
        for turn in range(3):
            request = GenerationRequest(f"turn {turn}", TokenPrompt((*ids, *range(turn))), sampling)
            (answer,) = LocalClient(lanes).complete(request)
            assert answer.completion is not None
            assert (answer.completion.cached_tokens >= 198) == (turn > 0)
        assert lanes.load().drafted_tokens > 0


def test_bench_tells_how_busy_each_stage_is(staged: Path) -> None:
    flags = ("--streams", "2", "--tests", "decode", "--max-tokens", "4", "--repeat", "1")
    document = llorch_here("bench", staged, *flags, "--json").document()
    (row,) = document["entries"][0]["rows"]  # type: ignore[index]  # a report's
    for stage in (0, 1):
        figure = row["figures"][f"stage_{stage}_busy"]
        assert figure["unit"] == "%"
        assert 0 < figure["median"] <= 100
        assert row["figures"][f"stage_{stage}_waiting"]["median"] >= 0


def test_generate_and_score_run_stages(staged: Path, whole: Path) -> None:
    generate = ("--prompt", "Once", "--max-tokens", "6", "--temperature", "0", "--json")
    texts = [
        llorch_here("generate", *command, *generate).document()["text"]
        for command in ((whole,), (staged,), (staged, "--stage-processes"))
    ]
    assert texts[0] == texts[1] == texts[2] != ""
    score = ("--context", "Once", "--continuation", " upon", "--json")
    assert llorch_here("score", staged, *score).document() == llorch_here("score", whole, *score).document()
    for flags in (("--stage-processes",), ("--stage-device", "0,1")):
        outcome = llorch_here("generate", whole, *flags, *generate)
        assert f"{flags[0]} has no effect on" in outcome.error()
        assert outcome.code == 2
    assert (
        "a device number for each stage"
        in llorch_here("score", staged, "--stage-device", "a", *score).error()
    )
