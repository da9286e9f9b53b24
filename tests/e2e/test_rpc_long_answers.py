"""Answers of thousands of log-probabilities are written beside gRPC's event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.requests import (
    Abort,
    Completion,
    ContinuationScore,
    GenerationUpdate,
    ScoreRequest,
    Timings,
    UpdateSink,
)
from llorch_serve.rpc import convert_answers, convert_score
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert_logprobs import write_logprobs
from llorch_serve.sampling.logprobs import TokenLogprob, TokenLogprobs
from support.fakes.generator import PATIENCE_S
from support.fakes.scripted import ScriptedGenerator
from support.harness.rpc import open_stub, running_server

pytestmark = pytest.mark.usefixtures("way")

END = Completion(FinishReason.STOP, None, 1, 1, 0, Timings(0, 0, 0))
TOKEN = TokenLogprob(1, -1.0, "a", b"a")
MANY = (TokenLogprobs(TOKEN, (TOKEN,) * 20),) * 300
ASKED = pb.GenerateRequest(input=pb.Input(text="a"), sampling=pb.Sampling(max_tokens=1, logprobs=20))


class Generator(ScriptedGenerator):
    """Gives every answer and score many log-probabilities."""

    def __init__(self) -> None:
        super().__init__(({"text": "a", "logprobs": MANY},))

    def submit_score(self, request: ScoreRequest, sink: UpdateSink) -> Abort:
        score = ContinuationScore(-1.0, False, 300, 1, 0, MANY)
        sink.deliver([GenerationUpdate(request.request_id, "", (), END, score=score)])
        return lambda: None


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Score"])
def test_many_log_probabilities_hold_up_no_other_call(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[threading.Thread] = set()

    def noted(places: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
        found = write_logprobs(places)
        if len(found) == len(MANY):
            threads.add(threading.current_thread())
        return found

    for module in (convert_answers, convert_score):
        monkeypatch.setattr(module, "write_logprobs", noted)
    generator = Generator()
    with running_server(generator) as server, open_stub(server.address) as stub:
        match method:
            case "Generate":
                (told,) = stub.Generate(ASKED, timeout=PATIENCE_S).choices
            case "GenerateStream":
                streamed = pb.GenerateStreamRequest(request=ASKED)
                told, *_ = stub.GenerateStream(streamed, timeout=PATIENCE_S)
            case _:
                asked = pb.ScoreRequest(
                    context=pb.Input(text="a"), continuations=[pb.Continuation(text="a")], logprobs=20
                )
                (told,) = stub.Score(asked, timeout=PATIENCE_S).scores
    generator.close()
    assert len(told.logprobs) == len(MANY)
    assert threads
    assert not {thread.name for thread in threads} & {"test-server", "MainThread"}
