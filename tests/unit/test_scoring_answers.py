"""Several answers to one request: what they share, what each has for itself, and how they end."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llorch_serve.config import EngineConfig
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import InvalidRequestError, NonFiniteLogitsError, QueueFullError
from llorch_serve.requests import Completion, GenerationUpdate, TextPrompt, option_violations
from llorch_serve.sampling.params import MAX_SEED
from llorch_serve.worker.answers import answer_seed
from llorch_serve.worker.worker import Worker
from support.fakes.session import GREEDY, Call, FakeSession, Logits, continuation, next_logits
from support.harness.worker import (
    PATIENCE_S,
    TOKENIZER,
    VOCAB,
    Sink,
    make_session,
    make_worker,
    request,
    script,
    split_options,
)

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def by_index(updates: list[GenerationUpdate]) -> dict[int, list[GenerationUpdate]]:
    found: dict[int, list[GenerationUpdate]] = {}
    for update in updates:
        found.setdefault(update.index, []).append(update)
    return found


def ids_of(updates: list[GenerationUpdate]) -> dict[int, list[int]]:
    return {i: [t for u in part for t in u.token_ids] for i, part in by_index(updates).items()}


def completions(updates: list[GenerationUpdate]) -> dict[int, Completion]:
    return {u.index: u.completion for u in updates if u.completion is not None}


def ask_all(worker: Worker, prompt: list[int], **sampling: object) -> list[GenerationUpdate]:
    sink = Sink()
    worker.submit(request("r", prompt, **sampling), sink)
    return sink.answers("r")["r"].updates


def drawn(prompt: list[int], count: int, seed: int) -> list[int]:
    return continuation(prompt, count, VOCAB, params=replace(GREEDY, temperature=1.0, seed=seed))


@pytest.mark.parametrize("slots", [1, 2, 4, 16])
@pytest.mark.parametrize("n", [2, 5, 16])
def test_each_answer_is_the_one_of_its_seed_however_few_slots_there_are(
    tmp_path: Path, slots: int, n: int
) -> None:
    worker = make_worker(tmp_path, make_session(slots=slots))
    updates = ask_all(worker, PROMPT, n=n, seed=7, temperature=1, max_tokens=6, ignore_eos=True)
    worker.close()
    seeds = [(7 + i * 0x9E3779B97F4A7C15) % 2**63 for i in range(n)]
    assert ids_of(updates) == {i: drawn(PROMPT, 6, seed) for i, seed in enumerate(seeds)}
    assert {i: c.seed for i, c in completions(updates).items()} == dict(enumerate(seeds))
    assert len({tuple(ids) for ids in ids_of(updates).values()}) == n


def test_the_first_answer_is_the_only_one_of_n_1(tmp_path: Path) -> None:
    worker = make_worker(tmp_path)
    several = ask_all(worker, PROMPT, n=4, seed=3, temperature=1, max_tokens=6, ignore_eos=True)
    one = ask_all(worker, PROMPT, seed=3, temperature=1, max_tokens=6, ignore_eos=True)
    worker.close()
    assert ids_of(several)[0] == ids_of(one)[0] == drawn(PROMPT, 6, 3)


@pytest.mark.parametrize("seed", [0, 1, MAX_SEED])
def test_seeds_of_answers_are_seeds_and_differ(seed: int) -> None:
    seeds = [answer_seed(seed, index) for index in range(16)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 16
    assert all(0 <= s <= MAX_SEED for s in seeds)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_prompt_is_computed_once_and_counted_once(tmp_path: Path, prefix_cache: bool) -> None:
    session = make_session()
    worker = make_worker(tmp_path, session, config=EngineConfig(prefill_chunk=4, prefix_cache=prefix_cache))
    updates = ask_all(worker, PROMPT, n=4, max_tokens=6, ignore_eos=True)
    load = worker.load()
    worker.close()
    assert sum(len(call.token_ids) for call in session.calls if call.kind == "prefill") == len(PROMPT)
    assert set(map(tuple, ids_of(updates).values())) == {tuple(continuation(PROMPT, 6, VOCAB))}
    found = completions(updates)
    assert [found[i].prompt_tokens for i in range(4)] == [len(PROMPT), 0, 0, 0]
    assert [found[i].cached_tokens for i in range(4)] == [0, 0, 0, 0]
    assert [found[i].generated_tokens for i in range(4)] == [6, 6, 6, 6]
    assert (load.prompt_tokens, load.cached_tokens, load.generated_tokens) == (len(PROMPT), 0, 24)


def test_answers_start_beside_each_other_not_one_after_the_other(tmp_path: Path) -> None:
    session = make_session(slots=4)
    worker = make_worker(tmp_path, session)
    ask_all(worker, PROMPT, n=4, max_tokens=20, ignore_eos=True)
    worker.close()
    assert max(len(call.slots) for call in session.calls) == 4
    decodes = [call for call in session.calls if call.kind == "decode"]
    assert len(decodes) <= 19 + 3


def test_the_request_is_over_after_its_last_answer(tmp_path: Path) -> None:
    worker = make_worker(tmp_path)
    updates = ask_all(worker, PROMPT, n=3, seed=1, temperature=1, max_tokens=6, ignore_eos=True)
    worker.submit(request("r", PROMPT, max_tokens=1), Sink())  # its id is free again
    worker.close()
    ends = [update for update in updates if update.completion is not None]
    assert [end.open_answers for end in ends] == [2, 1, 0]
    assert [end.is_last for end in ends] == [False, False, True]
    assert updates[-1] is ends[-1]


def test_a_stop_string_ends_its_own_answer_and_no_other(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, make_session(slots=2))
    answers = [drawn(PROMPT, 8, answer_seed(4, i)) for i in range(4)]
    texts = [TOKENIZER.decode(ids, keep_special_tokens=False) for ids in answers]
    stop = next(
        text[i : i + 2]
        for text in texts
        for i in range(len(text) - 1)
        if sum(text[i : i + 2] in other for other in texts) == 1 and text[i : i + 2].isprintable()
    )
    updates = ask_all(worker, PROMPT, n=4, seed=4, temperature=1, max_tokens=8, stop=(stop,), ignore_eos=True)
    worker.close()
    found = completions(updates)
    assert [found[i].reason for i in range(4)] == [
        FinishReason.STOP if stop in text else FinishReason.LENGTH for text in texts
    ]
    assert [found[i].stop_matched for i in range(4)].count(stop) == 1
    for i, text in enumerate(texts):
        shown = "".join(update.text for update in by_index(updates)[i])
        assert shown == text.split(stop)[0]


def test_an_abort_ends_all_answers_those_that_wait_too(tmp_path: Path) -> None:
    started, go = threading.Event(), threading.Event()

    def before(call: Call) -> None:
        if call.kind == "decode":
            started.set()
            assert go.wait(PATIENCE_S)

    worker = make_worker(tmp_path, make_session(slots=2, before_call=before))
    sink = Sink()
    abort = worker.submit(request("r", PROMPT, n=5, max_tokens=30, ignore_eos=True), sink)
    assert started.wait(PATIENCE_S)
    abort()
    go.set()
    updates = sink.answers("r")["r"].updates
    assert {c.reason for c in completions(updates).values()} == {FinishReason.CANCELLED}
    assert len(completions(updates)) == 5
    load = worker.load()
    worker.close()
    assert (load.running, load.waiting) == (0, 0)


def test_an_error_in_one_answer_ends_the_request_with_that_error(tmp_path: Path) -> None:
    def spoil(call: Call, logits: Logits) -> None:
        if call.kind == "decode" and len(call.slots) > 1:
            logits[1] = np.nan

    worker = make_worker(tmp_path, make_session(slots=3, edit=spoil))
    updates = ask_all(worker, PROMPT, n=4, max_tokens=20, ignore_eos=True)
    assert isinstance(updates[-1].error, NonFiniteLogitsError)
    assert updates[-1].is_last
    load = worker.load()
    worker.close()
    assert (load.running, load.waiting) == (0, 0), "answers of a failed request still run"


def test_answers_are_queued_all_or_none(tmp_path: Path) -> None:
    started, go = threading.Event(), threading.Event()

    def before(_call: Call) -> None:
        started.set()
        assert go.wait(PATIENCE_S)

    worker = make_worker(
        tmp_path, make_session(slots=1, before_call=before), config=EngineConfig(max_waiting=3)
    )
    first, second, third = Sink(), Sink(), Sink()
    worker.submit(request("a", PROMPT, max_tokens=2, ignore_eos=True), first)
    assert started.wait(PATIENCE_S)
    worker.submit(request("b", PROMPT, n=3, max_tokens=2, ignore_eos=True), second)
    worker.submit(request("c", PROMPT, n=2, max_tokens=2, ignore_eos=True), third)
    go.set()
    assert isinstance(third.answers("c")["c"].error, QueueFullError)
    assert len(completions(second.answers("b")["b"].updates)) == 3
    with pytest.raises(InvalidRequestError, match=r"sampling\.n: found 4; this worker queues 3"):
        worker.submit(request("d", PROMPT, n=4), Sink())
    worker.close()


def means(answers: list[list[int]]) -> list[float]:
    """The mean log-probability of each answer's tokens, from the definition."""
    found = []
    for ids in answers:
        sums = 0.0
        for place, token in enumerate(ids):
            logits = next_logits([*PROMPT, *ids[:place]], VOCAB).astype(np.float64)
            sums += logits[token] - np.log(np.exp(logits).sum())
        found.append(sums / len(ids))
    return found


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 6), (3, 3)])
def test_best_of_returns_the_best_by_mean_log_probability(tmp_path: Path, n: int, m: int) -> None:
    worker = make_worker(tmp_path, make_session(slots=3))
    sampling = {"seed": 11, "temperature": 1, "max_tokens": 6, "ignore_eos": True}
    updates = ask_all(worker, PROMPT, n=n, best_of=m, **sampling)
    worker.close()
    candidates = [drawn(PROMPT, 6, answer_seed(11, i)) for i in range(m)]
    scores = means(candidates)
    ranked = sorted(range(m), key=lambda i: -scores[i])
    assert [list(update.token_ids) for update in updates] == [candidates[i] for i in ranked[:n]]
    assert [update.index for update in updates] == list(range(n))
    assert [update.is_last for update in updates] == [False] * (n - 1) + [True]
    found = completions(updates)
    assert [found[i].seed for i in range(n)] == [answer_seed(11, i) for i in ranked[:n]]
    assert [found[i].prompt_tokens for i in range(n)] == [len(PROMPT)] + [0] * (n - 1)
    assert all(update.logprobs == () for update in updates), "log-probabilities that nobody asked for"


def test_the_mean_is_over_the_stop_token_too(tmp_path: Path) -> None:
    # Both answers draw one token; the second one's is a stop token, and likelier than the first one's.
    first = drawn(PROMPT, 1, 0)[0]
    worker = make_worker(tmp_path)
    updates = ask_all(
        worker,
        PROMPT,
        best_of=3,
        seed=0,
        temperature=1,
        max_tokens=1,
        stop_token_ids=tuple(i for i in range(VOCAB) if i != first),
    )
    worker.close()
    scores = means([drawn(PROMPT, 1, answer_seed(0, i)) for i in range(3)])
    best = max(range(3), key=lambda i: scores[i])
    assert updates[0].completion is not None
    assert updates[0].completion.seed == answer_seed(0, best)


def test_best_of_is_cancelled_as_a_whole(tmp_path: Path) -> None:
    started, go = threading.Event(), threading.Event()

    def before(call: Call) -> None:
        if call.kind == "decode":
            started.set()
            assert go.wait(PATIENCE_S)

    worker = make_worker(tmp_path, make_session(before_call=before))
    sink = Sink()
    abort = worker.submit(request("r", PROMPT, n=2, best_of=3, max_tokens=30, ignore_eos=True), sink)
    assert started.wait(PATIENCE_S)
    abort()
    go.set()
    updates = sink.answers("r")["r"].updates
    worker.close()
    assert {c.reason for c in completions(updates).values()} == {FinishReason.CANCELLED}
    assert updates[-1].is_last


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"best_of": 0}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"n": 2, "max_tokens": 0}, "n"),
        ({"best_of": 2, "max_tokens": 0}, "best_of"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(sampling: dict[str, int], field: str) -> None:
    answers, params = split_options(sampling)
    bad = option_violations(params, answers, vocab_size=10)
    assert [violation.field for violation in bad] == [f"sampling.{field}"]


def test_a_graph_without_reuse_computes_the_prompt_for_each_answer(tmp_path: Path) -> None:
    session = make_session()
    session.capabilities = replace(session.capabilities, prefix_reuse=False)
    worker = make_worker(tmp_path, session)
    updates = ask_all(worker, PROMPT, n=3, max_tokens=4, ignore_eos=True)
    worker.close()
    assert sum(len(call.token_ids) for call in session.calls if call.kind == "prefill") == 3 * len(PROMPT)
    assert set(map(tuple, ids_of(updates).values())) == {tuple(continuation(PROMPT, 4, VOCAB))}


@pytest.mark.parametrize("lookup", [0, 4])
def test_answers_with_guesses_and_without_a_cache_are_the_same(tmp_path: Path, lookup: int) -> None:
    expected = {i: drawn(PROMPT, 8, answer_seed(2, i)) for i in range(3)}
    sampling = {"n": 3, "seed": 2, "temperature": 1, "max_tokens": 8, "ignore_eos": True}
    for config in (EngineConfig(prefill_chunk=4, lookup=lookup), EngineConfig(kv_cache=False)):
        worker = make_worker(tmp_path, make_session(slots=2), config=config)
        assert ids_of(ask_all(worker, PROMPT, **sampling)) == expected
        worker.close()


@pytest.mark.parametrize("n", [1, 3])
def test_echo_puts_the_prompts_text_before_each_answer(tmp_path: Path, n: int) -> None:
    worker = make_worker(tmp_path)
    prompt = TextPrompt("hello there, who is it")
    ids, text = worker.tokenize(prompt)
    sink = Sink()
    worker.submit(request("r", prompt, n=n, echo=True, max_tokens=3, ignore_eos=True), sink)
    updates = sink.answers("r")["r"].updates
    worker.close()
    answer = continuation(ids, 3, VOCAB)
    parts = by_index(updates)
    assert sorted(parts) == list(range(n))
    for part in parts.values():
        joined = "".join(update.text for update in part)
        assert joined == text + TOKENIZER.decode(answer, keep_special_tokens=False)
        assert [t for update in part for t in update.token_ids] == answer
        assert [text in update.text for update in part].count(True) == 1


def test_a_stop_string_in_an_echoed_prompt_ends_nothing(tmp_path: Path) -> None:
    prompt = TextPrompt("hello STOP there")
    ids = TOKENIZER.encode("hello STOP there", add_special_tokens=True)
    session: FakeSession = make_session(rule=script(ids, [20, 21, 22]))
    worker = make_worker(tmp_path, session)
    sink = Sink()
    worker.submit(request("r", prompt, echo=True, stop=("STOP",), max_tokens=3, ignore_eos=True), sink)
    answer = sink.answers("r")["r"]
    worker.close()
    assert answer.ids == [20, 21, 22]
    assert answer.completion.reason is FinishReason.LENGTH
