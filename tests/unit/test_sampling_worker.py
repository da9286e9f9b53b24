"""Every sampling field through a whole worker: what it does, what it refuses, and that neighbours never
notice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_serve.artifact.manifest import GenerationDefaults
from llorch_serve.config import EngineConfig
from llorch_serve.engine.payoff import Payoff
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import InvalidRequestError
from llorch_serve.requests import TextPrompt
from llorch_serve.sampling.logprobs import LOWEST_LOGPROB
from llorch_serve.sampling.params import MAX_SEED, MAX_WINDOW
from llorch_serve.sampling.ranges import MAX_BIASED_IDS
from llorch_serve.worker.worker import Worker
from support.builders.checkpoints import EOS_ID, TURN_END_ID, tiny_llama_config
from support.fakes.session import FakeSession, next_logits
from support.harness.worker import TOKENIZER, VOCAB, Answer, Sink, ask, make_session, make_worker, request

PROMPT = (40, 41, 42, 43)
LIKED = 77
"""What the model always wants to say next, by far."""
SECOND = 78
"""And next to that."""


@dataclass
class Model:
    worker: Worker
    session: FakeSession

    def ask(self, **sampling: Any) -> Answer:
        return ask(self.worker, PROMPT, **{"max_tokens": 12, "ignore_eos": True, **sampling})


def opinionated(logits: np.ndarray) -> None:
    """LIKED at 10, SECOND at 9, everything else far below and not quite equal."""
    logits /= 100
    logits[..., LIKED], logits[..., SECOND] = 10, 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    session = make_session(edit=lambda _call, logits: opinionated(logits))
    worker = make_worker(tmp_path_factory.mktemp("artifact"), session)
    yield Model(worker, session)
    worker.close()


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The fake session's own logits, which are noise."""
    session = make_session()
    worker = make_worker(tmp_path_factory.mktemp("artifact"), session)
    yield Model(worker, session)
    worker.close()


# Effects.


def test_bias_makes_a_token_certain_or_impossible(model: Model) -> None:
    assert model.ask(logit_bias={5: 100.0}).ids == [5] * 12
    assert model.ask(logit_bias={LIKED: -100.0}).ids == [SECOND] * 12
    assert model.ask(logit_bias={LIKED: -0.9}).ids == [LIKED] * 12
    assert model.ask(logit_bias={LIKED: -1.1}).ids == [SECOND] * 12
    assert model.ask(logit_bias={SECOND: 1.1, 5: 2.0}).ids == [SECOND] * 12


def test_presence_counts_once_and_frequency_every_time(model: Model) -> None:
    # One and a half is taken from LIKED at first, then from both: LIKED leads again.
    assert model.ask(presence_penalty=1.5).ids == [LIKED, SECOND] + [LIKED] * 10
    # 0.3 a time: LIKED falls below SECOND's 9 at its fourth time, and they take turns from there.
    assert model.ask(frequency_penalty=0.3).ids[:5] == [LIKED] * 4 + [SECOND]
    assert model.ask(frequency_penalty=0.3).ids[5:9] == [LIKED, SECOND, LIKED, SECOND]
    assert model.ask(frequency_penalty=2.0, max_tokens=4).ids == [LIKED, SECOND, LIKED, SECOND]


def test_negative_penalties_encourage(model: Model) -> None:
    base = {"logit_bias": {SECOND: 1.5}, "max_tokens": 4}
    assert model.ask(**base).ids == [SECOND] * 4
    # SECOND leads by a half, and more with every time that it is said.
    assert model.ask(**base, frequency_penalty=-1.0).ids == [SECOND] * 4
    assert model.ask(**base, frequency_penalty=1.0).ids == [SECOND, LIKED, SECOND, LIKED]


def test_presence_and_frequency_look_at_the_answer_and_repetition_at_the_prompt_too(model: Model) -> None:
    said = (*PROMPT, LIKED)
    assert ask(model.worker, said, presence_penalty=2.0, max_tokens=1).ids == [LIKED]
    assert ask(model.worker, said, frequency_penalty=2.0, max_tokens=1).ids == [LIKED]
    assert ask(model.worker, said, repetition_penalty=1.5, max_tokens=1).ids == [SECOND]


@pytest.mark.parametrize(
    ("window", "expected"), [(0, LIKED), (1, LIKED), (2, SECOND), (100, SECOND), (-1, SECOND), (None, SECOND)]
)
def test_the_window_bounds_how_far_repetition_looks(model: Model, window: int | None, expected: int) -> None:
    answer = ask(model.worker, (LIKED, 40), repetition_penalty=1.5, repeat_last_n=window, max_tokens=1)
    assert answer.ids == [expected]


def test_the_window_slides_over_the_answer(model: Model) -> None:
    # What was said two tokens ago is forgotten, so each is free again at its turn.
    assert model.ask(presence_penalty=1.5, repeat_last_n=1).ids == [LIKED, SECOND] * 6
    assert model.ask(presence_penalty=1.5, repeat_last_n=0).ids == [LIKED] * 12
    assert model.ask(frequency_penalty=2.0, repeat_last_n=0).ids == [LIKED] * 12


def test_temperature_spreads_and_filters_narrow(model: Model) -> None:
    hot = {"temperature": 2.0, "seed": 3, "max_tokens": 40}
    assert len(set(model.ask(**hot).ids)) > 2
    assert set(model.ask(**hot, top_k=1).ids) == {LIKED}
    assert set(model.ask(**hot, top_k=2).ids) == {LIKED, SECOND}
    assert set(model.ask(**hot, top_p=1e-4).ids) == {LIKED}
    assert set(model.ask(**hot, min_p=0.5).ids) == {LIKED, SECOND}
    assert set(model.ask(**hot, min_p=1.0).ids) == {LIKED}
    assert set(model.ask(temperature=1e-8, seed=3).ids) == {LIKED}


def test_typical_prefers_what_is_as_surprising_as_expected(model: Model) -> None:
    # 0.73 and 0.27 have 0.58 nats: SECOND's surprise of 1.31 is 0.73 away, LIKED's of 0.31 only 0.27.
    narrow = {"temperature": 1.0, "top_k": 2, "seed": 1}
    assert set(model.ask(**narrow, typical_p=0.7).ids) == {LIKED}
    assert set(model.ask(**narrow, typical_p=0.8, max_tokens=40).ids) == {LIKED, SECOND}
    # With many rare tokens the expected surprise is large, and the likeliest token is the least typical.
    assert LIKED not in model.ask(temperature=2.0, seed=1, typical_p=1e-4, max_tokens=40).ids


def test_seeds_decide(hashed: Model) -> None:
    free = {"temperature": 1.0, "max_tokens": 12}
    assert hashed.ask(**free, seed=1).ids == hashed.ask(**free, seed=1).ids != hashed.ask(**free, seed=2).ids


def test_stops_end_and_min_tokens_holds_them_off_exactly(model: Model) -> None:
    asked = {"ignore_eos": False, "stop_token_ids": (LIKED,)}
    assert model.ask(**asked).ids == []
    held = model.ask(**asked, min_tokens=4)
    assert held.ids == [SECOND] * 4
    assert (held.completion.reason, held.completion.generated_tokens) == (FinishReason.STOP, 4)
    assert held.completion.stop_matched == TOKENIZER.token_text(LIKED)
    assert model.ask(**asked, min_tokens=4, max_tokens=4).completion.reason is FinishReason.LENGTH


@pytest.mark.parametrize("stop", [EOS_ID, TURN_END_ID])
def test_every_stop_token_of_the_model_counts_unless_ignored(model: Model, stop: int) -> None:
    assert model.worker.model_info().stop_token_ids == (EOS_ID, TURN_END_ID)
    wish = {"logit_bias": {stop: 100.0}}
    assert model.ask(**wish, ignore_eos=False).ids == []
    assert model.ask(**wish, ignore_eos=False, min_tokens=4).ids == [LIKED] * 4
    assert model.ask(**wish, ignore_eos=True).ids == [stop] * 12
    # Ignored as the model's, it is still one if the request names it itself; min_tokens then holds off that
    # one alone.
    assert model.ask(**wish, ignore_eos=True, stop_token_ids=(stop,), min_tokens=3).ids == [LIKED] * 3
    other = EOS_ID + TURN_END_ID - stop
    both = {stop: 90.0, other: 100.0}
    assert (
        model.ask(logit_bias=both, ignore_eos=True, stop_token_ids=(stop,), min_tokens=3, max_tokens=4).ids
        == [other] * 4
    )


def test_special_tokens_are_hidden_or_shown(model: Model) -> None:
    wish = {"logit_bias": {TURN_END_ID: 100.0}, "max_tokens": 2}
    assert model.ask(**wish).text == ""
    assert model.ask(**wish, keep_special_tokens=True).text == "<|turn_end|>" * 2
    assert model.ask(**wish, keep_special_tokens=True, ignore_eos=False).text == ""
    cut = model.ask(**wish, keep_special_tokens=True, stop=("turn_end|><|",))
    assert (cut.text, cut.completion.stop_matched) == ("<|", "turn_end|><|")


def test_recommended_values_are_used_and_overridden(tmp_path: Path) -> None:
    session = make_session(edit=lambda _call, logits: opinionated(logits))
    generation = GenerationDefaults(temperature=1.0, typical_p=0.7, top_k=2, repeat_last_n=1)
    worker = make_worker(tmp_path, session, generation=generation)
    try:
        asked = {"temperature": None, "seed": 4, "max_tokens": 30, "ignore_eos": True}
        assert set(ask(worker, PROMPT, **asked).ids) == {LIKED}
        assert set(ask(worker, PROMPT, **asked, typical_p=1.0).ids) == {LIKED, SECOND}
        penal = {"repetition_penalty": 1.5, "max_tokens": 1}
        assert ask(worker, (LIKED, 40), **penal).ids == [LIKED]
        assert ask(worker, (LIKED, 40), **penal, repeat_last_n=2).ids == [SECOND]
    finally:
        worker.close()


# Log-probabilities.


def expected_logprobs(prompt: Sequence[int], ids: Sequence[int]) -> list[np.ndarray]:
    found = []
    for place in range(len(ids)):
        logits = next_logits((*prompt, *ids[:place]), VOCAB).astype(np.float64)
        found.append(logits - np.log(np.exp(logits).sum()))
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.3, "seed": 4, "top_k": 30},
        {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.7, "logit_bias": {9: 3.0}, "min_tokens": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("top", [0, 3, 20])
def test_logprobs_are_the_models_own_before_anything_is_applied(
    hashed: Model, sampling: dict[str, Any], top: int
) -> None:
    plain = hashed.ask(**sampling)
    answer = hashed.ask(**sampling, logprobs=top)
    assert answer.ids == plain.ids
    assert not any(update.logprobs for update in plain.updates)
    assert all(len(update.logprobs) == len(update.token_ids) for update in answer.updates)
    places = [place for update in answer.updates for place in update.logprobs]
    assert [place.chosen.token_id for place in places] == answer.ids
    for place, exact in zip(places, expected_logprobs(PROMPT, answer.ids), strict=True):
        assert place.chosen.logprob == pytest.approx(exact[place.chosen.token_id], abs=1e-6)
        assert place.chosen.raw == TOKENIZER.token_bytes(place.chosen.token_id)
        order = np.argsort(-exact, kind="stable")[:top]
        assert [token.token_id for token in place.top] == order.tolist()
        assert [token.logprob for token in place.top] == pytest.approx(exact[order], abs=1e-6)


def test_a_stop_token_is_in_no_list_of_logprobs_and_a_stop_strings_tokens_are(model: Model) -> None:
    ended = model.ask(ignore_eos=False, stop_token_ids=(LIKED,), logprobs=1)
    assert [u.logprobs for u in ended.updates] == [()]
    text = TOKENIZER.decode([LIKED], keep_special_tokens=False)
    cut = model.ask(stop=(text * 2,), logprobs=1)
    assert [len(u.logprobs) for u in cut.updates] == [1, 1]
    assert cut.text == ""
    assert cut.completion.stop_logprobs is None


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "seed": 4, "logit_bias": {9: 3.0}}], ids=str)
def test_a_stop_tokens_logprobs_come_with_the_completion(hashed: Model, sampling: dict[str, Any]) -> None:
    ids = hashed.ask(**sampling).ids
    length = next(n for n in range(2, 12) if ids[n] not in ids[:n])
    ending = {"ignore_eos": False, "stop_token_ids": (ids[length],)}
    answer = hashed.ask(**sampling, **ending, logprobs=2)
    assert answer.ids == ids[:length]
    assert sum(len(update.logprobs) for update in answer.updates) == length
    place = answer.completion.stop_logprobs
    assert place is not None
    exact = expected_logprobs(PROMPT, ids)[length]
    assert place.chosen.token_id == ids[length]
    assert place.chosen.logprob == pytest.approx(exact[ids[length]], abs=1e-6)
    assert place.chosen.raw == TOKENIZER.token_bytes(ids[length])
    assert [token.token_id for token in place.top] == np.argsort(-exact, kind="stable")[:2].tolist()
    assert hashed.ask(**sampling, **ending).completion.stop_logprobs is None
    assert hashed.ask(**sampling, logprobs=2).completion.stop_logprobs is None


def test_hopeless_tokens_have_finite_logprobs(tmp_path: Path) -> None:
    def extreme(_call: object, logits: np.ndarray) -> None:
        logits[...] = -3e38
        logits[..., 5] = 3e38

    worker = make_worker(tmp_path, make_session(edit=extreme))
    try:
        answer = ask(worker, PROMPT, stop_token_ids=(5,), min_tokens=3, max_tokens=3, logprobs=2)
    finally:
        worker.close()
    places = [place for update in answer.updates for place in update.logprobs]
    assert [place.chosen.logprob for place in places] == [LOWEST_LOGPROB] * 3
    assert [[token.logprob for token in place.top] for place in places] == [[0.0, LOWEST_LOGPROB]] * 3


# Guesses, neighbours.

TRYING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 11, "top_p": 0.9},
    {"repetition_penalty": 1.4, "repeat_last_n": 5},
    {"frequency_penalty": 0.9, "presence_penalty": 0.4},
    {"temperature": 1e-8, "top_p": 1e-4, "top_k": 10**9, "seed": 1},
    {"temperature": 0.9, "seed": 2, "logit_bias": {SECOND: 1.0}, "typical_p": 0.9, "top_k": 3},
    {"temperature": 2.0, "seed": 6, "min_p": 0.001, "logprobs": 5},
    {"min_tokens": 6, "stop_token_ids": (LIKED,), "ignore_eos": False},
    {"temperature": 1.2, "seed": 8, "frequency_penalty": -0.5, "repeat_last_n": 3, "logprobs": 0},
]


def everything(answer: Answer) -> tuple[object, ...]:
    places = [place for update in answer.updates for place in update.logprobs]
    return answer.ids, answer.text, places, answer.completion.reason


def test_guesses_change_nothing_but_the_number_of_steps(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a check of a fake session costs is the machine's noise.
    monkeypatch.setattr(Payoff, "worth", lambda *_args, **_kwargs: True)
    session = make_session(edit=lambda _call, logits: opinionated(logits))
    guessing = make_worker(tmp_path, session, config=EngineConfig(prefill_chunk=4, lookup=6))
    prompt = (LIKED, SECOND, LIKED, LIKED, SECOND, LIKED)
    accepted = []
    try:
        for sampling in TRYING:
            asked = {"max_tokens": 20, "ignore_eos": True, **sampling}
            guessed = ask(guessing, prompt, **asked)
            assert everything(guessed) == everything(ask(model.worker, prompt, **asked)), sampling
            accepted.append(guessed.completion.accepted_tokens)
    finally:
        guessing.close()
    assert sum(count > 0 for count in accepted) == 8


@pytest.mark.parametrize("neighbours", [1, 2, 7, 31])
def test_an_answer_is_the_same_beside_any_others(tmp_path: Path, hashed: Model, neighbours: int) -> None:
    # So many slots that all of them decode together.
    worker = make_worker(tmp_path, make_session(slots=32))
    try:
        asked = [
            {"max_tokens": 10 + i % 3, "ignore_eos": True, **TRYING[i % len(TRYING)]}
            for i in range(1 + neighbours)
        ]
        sink = Sink()
        for index, sampling in enumerate(asked):
            worker.submit(request(f"r{index}", (50 + index, 9), **sampling), sink)
        together = sink.answers(*(f"r{index}" for index in range(len(asked))))
    finally:
        worker.close()
    for index, sampling in enumerate(asked):
        alone = ask(hashed.worker, (50 + index, 9), **sampling)
        assert everything(together[f"r{index}"]) == everything(alone), sampling


# Refusals.

NUMBERS = [math.nan, math.inf, -math.inf]
REFUSED: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, *NUMBERS],
    "top_k": [-1],
    "top_p": [0.0, -0.5, 1.01, *NUMBERS],
    "min_p": [-0.01, 1.01, *NUMBERS],
    "typical_p": [0.0, -0.5, 1.01, *NUMBERS],
    "repetition_penalty": [0.0, -1.0, 2.01, *NUMBERS],
    "presence_penalty": [-2.01, 2.01, *NUMBERS],
    "frequency_penalty": [-2.01, 2.01, *NUMBERS],
    "repeat_last_n": [-2, MAX_WINDOW + 1],
    "logit_bias[3]": [{3: 100.1}, {3: -100.1}, *({3: number} for number in NUMBERS)],
    f"logit_bias[{VOCAB}]": [{VOCAB: 1.0}],
    "logit_bias[99999]": [{99999: 0.0}],
    "logit_bias[-1]": [{-1: 1.0}],
    "logit_bias": [dict.fromkeys(range(MAX_BIASED_IDS + 1), 1.0)],
    "seed": [-1, MAX_SEED + 1],
    "max_tokens": [-1],
    "min_tokens": [-1],
    "stop": [("x",) * 17],
    "stop[1]": [("x", ""), ("x", "é" * 513), ("x", "\ud800")],
    "stop_token_ids[1]": [(3, VOCAB), (3, -1)],
    "logprobs": [-1, 21],
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, value) for f, values in REFUSED.items() for value in values]
)
def test_a_value_out_of_range_is_refused_by_name_while_a_stream_goes_on(
    hashed: Model, field: str, value: Any
) -> None:
    sink = Sink()
    hashed.worker.submit(request("neighbour", PROMPT, max_tokens=6, ignore_eos=True), sink)
    with pytest.raises(InvalidRequestError) as caught:
        hashed.worker.submit(request("bad", PROMPT, **{field.partition("[")[0]: value}), Sink())
    assert [v.field for v in caught.value.violations] == [f"sampling.{field}"]
    assert "expected" in caught.value.violations[0].description
    assert len(sink.answers("neighbour")["neighbour"].ids) == 6


def test_values_at_the_edges_are_accepted(hashed: Model) -> None:
    lowest = {"temperature": 1e-8, "top_k": 0, "top_p": 1e-4, "min_p": 0.0, "typical_p": 1e-9, "seed": 0}
    low = {
        "repetition_penalty": 1e-9,
        "presence_penalty": -2.0,
        "frequency_penalty": -2.0,
        "repeat_last_n": -1,
    }
    highest = {"temperature": 2.0, "top_k": 2**31 - 1, "top_p": 1.0, "min_p": 1.0, "typical_p": 1.0}
    high = {"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "seed": MAX_SEED}
    bias = {"logit_bias": {0: -100.0, VOCAB - 1: 100.0}, "logprobs": 20, "repeat_last_n": MAX_WINDOW}
    assert len(hashed.ask(**lowest, **low, logit_bias={}, logprobs=0).ids) == 12
    assert len(hashed.ask(**highest, **high, **bias).ids) == 12


def test_a_flood_of_bad_biases_is_told_in_few_lines(hashed: Model) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        hashed.ask(logit_bias={VOCAB + i: math.nan for i in range(MAX_BIASED_IDS)})
    assert len(caught.value.violations) == 2 * 17
    assert "1008 more" in caught.value.violations[16].description


def test_every_bad_field_is_told_at_once(hashed: Model) -> None:
    bad = {"typical_p": 0.0, "presence_penalty": 3.0, "frequency_penalty": -3.0, "repeat_last_n": -2}
    with pytest.raises(InvalidRequestError) as caught:
        hashed.ask(**bad, logit_bias={VOCAB: 1.0, 4: 101.0}, logprobs=21)
    named = {*bad, f"logit_bias[{VOCAB}]", "logit_bias[4]", "logprobs"}
    assert {v.field for v in caught.value.violations} == {f"sampling.{name}" for name in named}


@pytest.mark.parametrize("prompt", [(), []])
def test_an_empty_prompt_is_refused_and_the_next_request_works(hashed: Model, prompt: Sequence[int]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask(hashed.worker, prompt)
    assert [v.field for v in caught.value.violations] == ["input"]
    # The tokenizer puts BOS before an empty text, which is a prompt.
    assert len(ask(hashed.worker, TextPrompt(""), max_tokens=2, ignore_eos=True).ids) == 2


def test_max_tokens_0_is_an_empty_answer_and_the_next_request_works(hashed: Model) -> None:
    answer = hashed.ask(max_tokens=0, logprobs=3)
    assert (answer.ids, answer.text, answer.completion.reason) == ([], "", FinishReason.LENGTH)
    assert answer.completion.generated_tokens == 0
    assert len(hashed.ask().ids) == 12


def test_ids_beyond_the_tokenizers_are_neither_drawn_nor_taken(tmp_path: Path) -> None:
    """A padded table: its rows beyond the tokenizer's ids are the likeliest."""

    def padded(_call: object, logits: np.ndarray) -> None:
        opinionated(logits)
        logits[..., VOCAB:] = 50

    rows = VOCAB + 8
    config = tiny_llama_config(vocab_size=rows)
    worker = make_worker(tmp_path, make_session(vocab_size=rows, edit=padded), model=config)
    try:
        assert ask(worker, PROMPT, max_tokens=3, ignore_eos=True).ids == [LIKED] * 3
        for field, value in (("logit_bias", {VOCAB: 1.0}), ("stop_token_ids", (VOCAB,))):
            with pytest.raises(InvalidRequestError, match=f"an id of the vocabulary, 0 to {VOCAB - 1}"):
                worker.submit(request("r", PROMPT, **{field: value}), Sink())
    finally:
        worker.close()
