"""Batches drawn from the likeliest tokens, which the session finds: only where these suffice, and with the
tokens that the sampler would have drawn from all logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llorch_serve.engine import containment
from llorch_serve.engine.capabilities import FULL
from llorch_serve.engine.sequence import Sequence as TokenSequence
from llorch_serve.errors import NonFiniteLogitsError
from llorch_serve.sampling.drawable import DrawableIds
from llorch_serve.sampling.leading import Leading, leading_candidates
from llorch_serve.sampling.sampler import SamplingRow, draw_from_few, sample_batch
from support.fakes.session import GREEDY, FakeSession, sequence_of
from support.harness.engine_run import answers, run_all

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Totals = npt.NDArray[np.float64]
LEADING = 12
VOCABULARY = 32


def leading_of(logits: Floats, temperatures: Sequence[float], count: int) -> tuple[Ids, Floats, Totals]:
    """Return what a session does, by its definition, of equal logits the last id first."""
    ids = (logits.shape[1] - 1 - np.argsort(-logits[:, ::-1], axis=1, kind="stable"))[:, :count]
    below = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    weights = np.exp(below / np.array(temperatures)[:, None])
    totals = np.where(np.isfinite(logits).all(axis=1), weights.sum(axis=1), np.nan)
    return ids, np.take_along_axis(logits, ids, axis=1), totals


@dataclass(slots=True)
class LeadingFake(FakeSession):
    """A fake that finds the likeliest tokens. led: of each step that it did so for, the temperatures; greedy:
    of each that it chose tokens for, how many; fetched: whose logits were asked for in each of both.
    """

    led: list[tuple[float, ...]] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)
    fetched: list[tuple[int, ...]] = field(default_factory=list)
    last: Floats | None = None

    def decode_greedy(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Ids:
        self.last = self.decode(token_ids, lengths)
        self.greedy.append(len(token_ids))
        self.fetched.append(())
        return self.last.argmax(axis=1)

    def decode_leading(
        self, token_ids: Sequence[int], lengths: Sequence[int], temperatures: Sequence[float]
    ) -> tuple[Ids, Floats, Totals]:
        self.last = self.decode(token_ids, lengths)
        self.led.append(tuple(temperatures))
        self.fetched.append(())
        with np.errstate(invalid="ignore"):
            return leading_of(self.last, temperatures, LEADING)

    def step_logits(self, rows: Sequence[int]) -> Floats:
        assert rows
        assert self.last is not None
        self.fetched[-1] = tuple(rows)
        return self.last[list(rows)]


def fake(**settings: Any) -> LeadingFake:
    able = replace(FULL, greedy_decode=True, leading_decode=LEADING)
    return LeadingFake(capabilities=able, **settings)


LED: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 5},
    "the most": {"top_k": LEADING - 1},
    "top-k and others": {"top_k": 8, "top_p": 0.8, "min_p": 0.05, "typical_p": 0.7},
    "top-p": {"top_p": 0.6},
    "top-p and min-p": {"top_p": 0.6, "min_p": 0.1},
    "min-p": {"min_p": 0.4},
    "cool": {"top_p": 0.9, "temperature": 0.3},
}


@pytest.mark.parametrize("params", LED.values(), ids=LED)
def test_what_is_drawn_is_what_the_sampler_draws_from_all_logits(params: dict[str, Any]) -> None:
    session = fake()
    asked = {"temperature": 1.2, **params}
    sequences = [sequence_of(str(seed), [1, 2, seed], 9, seed=seed, **asked) for seed in (3, 4, 5)]
    assert not run_all(session, sequences)
    again = [sequence_of(str(seed), [1, 2, seed], 9, seed=seed, **asked) for seed in (3, 4, 5)]
    assert not run_all(FakeSession(), again)
    assert answers(sequences) == answers(again)
    assert {each for step in session.led for each in step} == {asked["temperature"]}
    assert len(session.led) == sum(call.kind == "decode" for call in session.calls)
    assert any(len(rows) < 3 for rows in session.fetched), "of some row, no logits were fetched"


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": LEADING},
        {"typical_p": 0.5},
        {"top_p": 0.6, "typical_p": 0.5},
        {"top_k": 5, "repetition_penalty": 1.3},
        {"top_k": 5, "logit_bias": {3: 5.0}},
    ],
    ids=str,
)
def test_what_needs_all_logits_does_not_ask_for_the_likeliest(params: dict[str, Any]) -> None:
    session = fake()
    assert not run_all(session, [sequence_of("one", [1, 2], 5, temperature=1.0, seed=1, **params)])
    assert not session.led
    assert not session.greedy


def test_log_probabilities_need_all_logits() -> None:
    session, sequence = fake(), sequence_of("one", [1, 2], 4, temperature=1.0, top_k=4)
    sequence.logprobs = 2
    assert not run_all(session, [sequence])
    assert not session.led


def test_a_mixed_batch_makes_one_call_and_fetches_what_else_is_needed() -> None:
    def asked() -> list[TokenSequence]:
        return [
            sequence_of("greedy", [1, 2, 3], 6),
            sequence_of("led", [4, 5], 6, temperature=0.8, top_k=4, seed=2),
            sequence_of("free", [6, 7], 6, temperature=1.0, seed=3),
        ]

    session, mixed, again = fake(), asked(), asked()
    assert not run_all(session, mixed)
    assert not run_all(FakeSession(), again)
    assert answers(mixed) == answers(again)
    assert (2,) in session.fetched, "of the third alone"
    assert (1.0, 0.8, 1.0) in session.led
    calls = sum(call.kind == "decode" for call in session.calls)
    assert calls == len(session.led) + len(session.greedy) + 1, "the third ends alone"


def test_without_a_drawn_row_the_session_chooses() -> None:
    session = fake()
    assert not run_all(session, [sequence_of("one", [1, 2, 3], 4)])
    assert (session.led, session.greedy) == ([], [1, 1, 1])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_end_their_sequence_alone(value: float) -> None:
    session = fake()

    def spoil(call: Any, logits: Floats) -> None:
        if call.kind == "decode":
            for row, tokens in enumerate(call.tokens):
                if tokens[0] == 1:
                    logits[row, 7] = value

    session.edit = spoil
    first = sequence_of("first", [1, 2, 3], 8, temperature=1.0, top_k=4, seed=1)
    second = sequence_of("second", [4, 5], 8, temperature=1.0, top_k=4, seed=1)
    (error,) = run_all(session, [first, second])
    assert isinstance(error, NonFiniteLogitsError)
    assert len(answers([second])[0]) == 8


def test_a_draw_that_fails_ends_its_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(found: Sequence[Any], rows: Sequence[SamplingRow]) -> list[int]:
        if any(row.params.seed == 1 for row in rows):
            raise RuntimeError("a fault")
        return draw_from_few(found, rows)

    monkeypatch.setattr(containment, "draw_from_few", failing)
    first, second = (
        sequence_of(str(seed), [seed, 2], 6, temperature=1.0, top_k=4, seed=seed) for seed in (1, 2)
    )
    (error,) = run_all(fake(), [first, second])
    assert str(error) == "a fault"
    assert len(answers([second])[0]) == 6


def candidates(logits: Floats, count: int = LEADING, gaps: Sequence[int] = (), **params: Any) -> Any:
    asked = replace(GREEDY, **{"temperature": 1.0, **params})
    ids, scores, totals = leading_of(logits[None], [asked.temperature], count)
    drawable = DrawableIds.of(len(logits), set(gaps), vocab_size=len(logits)) if gaps else None
    return leading_candidates(Leading(ids[0], scores[0], float(totals[0])), asked, drawable)


def kept(logits: Floats, **params: Any) -> list[int] | None:
    found = candidates(logits, **params)
    return None if found is None else found.ids.tolist()


STEPS = -np.arange(VOCABULARY, dtype=np.float32)  # each token weighs a share of the one before


def test_tokens_like_the_last_one_are_not_relied_upon() -> None:
    level = STEPS.copy()
    level[3:20] = level[3]  # seventeen alike, of which nine are among the likeliest
    assert kept(level, top_k=3) == [0, 1, 2]
    assert kept(level, top_k=4) is None
    assert kept(level, top_p=0.55) == [0, 1, 2]
    assert kept(level, top_p=0.65) is None
    assert kept(level, min_p=0.06) == [0, 1, 2]
    assert kept(level, min_p=0.04) is None


def test_of_equal_logits_at_the_edge_of_top_k_all_are_candidates() -> None:
    level = STEPS.copy()
    level[3:6] = level[3]
    assert kept(level, top_k=4) == [0, 1, 2, 3, 4, 5]


def test_an_id_that_stands_for_no_token_is_left_to_the_sampler() -> None:
    assert kept(STEPS, top_k=3, gaps=[20]) == [0, 1, 2]
    assert kept(STEPS, top_k=3, gaps=[5]) is None


def test_the_most_likely_token_is_the_first_of_equal_ones_if_all_of_them_are_there() -> None:
    def best(logits: Floats) -> int | None:
        ids, scores, totals = leading_of(logits[None], [1.0], LEADING)
        return Leading(ids[0], scores[0], float(totals[0])).best()

    level = np.zeros(VOCABULARY, np.float32)
    level[[9, 4, 30]] = 1
    assert best(level) == 4
    level[10:] = 1
    assert best(level) is None
    level[0] = np.nan
    with np.errstate(invalid="ignore"):
        assert best(level) is None


def both(logits: Floats, **params: Any) -> tuple[list[int] | None, list[Any]]:
    """Return what is drawn from 128 likeliest tokens, None where they do not suffice, and from all logits."""
    asked = replace(GREEDY, **{"temperature": 1.0, **params})
    row = SamplingRow.begin(asked, prompt_ids=[1], stop_ids=())
    found = candidates(logits, 128, **params)
    return None if found is None else draw_from_few([found], [row]), sample_batch(logits[None], [row])


@pytest.mark.parametrize("level", [1200, 44700])
@pytest.mark.parametrize("inside", [0.9, 0.905, 0.91, 0.92, 0.93])
def test_where_the_host_would_keep_thousands_the_logits_are_fetched(inside: float, level: int) -> None:
    """Likely tokens before a plateau of equal ones, which the host keeps and draws from in another order."""
    draws, drawn = np.random.default_rng(3), 0
    weights = np.full(49152, 1e-12)
    weights[:100] = inside / 100 * np.linspace(1.5, 0.5, 100)
    weights[100 : 100 + level] = (1 - inside) / level
    for seed in range(20):
        logits = np.log(draws.permutation(weights)).astype(np.float32)
        few, whole = both(logits, top_p=0.9, seed=seed)
        assert few is None or few == whole
        drawn += few is not None
    assert drawn == (20 if inside == 0.93 else 0)


def test_tokens_just_below_min_ps_limit_are_fetched() -> None:
    draws, drawn = np.random.default_rng(3), 0
    logits = np.full(49152, 50, np.float32)
    logits[:100] = 100 - np.linspace(0, 2, 100)
    for below in (2e-5, 1e-3, 5e-3, 1e-2):
        logits[100:2100] = 100 + np.log(0.05) - below
        for seed in range(10):
            few, whole = both(draws.permutation(logits), min_p=0.05, seed=seed)
            assert few is None or few == whole
            drawn += few is not None
    assert drawn == 20


@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("params", [{"top_k": 64}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_draws_over_a_real_vocabularys_size_are_the_samplers(
    params: dict[str, Any], temperature: float
) -> None:
    """Logits as peaked as a language model's: Zipf's law, drawn anew for each row."""
    draws = np.random.default_rng(7)
    drawn = 0
    for seed in range(300):
        ranks = draws.permutation(49152) + 1
        logits = (-draws.uniform(1, 3) * np.log(ranks) + draws.normal(0, 0.3, ranks.size)).astype(np.float32)
        few, whole = both(logits, temperature=temperature, seed=seed, **params)
        assert few is None or few == whole
        drawn += few is not None
    assert drawn > 60
