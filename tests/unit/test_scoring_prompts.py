"""Log-probabilities of a prompt's own tokens, and scores of continuations, held against the model without a
cache.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_serve.config import EngineConfig
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import InvalidRequestError, NonFiniteLogitsError, UnsupportedError
from llorch_serve.requests import ContinuationScore, Prompt, ScoreRequest, TextPrompt, TokenPrompt
from llorch_serve.sampling.prompt_scores import PromptScores, most_rows
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.local import score
from llorch_serve.worker.worker import Worker
from support.fakes.session import Call, Logits, continuation, next_logits
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
)

CONTEXT_IDS = tuple(range(5, 25))
LONG = tuple(range(5, 45))


def log_probabilities(tokens: Sequence[int]) -> np.ndarray:
    """[vocabulary]: of what follows these tokens, from the definition in float64."""
    logits = next_logits(tokens, VOCAB).astype(np.float64)
    logits -= logits.max()
    return logits - np.log(np.exp(logits).sum())


def scored(tokens: Sequence[int], first: int) -> list[float]:
    return [float(log_probabilities(tokens[:i])[tokens[i]]) for i in range(first, len(tokens))]


def ask_scores(
    worker: Worker,
    context: Prompt | Sequence[int],
    continuations: Sequence[Prompt | Sequence[int]],
    logprobs: int | None = None,
) -> list[ContinuationScore]:
    def prompt(value: Prompt | Sequence[int]) -> Prompt:
        return TokenPrompt(tuple(value)) if isinstance(value, (tuple, list)) else value  # type: ignore[return-value]

    wanted = tuple(prompt(value) for value in continuations)
    return score(worker, ScoreRequest("s", prompt(context), wanted, logprobs))  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [3, 4, 7, 64])
@pytest.mark.parametrize("top", [0, 1, 20])
@pytest.mark.parametrize("length", [1, 2, 5, 30])
def test_prompt_logprobs_are_those_of_every_token_but_the_first(
    tmp_path: Path, chunk: int, top: int, length: int
) -> None:
    worker = make_worker(tmp_path, config=EngineConfig(prefill_chunk=chunk))
    prompt = LONG[:length]
    answer = ask(worker, prompt, prompt_logprobs=top, max_tokens=3, ignore_eos=True)
    worker.close()
    assert answer.ids == continuation(prompt, 3, VOCAB)
    told = [place for update in answer.updates for place in update.prompt_logprobs]
    assert [place.chosen.token_id for place in told] == list(prompt[1:])
    assert [place.chosen.logprob for place in told] == pytest.approx(scored(prompt, 1))
    for index, place in enumerate(told, 1):
        expected = log_probabilities(prompt[:index])
        likeliest = np.argsort(-expected, kind="stable")[:top]
        assert [alternative.token_id for alternative in place.top] == likeliest.tolist()
        assert [a.logprob for a in place.top] == pytest.approx(expected[likeliest].tolist())
        assert place.chosen.text == TOKENIZER.decode([place.chosen.token_id], keep_special_tokens=True)


def test_they_come_whole_whatever_the_cache_holds(tmp_path: Path) -> None:
    worker = make_worker(tmp_path)
    ask(worker, LONG, max_tokens=2, ignore_eos=True)
    plain = ask(worker, LONG, max_tokens=2, ignore_eos=True)
    scoring = ask(worker, LONG, prompt_logprobs=0, max_tokens=2, ignore_eos=True)
    worker.close()
    assert plain.completion.cached_tokens > 0
    assert scoring.completion.cached_tokens == 0
    assert len(scoring.updates[0].prompt_logprobs) == len(LONG) - 1
    assert scoring.ids == plain.ids


def test_no_tokens_may_be_asked_for_beside_them(tmp_path: Path) -> None:
    worker = make_worker(tmp_path)
    prompt = TextPrompt("hello there, who is it")
    sink = Sink()
    worker.submit(request("r", prompt, prompt_logprobs=1, echo=True, max_tokens=0), sink)
    answer = sink.answers("r")["r"]
    load = worker.load()
    worker.close()
    ids = TOKENIZER.encode(prompt.text, add_special_tokens=True)
    [update] = answer.updates
    assert (update.text, update.token_ids) == (prompt.text, ())
    assert [place.chosen.logprob for place in update.prompt_logprobs] == pytest.approx(scored(ids, 1))
    assert answer.completion.reason is FinishReason.LENGTH
    assert (load.running, load.waiting, load.generated_tokens) == (0, 0, 0)


def test_with_several_answers_they_come_once(tmp_path: Path) -> None:
    session = make_session()
    worker = make_worker(tmp_path, session)
    answer = ask(worker, LONG, n=3, prompt_logprobs=0, max_tokens=2, ignore_eos=True)
    worker.close()
    told = [update.index for update in answer.updates if update.prompt_logprobs]
    assert told == [0]
    assert sum(len(c.token_ids) for c in session.calls if c.kind == "prefill") == len(LONG)


def test_without_a_cache_they_are_taken_once(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, config=EngineConfig(prefill_chunk=4, kv_cache=False))
    answer = ask(worker, LONG[:10], prompt_logprobs=0, max_tokens=4, ignore_eos=True)
    worker.close()
    assert answer.ids == continuation(LONG[:10], 4, VOCAB)
    told = [place.chosen.logprob for update in answer.updates for place in update.prompt_logprobs]
    assert told == pytest.approx(scored(LONG[:10], 1))


@pytest.mark.parametrize("vocabulary", [512, 32_000, 49_152, 128_256, 2**22])
def test_logits_of_a_call_are_bounded(vocabulary: int) -> None:
    rows = most_rows(vocabulary)
    assert rows % 32 == 0
    assert rows == 32 or rows * vocabulary * 4 <= 32 * 2**20


def test_a_chunk_has_no_more_rows_than_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def count(_call: Call, logits: Logits) -> None:
        rows.append(len(logits))

    monkeypatch.setattr("llorch_serve.worker.intake.most_rows", lambda _vocabulary: 4)
    worker = make_worker(tmp_path, make_session(edit=count), config=EngineConfig(prefill_chunk=16))
    answer = ask(worker, LONG, prompt_logprobs=0, max_tokens=1, ignore_eos=True)
    worker.close()
    assert max(rows) <= 5  # the one that is sampled from comes on top
    assert [p.chosen.logprob for p in answer.updates[0].prompt_logprobs] == pytest.approx(scored(LONG, 1))


def test_unscored_positions_do_not_count_as_rows() -> None:
    scores = PromptScores(range(100), first=51, top=0, rows=8)
    assert scores.limit(0, 40) == 40
    assert scores.limit(40, 40) == 18  # ten without logits, eight with
    assert scores.limit(60, 40) == 8
    assert scores.wanted(40, 18) == range(10, 18)
    assert scores.wanted(0, 40) == range(50, 40)
    assert not scores.wanted(0, 40)


def test_logits_that_are_not_finite_end_the_request(tmp_path: Path) -> None:
    def spoil(call: Call, logits: Logits) -> None:
        if call.kind == "prefill" and len(call.tokens[0]) > 10:
            logits[0, 3] = np.inf

    worker = make_worker(tmp_path, make_session(edit=spoil))
    answer = ask(worker, LONG, prompt_logprobs=0, max_tokens=3)
    assert isinstance(answer.error, NonFiniteLogitsError)
    assert "token 9 of the prompt" in str(answer.error)
    load = worker.load()
    worker.close()
    assert (load.running, load.kv_tokens_idle) == (0, 0)


@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("slots", [1, 4])
def test_scores_are_sums_of_log_probabilities(tmp_path: Path, logprobs: int | None, slots: int) -> None:
    greedy = continuation(CONTEXT_IDS, 4, VOCAB)
    continuations = [(7,), (9, 10, 11), greedy, [*greedy[:3], (greedy[3] + 1) % VOCAB], (9, 10, 11)]
    worker = make_worker(tmp_path, make_session(slots=slots))
    found = ask_scores(worker, CONTEXT_IDS, continuations, logprobs)
    worker.close()
    for result, tokens in zip(found, continuations, strict=True):
        expected = scored([*CONTEXT_IDS, *tokens], len(CONTEXT_IDS))
        assert result.logprob == pytest.approx(sum(expected))
        assert (result.token_count, result.context_tokens) == (len(tokens), len(CONTEXT_IDS))
        if logprobs is None:
            assert result.logprobs == ()
            continue
        assert [place.chosen.logprob for place in result.logprobs] == pytest.approx(expected)
        assert [place.chosen.token_id for place in result.logprobs] == list(tokens)
        assert [len(place.top) for place in result.logprobs] == [logprobs] * len(tokens)
    assert [result.is_greedy for result in found] == [False, False, True, False, False]


def test_the_context_is_computed_once_for_all(tmp_path: Path) -> None:
    session = make_session(slots=2)
    worker = make_worker(tmp_path, session, config=EngineConfig(prefill_chunk=64))
    found = ask_scores(worker, CONTEXT_IDS, [(7, 8, 9), (10, 11, 12), (13,)])
    load = worker.load()
    worker.close()
    # One token of the context is computed again: what follows it is the continuation's first. The last one
    # has no other token, and a row never runs alone.
    assert [len(call.token_ids) for call in session.calls] == [22, 3, 2]
    assert [result.cached_tokens for result in found] == [0, 19, 18]
    assert load.generated_tokens == 0


def test_scores_and_streams_share_the_engine(tmp_path: Path) -> None:
    started, go = threading.Event(), threading.Event()

    def before(call: Call) -> None:
        if call.kind == "decode":
            started.set()
            assert go.wait(PATIENCE_S)

    session = make_session(slots=2, before_call=before)
    worker = make_worker(tmp_path, session, config=EngineConfig(prefill_chunk=4))
    sink = Sink()
    worker.submit(request("stream", (1, 2, 3), max_tokens=40, ignore_eos=True), sink)
    assert started.wait(PATIENCE_S)
    asked = (TokenPrompt((7, 8, 9, 10, 11, 12)), TokenPrompt((20,)))
    worker.submit_score(ScoreRequest("s", TokenPrompt(CONTEXT_IDS), asked), sink)
    go.set()
    answers = sink.answers("stream", "s")
    worker.close()
    assert answers["stream"].ids == continuation((1, 2, 3), 40, VOCAB)
    found = {update.index: update.score for update in answers["s"].updates}
    assert found[0] is not None
    assert found[0].logprob == pytest.approx(
        sum(scored([*CONTEXT_IDS, 7, 8, 9, 10, 11, 12], len(CONTEXT_IDS)))
    )
    kinds = [call.kind for call in session.calls]
    assert kinds.count("prefill") >= 8
    assert ["prefill", "prefill"] not in [kinds[i : i + 2] for i in range(len(kinds))], (
        "a score held up a stream for more than a chunk"
    )


def test_an_abort_ends_all_continuations(tmp_path: Path) -> None:
    started, go = threading.Event(), threading.Event()

    def before(_call: Call) -> None:
        started.set()
        assert go.wait(PATIENCE_S)

    worker = make_worker(tmp_path, make_session(before_call=before))
    sink = Sink()
    continuations = tuple(TokenPrompt((i,)) for i in range(5))
    abort = worker.submit_score(ScoreRequest("s", TokenPrompt(CONTEXT_IDS), continuations), sink)
    assert started.wait(PATIENCE_S)
    abort()
    go.set()
    updates = sink.answers("s")["s"].updates
    load = worker.load()
    worker.close()
    reasons = {u.completion.reason for u in updates if u.completion is not None}
    assert reasons == {FinishReason.CANCELLED}
    assert (load.running, load.waiting) == (0, 0)


def test_texts_are_split_where_the_context_ends(tmp_path: Path) -> None:
    worker = make_worker(tmp_path)
    for context, text in (
        ("hello there", " who is it"),
        ("hello there ", "who is it"),
        ("hello  \n ", "there"),
        ("hel", "lo there"),
    ):
        [found] = ask_scores(worker, TextPrompt(context), [TextPrompt(text)], logprobs=0)
        # The definition: white space moves over, both are encoded, and the context's number of tokens is cut
        # off.
        before = TOKENIZER.encode(context.rstrip(), add_special_tokens=True)
        whole = TOKENIZER.encode(context + text, add_special_tokens=True)
        after = whole[len(before) :]
        assert [place.chosen.token_id for place in found.logprobs] == list(after)
        assert found.logprob == pytest.approx(sum(scored([*before, *after], len(before))))
    worker.close()


def test_text_behind_tokens_is_encoded_by_itself(tmp_path: Path) -> None:
    worker = make_worker(tmp_path)
    [found] = ask_scores(worker, CONTEXT_IDS, [TextPrompt("hello there")], logprobs=0)
    worker.close()
    assert tuple(place.chosen.token_id for place in found.logprobs) == TOKENIZER.encode(
        "hello there", add_special_tokens=False
    )


def test_an_empty_context_is_the_token_that_begins_a_text(tmp_path: Path) -> None:
    for ids, expected in (
        ({"bos_token_id": 3, "eos_token_id": 4}, 3),
        ({"bos_token_id": None, "eos_token_id": 4}, 4),
    ):
        worker = make_worker(tmp_path, **ids)
        [found] = ask_scores(worker, (), [(7, 8, 9)])
        worker.close()
        assert found.logprob == pytest.approx(sum(scored([expected, 7, 8, 9], 1)))
    worker = make_worker(tmp_path, bos_token_id=None, eos_token_id=None)
    with pytest.raises(InvalidRequestError, match="context: found a context without tokens"):
        ask_scores(worker, (), [(7,)])
    worker.close()


def test_the_context_holds_all_but_the_last_token(tmp_path: Path) -> None:
    worker = make_worker(tmp_path)
    whole = [i % VOCAB for i in range(CONTEXT + 1)]
    [found] = ask_scores(worker, whole[:-4], [whole[-4:]])
    assert found.logprob == pytest.approx(sum(scored(whole, len(whole) - 4)))
    with pytest.raises(InvalidRequestError) as caught:
        ask_scores(worker, [1, *whole[:-4]], [whole[-4:], (1,)])
    worker.close()
    [violation] = caught.value.violations
    assert violation.field == "continuations[0]"
    assert f"{CONTEXT + 2} together; the context holds {CONTEXT}" in violation.description


def test_a_context_that_is_too_long_alone_is_encoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(tmp_path)
    encoded: list[str] = []
    encode = Tokenizer.encode

    def count(self: Tokenizer, text: str, add_special_tokens: bool, **rest: Any) -> object:
        encoded.append(text)
        return encode(self, text, add_special_tokens, **rest)

    monkeypatch.setattr(Tokenizer, "encode", count)
    long = TextPrompt("hello " * CONTEXT + "there, who")
    with pytest.raises(InvalidRequestError, match=rf"context: found \d+ tokens; the context holds {CONTEXT}"):
        ask_scores(worker, long, [TextPrompt(" is it")] * 256)
    worker.close()
    assert encoded == [long.text]


@pytest.mark.parametrize(
    ("context", "continuations", "logprobs", "fields"),
    [
        ((1,), [], None, ["continuations"]),
        ((1,), [(1,)] * 257, None, ["continuations"]),
        ((1,), [(2,)], 21, ["logprobs"]),
        ((1,), [(2,)], -1, ["logprobs"]),
        ((1,), [(), TextPrompt("")], None, ["continuations[0]", "continuations[1]"]),
        ((VOCAB,), [(1,)], None, ["context.tokens"]),
        ((1,), [(VOCAB,), (2,)], None, ["continuations[0].tokens"]),
        (TextPrompt("\ud800"), [(1,), (2,)], None, ["context.text"]),
        (TextPrompt("a"), [TextPrompt("\ud800")], None, ["continuations[0].text"]),
    ],
)
def test_every_fault_is_named_where_it_is(
    tmp_path: Path, context: object, continuations: list[object], logprobs: int | None, fields: list[str]
) -> None:
    worker = make_worker(tmp_path)
    with pytest.raises(InvalidRequestError) as caught:
        ask_scores(worker, context, continuations, logprobs)  # type: ignore[arg-type]
    worker.close()
    assert [violation.field for violation in caught.value.violations] == fields


def test_lists_of_log_probabilities_are_bounded(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, make_session(context=10_000, slots=1), config=EngineConfig())
    long = [1] * 7_000
    for refused in (
        lambda: ask_scores(worker, (1,), [long], 20),
        lambda: worker.submit(request("r", long, prompt_logprobs=20, max_tokens=1), Sink()),
    ):
        with pytest.raises(InvalidRequestError, match=r"(147000|146979) log-probabilities"):
            refused()
    worker.close()


def test_more_continuations_than_the_queue_takes_are_refused(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, config=EngineConfig(max_waiting=3))
    with pytest.raises(InvalidRequestError, match="continuations: found 4; this worker queues 3"):
        ask_scores(worker, (1, 2), [(3,)] * 4)
    assert len(ask_scores(worker, (1, 2), [(3,)] * 3)) == 3
    worker.close()


def test_a_graph_that_cannot_is_said_to_be_so(tmp_path: Path) -> None:
    session = make_session()
    session.capabilities = replace(session.capabilities, prompt_logits=False)
    worker = make_worker(tmp_path, session)
    with pytest.raises(UnsupportedError, match="logits for the last token of a call only"):
        ask_scores(worker, (1, 2), [(3,)])
    with pytest.raises(UnsupportedError):
        worker.submit(request("r", (1, 2), prompt_logprobs=0), Sink())
    assert any("no scores" in limit for limit in worker.model_info().limits)
    assert ask(worker, (1, 2), max_tokens=3, ignore_eos=True).ids == continuation((1, 2), 3, VOCAB)
    worker.close()
