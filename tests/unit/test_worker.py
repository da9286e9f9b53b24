"""The worker on a fake session: requests are checked as a whole, answers are the model's, and every one ends
once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from llorch_serve.artifact.manifest import GenerationDefaults
from llorch_serve.config import EngineConfig
from llorch_serve.engine.capabilities import Capabilities
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import (
    CancelledError,
    EngineStoppedError,
    InvalidRequestError,
    NonFiniteLogitsError,
    ProviderError,
    QueueFullError,
    UnavailableError,
)
from llorch_serve.requests import (
    Abort,
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    TextPrompt,
    Timings,
    TokenPrompt,
    UpdateSink,
)
from llorch_serve.sampling.params import MAX_SEED, ResolvedSampling
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.answers import Answers
from llorch_serve.worker.local import stream
from llorch_serve.worker.worker import Worker
from support.builders.checkpoints import BOS_ID, EOS_ID
from support.builders.tiny_artifact import tiny_manifest
from support.fakes.session import GREEDY, Call, FakeSession, continuation, next_logits
from support.harness.worker import (
    CONTEXT,
    PATIENCE_S,
    TOKENIZER,
    VOCAB,
    Sink,
    ask,
    make_session,
    make_worker,
    request,
    script,
)

PROMPT = (40, 41, 42, 43, 44, 45)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = make_worker(tmp_path)
    yield made
    made.close()


def resolved(**changes: object) -> ResolvedSampling:
    fields = {name: getattr(GREEDY, name) for name in ResolvedSampling.__dataclass_fields__}
    return ResolvedSampling(**{**fields, **changes})


def test_an_answer_is_the_models_own_ids_text_and_counts(worker: Worker) -> None:
    answer = ask(worker, PROMPT, max_tokens=20)
    expected = continuation(PROMPT, 20, VOCAB)
    assert answer.ids == expected
    assert answer.text == TOKENIZER.decode(expected, keep_special_tokens=False)
    done = answer.completion
    assert (done.reason, done.stop_matched) == (FinishReason.LENGTH, None)
    assert (done.prompt_tokens, done.generated_tokens) == (len(PROMPT), 20)
    assert done.timings.queue_s >= 0
    assert done.timings.prefill_s > 0
    assert done.timings.decode_s > 0


SAMPLED = {"temperature": 1.0, "seed": 5}


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ({"temperature": 0.0, "seed": 5}, {"temperature": 1.0}),
        (SAMPLED, {"temperature": 0.2}),
        (SAMPLED, {"seed": 6}),
        (SAMPLED, {"top_k": 3}),
        (SAMPLED, {"top_p": 0.2}),
        (SAMPLED, {"min_p": 0.5}),
        (SAMPLED, {"repetition_penalty": 1.9}),
        ({"temperature": 0.0, "seed": 5}, {"repetition_penalty": 0.2}),
    ],
    ids=str,
)
def test_sampling_fields_reach_the_sampler(
    worker: Worker, base: dict[str, float], change: dict[str, float]
) -> None:
    without, with_it = (
        ask(worker, PROMPT, max_tokens=16, ignore_eos=True, **values) for values in (base, {**base, **change})
    )
    assert without.ids == continuation(PROMPT, 16, VOCAB, params=resolved(**base))
    assert with_it.ids == continuation(PROMPT, 16, VOCAB, params=resolved(**{**base, **change}))
    assert with_it.ids != without.ids


@pytest.mark.parametrize("count", [1, 2, 13])
def test_max_tokens_is_exact(worker: Worker, count: int) -> None:
    assert ask(worker, PROMPT, max_tokens=count).ids == continuation(PROMPT, count, VOCAB)


def test_a_drawn_seed_is_reported_and_repeats_the_answer(worker: Worker) -> None:
    first = ask(worker, PROMPT, temperature=1.5, max_tokens=16)
    second = ask(worker, PROMPT, temperature=1.5, max_tokens=16)
    assert first.completion.seed != second.completion.seed
    assert 0 <= first.completion.seed <= MAX_SEED
    assert ask(worker, PROMPT, temperature=1.5, max_tokens=16, seed=first.completion.seed).ids == first.ids


def test_the_artifacts_defaults_hold_where_a_request_is_silent(tmp_path: Path) -> None:
    defaults = GenerationDefaults(temperature=1.0, top_k=3, repetition_penalty=1.3)
    worker = make_worker(tmp_path, generation=defaults)
    try:
        silent = ask(worker, PROMPT, max_tokens=12, temperature=None, seed=5)
        params = resolved(temperature=1.0, top_k=3, repetition_penalty=1.3, seed=5)
        assert silent.ids == continuation(PROMPT, 12, VOCAB, params=params)
        loud = ask(worker, PROMPT, max_tokens=12, temperature=0, repetition_penalty=1, seed=5)
        assert loud.ids == continuation(PROMPT, 12, VOCAB)
    finally:
        worker.close()


def test_no_tokens_asked_is_an_answer_of_none(worker: Worker) -> None:
    answer = ask(worker, PROMPT, max_tokens=0)
    assert (answer.ids, answer.text) == ([], "")
    assert answer.completion.reason is FinishReason.LENGTH
    assert (answer.completion.prompt_tokens, answer.completion.generated_tokens) == (len(PROMPT), 0)
    assert answer.completion.timings == Timings(0, 0, 0)
    assert ask(worker, PROMPT, max_tokens=3).ids == continuation(PROMPT, 3, VOCAB)


def violations(worker: Worker, prompt: object, **sampling: object) -> dict[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        worker.submit(request("r", prompt, **sampling), Sink())  # type: ignore[arg-type]
    return {violation.field: violation.description for violation in caught.value.violations}


def test_an_empty_prompt_is_refused(worker: Worker) -> None:
    assert violations(worker, ()) == {"input": "found an empty prompt, expected at least one token"}


def test_empty_text_still_has_the_tokenizers_bos(worker: Worker) -> None:
    assert ask(worker, TextPrompt(""), max_tokens=5).ids == continuation((BOS_ID,), 5, VOCAB)


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 1000])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(worker: Worker, length: int) -> None:
    (description,) = violations(worker, (7,) * length).values()
    assert str(length) in description
    assert str(CONTEXT) in description


@pytest.mark.parametrize("room", [1, 3])
@pytest.mark.parametrize("asked", [None, 1000])
def test_a_full_context_ends_the_answer(worker: Worker, room: int, asked: int | None) -> None:
    prompt = tuple(range(10, 10 + CONTEXT - room))
    answer = ask(worker, prompt, max_tokens=asked, ignore_eos=True)
    assert answer.ids == continuation(prompt, room, VOCAB)
    assert answer.completion.reason is FinishReason.LENGTH


def test_every_bad_field_is_named_at_once(worker: Worker) -> None:
    bad = {
        "temperature": 2.5,
        "top_k": -1,
        "top_p": 0.0,
        "min_p": float("nan"),
        "repetition_penalty": 0.0,
        "seed": -1,
        "max_tokens": -1,
        "min_tokens": -1,
        "stop": ("",),
        "stop_token_ids": (VOCAB,),
    }
    found = violations(worker, (1, VOCAB, -1), **bad)
    named = {"stop": "stop[0]", "stop_token_ids": "stop_token_ids[0]"}
    assert set(found) == {f"sampling.{named.get(name, name)}" for name in bad} | {"input.tokens"}
    assert str(VOCAB) in found["input.tokens"]
    assert ask(worker, PROMPT, max_tokens=2).ids == continuation(PROMPT, 2, VOCAB)


def test_a_live_id_cannot_be_used_twice_and_is_free_after_its_end(tmp_path: Path) -> None:
    held, released = threading.Event(), threading.Event()

    def before(_call: Call) -> None:
        held.set()
        assert released.wait(PATIENCE_S)

    worker = make_worker(tmp_path, make_session(before_call=before))
    try:
        sink = Sink()
        worker.submit(request("same", PROMPT, max_tokens=4), sink)
        assert held.wait(PATIENCE_S)
        with pytest.raises(InvalidRequestError) as caught:
            worker.submit(request("same", (1, 2), max_tokens=4), Sink())
        assert [violation.field for violation in caught.value.violations] == ["request_id"]
        released.set()
        assert sink.answers("same")["same"].ids == continuation(PROMPT, 4, VOCAB)
        assert ask(worker, (1, 2), name="same", max_tokens=4).ids == continuation((1, 2), 4, VOCAB)
    finally:
        released.set()
        worker.close()


def test_a_sink_gets_one_delivery_a_step(tmp_path: Path) -> None:
    released = threading.Event()

    def before(_call: Call) -> None:
        assert released.wait(PATIENCE_S)

    session = make_session(before_call=before)
    worker = make_worker(tmp_path, session)
    try:
        shared, own = Sink(), Sink()
        for name, sink in (("a", shared), ("b", shared), ("c", own), ("d", shared)):
            worker.submit(request(name, (ord(name), 9), max_tokens=6, ignore_eos=True), sink)
        released.set()
        answers = shared.answers("a", "b", "d") | own.answers("c")
    finally:
        released.set()
        worker.close()
    for name, answer in answers.items():
        assert answer.ids == continuation((ord(name), 9), 6, VOCAB)
    assert len(shared.deliveries) <= len(session.calls)
    assert max(len(updates) for updates in shared.deliveries) == 3
    assert all(len({u.request_id for u in updates}) == len(updates) for updates in shared.deliveries)
    assert all(len(updates) == 1 for updates in own.deliveries)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kv_cache", [True, False])
def test_eight_streams_at_once_equal_each_alone(
    tmp_path: Path, sampling: dict[str, float], kv_cache: bool
) -> None:
    session = make_session()
    worker = make_worker(tmp_path, session, config=EngineConfig(prefill_chunk=4, kv_cache=kv_cache))
    prompts = {f"r{i}": tuple(range(50 + i, 50 + i + 1 + 3 * i)) for i in range(8)}
    seeds = {name: {"seed": index} for index, name in enumerate(prompts)}
    try:
        alone = {
            name: ask(worker, prompt, max_tokens=12, **sampling, **seeds[name])
            for name, prompt in prompts.items()
        }
        sink = Sink()
        for name, prompt in prompts.items():
            worker.submit(request(name, prompt, max_tokens=12, **sampling, **seeds[name]), sink)
        together = sink.answers(*prompts)
    finally:
        worker.close()
    assert any(call.kind == "decode" for call in session.calls) is kv_cache
    for name, prompt in prompts.items():
        params = resolved(**{**sampling, **seeds[name]})
        stops = (EOS_ID, 3)
        assert alone[name].ids == continuation(prompt, 12, VOCAB, params=params, stop_ids=stops)
        assert together[name].ids == alone[name].ids
        assert together[name].text == alone[name].text


def test_a_row_that_fails_is_told_to_its_own_caller_only(tmp_path: Path) -> None:
    def spoil(call: Call, logits: npt.NDArray[np.float32]) -> None:
        for row, tokens in zip(logits, call.tokens, strict=False):
            if tokens[:1] == (13,) and len(tokens) == 4:
                row[0] = np.nan

    worker = make_worker(tmp_path, make_session(edit=spoil))
    try:
        sink = Sink()
        worker.submit(request("bad", (13, 1), max_tokens=8), sink)
        worker.submit(request("good", (14, 1), max_tokens=8), sink)
        answers = sink.answers("bad", "good")
    finally:
        worker.close()
    assert isinstance(answers["bad"].error, NonFiniteLogitsError)
    assert len(answers["bad"].ids) == 2
    assert answers["good"].ids == continuation((14, 1), 8, VOCAB)


def test_a_failed_step_leaves_the_worker_alive(tmp_path: Path) -> None:
    failures = iter([ProviderError("no luck")])

    def before(_call: Call) -> None:
        for failure in failures:
            raise failure

    worker = make_worker(tmp_path, make_session(before_call=before))
    try:
        assert str(ask(worker, PROMPT, max_tokens=3).error) == "no luck"
        assert ask(worker, PROMPT, max_tokens=3).ids == continuation(PROMPT, 3, VOCAB)
    finally:
        worker.close()


def test_what_the_queue_refuses_is_told_and_its_id_is_free_again(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, config=EngineConfig(max_waiting=0))
    try:
        assert isinstance(ask(worker, PROMPT).error, QueueFullError)
        assert isinstance(ask(worker, PROMPT).error, QueueFullError)
    finally:
        worker.close()


class Held:
    """A worker whose engine stands before its first model call until released."""

    def __init__(self, folder: Path) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        self.session = make_session(before_call=self._before)
        self.worker = make_worker(folder, self.session)
        self.sink = Sink()

    def _before(self, _call: Call) -> None:
        self.reached.set()
        assert self.released.wait(PATIENCE_S)

    def submit(self, name: str = "r", **sampling: object) -> Abort:
        return self.worker.submit(request(name, PROMPT, **sampling), self.sink)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path)
    yield made
    made.released.set()
    made.worker.close()


def test_an_abort_ends_with_cancelled_once(held: Held) -> None:
    abort = held.submit()
    assert held.reached.wait(PATIENCE_S)
    for _ in range(3):
        abort()
    held.released.set()
    answer = held.sink.answers("r")["r"]
    assert answer.completion.reason is FinishReason.CANCELLED
    abort()
    assert ask(held.worker, PROMPT, max_tokens=2).ids == continuation(PROMPT, 2, VOCAB)


def test_an_abort_that_comes_late_spares_the_next_request_of_its_id(held: Held) -> None:
    abort = held.submit(max_tokens=1)
    held.released.set()
    assert held.sink.answers("r")["r"].completion.reason is FinishReason.LENGTH
    held.released.clear()
    later = Sink()
    held.worker.submit(request("r", PROMPT, max_tokens=3, ignore_eos=True), later)
    abort()
    held.released.set()
    assert later.answers("r")["r"].completion.reason is FinishReason.LENGTH


def test_close_cancels_what_is_live_and_refuses_what_comes_later(held: Held) -> None:
    held.submit("a")
    held.submit("b")
    assert held.reached.wait(PATIENCE_S)
    closer = threading.Thread(target=held.worker.close)
    closer.start()
    held.released.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    answers = held.sink.answers("a", "b")
    assert {a.completion.reason for a in answers.values()} == {FinishReason.CANCELLED}
    held.worker.close()
    for count in (0, 3):
        with pytest.raises(UnavailableError, match="shutting down"):
            held.worker.submit(request("c", PROMPT, max_tokens=count), Sink())


@pytest.mark.parametrize("closing", [True, False], ids=["close", "abort"])
def test_a_close_or_an_abort_cannot_get_to_the_engine_before_what_it_ends(
    tmp_path: Path, closing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The answer is too long to end by itself.
    worker = make_worker(tmp_path, make_session(context=20_000, slots=1))
    add, begin = worker._requests._loop.add, worker._requests.enter
    entered: list[Answers] = []
    other = threading.Thread(target=worker.close if closing else lambda: worker._requests._abort(entered[0]))

    def enter(answers: Answers, *how: Any) -> Abort:
        entered.append(answers)
        return begin(answers, *how)

    def interrupted(*args: object) -> None:
        other.start()
        other.join(0.3)  # ends in this time if it is let in
        add(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(worker._requests, "enter", enter)
    monkeypatch.setattr(worker._requests._loop, "add", interrupted)
    sink = Sink()
    try:
        worker.submit(request("r", PROMPT, max_tokens=None, ignore_eos=True), sink)
        assert sink.answers("r")["r"].completion.reason is FinishReason.CANCELLED
    finally:
        other.join(PATIENCE_S)
        worker.close()


def test_a_dead_engine_tells_everyone_once_and_takes_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()

    def before(_call: Call) -> None:
        assert released.wait(PATIENCE_S)
        raise RuntimeError("no more")

    worker = make_worker(tmp_path, make_session(before_call=before))
    deaths: list[EngineStoppedError] = []
    worker.when_dead(deaths.append)
    sinks = {name: Sink() for name in ("a", "b", "c")}
    aborts = [worker.submit(request(name, PROMPT), sink) for name, sink in sinks.items()]
    released.set()
    for name, sink in sinks.items():
        error = sink.answers(name)[name].error
        assert isinstance(error, EngineStoppedError)
        assert error.error_id in str(error)
        assert "no more" not in str(error)
    with pytest.raises(UnavailableError, match="engine has stopped"):
        worker.submit(request("d", PROMPT), Sink())
    aborts[0]()
    worker.close()
    worker.when_dead(deaths.append)  # too late to be told later, so at once
    assert deaths == [error, error]
    [record] = caplog.records
    assert error.error_id in record.message
    assert record.exc_info is not None
    assert "no more" in str(record.exc_info[1])


def test_a_stream_yields_until_the_last_update(worker: Worker) -> None:
    updates = list(stream(worker, request("r", PROMPT, max_tokens=5)))
    assert [token for update in updates for token in update.token_ids] == continuation(PROMPT, 5, VOCAB)
    assert [update.is_last for update in updates] == [False] * (len(updates) - 1) + [True]


def test_leaving_a_stream_aborts_its_request(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    submit = held.worker.submit

    def watched(asked: GenerationRequest, sink: UpdateSink) -> Abort:
        abort = submit(asked, sink)
        return lambda: (aborted.append(asked.request_id), abort())[1]

    monkeypatch.setattr(held.worker, "submit", watched)
    held.released.set()
    updates = stream(held.worker, request("r", PROMPT))
    next(updates)
    updates.close()
    assert aborted == ["r"]
    assert len(list(stream(held.worker, request("r2", PROMPT, max_tokens=2)))) == 2
    assert aborted == ["r"]


def test_a_stream_raises_the_requests_error_or_cancellation(tmp_path: Path) -> None:
    def before(call: Call) -> None:
        if call.token_ids[0] == 13:
            raise ProviderError("no luck")
        (answers,) = worker._requests._live.values()
        worker._requests._abort(answers)

    worker = make_worker(tmp_path, make_session(before_call=before))
    try:
        with pytest.raises(ProviderError, match="no luck"):
            list(stream(worker, request("failing", (13,))))
        with pytest.raises(CancelledError, match="aborted"):
            list(stream(worker, request("aborted", PROMPT)))
    finally:
        worker.close()


def test_a_chat_goes_through_the_artifacts_template(worker: Worker) -> None:
    chat = ChatPrompt((ChatMessage("user", "Tokens"),))
    ids, text = worker.tokenize(chat)
    assert text == "<|turn|>user\nTokens<|turn_end|>\n<|turn|>assistant\n"
    assert TOKENIZER.decode(ids, keep_special_tokens=True) == f"<|bos|>{text}"
    assert ask(worker, chat, max_tokens=4).ids == continuation(ids, 4, VOCAB)


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, chat_template=None)
    try:
        found = violations(worker, ChatPrompt((ChatMessage("user", "x"),)), temperature=9.0)
        assert "no chat template" in found["input.chat"]
        assert "sampling.temperature" in found
        assert not worker.model_info().has_chat_template
    finally:
        worker.close()


def test_tokens_beyond_the_tokenizer_are_the_models_own(tmp_path: Path) -> None:
    model = msgspec.structs.replace(tiny_manifest().model, vocab_size=VOCAB + 8)
    worker = make_worker(tmp_path, make_session(vocab_size=VOCAB + 8), model=model)
    try:
        prompt = (VOCAB + 7, 40)
        assert worker.tokenize(TokenPrompt(prompt)) == (
            prompt,
            TOKENIZER.decode([40], keep_special_tokens=True),
        )
        assert ask(worker, prompt, max_tokens=3).ids == continuation(prompt, 3, VOCAB + 8)
    finally:
        worker.close()


def test_a_tokenizer_larger_than_the_model_never_sends_it_unknown_ids(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("Paris", add_special_tokens=True)
    size = max(ids)  # the first id that this model lacks
    model = msgspec.structs.replace(tiny_manifest().model, vocab_size=size)
    session = make_session(vocab_size=size)
    worker = make_worker(tmp_path, session, model=model)
    try:
        for prompt in (TextPrompt("Paris"), ChatPrompt((ChatMessage("user", "Paris"),))):
            (description,) = violations(worker, prompt).values()
            assert str(size) in description
            assert str(size - 1) in description
        assert session.calls == []
    finally:
        worker.close()


def test_text_and_ids_convert_both_ways(worker: Worker) -> None:
    ids, text = worker.tokenize(TextPrompt("Paris is"))
    assert text == "Paris is"
    assert ids[0] == BOS_ID
    assert worker.detokenize(ids, keep_special_tokens=False) == "Paris is"
    assert worker.detokenize(ids, keep_special_tokens=True) == "<|bos|>Paris is"


@pytest.mark.parametrize(("context", "kinds"), [(2, {"prefill"}), (CONTEXT, {"prefill", "decode"})])
def test_warming_up_runs_what_the_context_has_room_for(tmp_path: Path, context: int, kinds: set[str]) -> None:
    session = FakeSession(vocab_size=VOCAB, context=context)
    worker = make_worker(tmp_path, session)
    try:
        worker.warm_up()
    finally:
        worker.close()
    assert {call.kind for call in session.calls} == kinds


def test_the_description_is_that_of_manifest_and_session(worker: Worker) -> None:
    info = worker.model_info()
    assert (info.model_id, info.context_length, info.vocab_size, info.slots) == ("tiny", CONTEXT, VOCAB, 4)
    assert (info.provider, info.provider_node_share) == ("FakeExecutionProvider", 1.0)
    assert info.stop_token_ids == (EOS_ID, 3)
    assert info.has_chat_template
    assert info.batch_invariant


@pytest.mark.parametrize(
    ("session", "lookup", "invariant"), [(True, 0, True), (False, 0, False), (True, 4, False)]
)
def test_what_the_session_promises_holds_unless_there_are_guesses(
    tmp_path: Path, session: bool, lookup: int, invariant: bool
) -> None:
    fake = make_session(capabilities=Capabilities(batch_invariant=session))
    worker = make_worker(tmp_path, fake, config=EngineConfig(prefill_chunk=4, lookup=lookup))
    worker.close()
    assert worker.model_info().batch_invariant is invariant


def test_tokens_guessed_beyond_a_stop_string_are_not_counted(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("hello there who is it", add_special_tokens=False)
    prompt = ids * 2
    stop = TOKENIZER.decode(ids[1:2], keep_special_tokens=True)
    for lookup in (0, 8):
        session = make_session(rule=script(prompt, ids))
        worker = make_worker(tmp_path, session, config=EngineConfig(lookup=lookup))
        answer = ask(worker, prompt, stop=(stop,), max_tokens=len(ids))
        worker.close()
        assert any(call.kind == "verify" and len(call.token_ids) > 3 for call in session.calls) is bool(
            lookup
        )
        assert answer.completion.stop_matched == stop
        assert answer.completion.generated_tokens == len(answer.ids) == 2


def test_the_oracle_itself_is_not_constant() -> None:
    assert next_logits(PROMPT, VOCAB).argmax() != next_logits(PROMPT[:-1], VOCAB).argmax()


def test_a_text_beyond_any_tokenizer_is_refused_before_it_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counting(self: Tokenizer, text: str, add_special_tokens: bool, **rest: Any) -> tuple[int, ...]:
        encoded.append(len(text))
        return encode(self, text, add_special_tokens, **rest)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    worker = make_worker(tmp_path)
    most = 4 * CONTEXT * TOKENIZER.longest_token
    try:
        for length, says in (
            (most, "tokens; the context holds 48"),
            (most + 1, f"found {most + 1} characters"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                worker.submit(request("r", TextPrompt("a" * length)), Sink())
    finally:
        worker.close()
    assert encoded == [most]
