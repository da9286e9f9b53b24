"""A worker plans within what its session can do: whole prompts, and a call of its own for each running sequence."""

from __future__ import annotations

from pathlib import Path

from fake_session import continuation
from llorch_serve.capabilities import Capabilities
from llorch_serve.config import EngineConfig
from worker_harness import VOCAB, Sink, make_session, make_worker, request

PROMPTS = {
    "a": [5, 6, 7, 8, 9, 10, 11],
    "b": [9],
    "c": list(range(20)),
    "d": [3, 1, 2],
    "e": [8, 8, 8, 8, 8, 8],
}
ALONE = Capabilities(batched_decode=False, chunked_prefill=False)


def test_without_batching_and_chunks_every_call_is_one_sequences(tmp_path: Path) -> None:
    session = make_session(slots=3, capabilities=ALONE)
    worker = make_worker(tmp_path, session, config=EngineConfig(prefill_chunk=4))
    sink = Sink()
    for name, prompt in PROMPTS.items():
        worker.submit(request(name, prompt, max_tokens=4 + len(name), ignore_eos=True), sink)
    answers = sink.answers(*PROMPTS)
    worker.close()
    for name, prompt in PROMPTS.items():
        assert answers[name].ids == continuation(prompt, 5, VOCAB), name
    assert {call.kind for call in session.calls} == {"prefill"}
    prompts = sorted(list(call.token_ids) for call in session.calls if len(call.token_ids) > 1)
    assert prompts == sorted(prompt for prompt in PROMPTS.values() if len(prompt) > 1)
    # Nothing is computed for a slot that has no running sequence: one call a token, no more.
    assert len(session.calls) == 5 * len(PROMPTS)


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, make_session(capabilities=ALONE))
    limits = worker.model_info().limits
    worker.close()
    assert [limit.split(":")[0] for limit in limits] == ["no batching", "no chunked prefill"]
    whole = make_worker(tmp_path, make_session())
    assert (whole.model_info().limits, whole.model_info().kind) == ((), "llorch")
    whole.close()
