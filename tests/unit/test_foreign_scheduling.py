"""A worker plans within what its session can do: prompts that are not cut. How sessions step is theirs to
know.
"""

from __future__ import annotations

from pathlib import Path

from llorch_serve.config import EngineConfig
from llorch_serve.engine.capabilities import Capabilities
from support.fakes.session import continuation
from support.harness.worker import VOCAB, Sink, make_session, make_worker, request

PROMPTS = {
    "a": [5, 6, 7, 8, 9, 10, 11],
    "b": [9],
    "c": list(range(20)),
    "d": [3, 1, 2],
    "e": [8, 8, 8, 8, 8, 8],
}
ALONE = Capabilities(batched_decode=False, chunked_prefill=False)


def test_without_chunks_every_prompt_is_one_call(tmp_path: Path) -> None:
    session = make_session(slots=3, capabilities=ALONE)
    worker = make_worker(tmp_path, session, config=EngineConfig(prefill_chunk=4))
    sink = Sink()
    for name, prompt in PROMPTS.items():
        worker.submit(request(name, prompt, max_tokens=4 + len(name), ignore_eos=True), sink)
    answers = sink.answers(*PROMPTS)
    worker.close()
    for name, prompt in PROMPTS.items():
        assert answers[name].ids == continuation(prompt, 5, VOCAB), name
    prompts = sorted(list(call.token_ids) for call in session.calls if call.kind == "prefill")
    assert prompts == sorted(PROMPTS.values())


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, make_session(capabilities=ALONE))
    limits = worker.model_info().limits
    worker.close()
    assert [limit.split(":")[0] for limit in limits] == ["no batching", "no chunked prefill"]
    whole = make_worker(tmp_path, make_session())
    assert (whole.model_info().limits, whole.model_info().kind) == ((), "llorch")
    whole.close()
