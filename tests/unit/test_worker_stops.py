"""Where answers end: stop strings, stop tokens and min_tokens, against what the whole text says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.worker.worker import Worker
from support.builders.checkpoints import EOS_ID, TURN_END_ID
from support.fakes.session import FakeSession, continuation
from support.harness.worker import TOKENIZER, VOCAB, Sink, ask, make_session, make_worker, request, script

PROMPT = (40, 41, 42)


@dataclass
class Scripted:
    """A worker whose model gives the answer that a test has written."""

    worker: Worker
    session: FakeSession

    def will_say(self, text: str, *, end: int | None = None) -> list[int]:
        """Make the model answer with these characters, one token each where ASCII; return the ids."""
        ids = [id_ for char in text for id_ in TOKENIZER.encode(char, add_special_tokens=False)]
        self.session.rule = script(PROMPT, ids if end is None else [*ids, end])
        return ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    session = make_session(context=256)
    worker = make_worker(tmp_path_factory.mktemp("artifact"), session)
    yield Scripted(worker, session)
    worker.close()


def test_a_stop_string_across_tokens_ends_exactly(model: Scripted) -> None:
    ids = model.will_say("one two\n\nthree", end=EOS_ID)
    answer = ask(model.worker, PROMPT, stop=("o\n\nt",), max_tokens=50)
    assert answer.text == "one tw"
    assert answer.completion.reason is FinishReason.STOP
    assert answer.completion.stop_matched == "o\n\nt"
    assert answer.ids == ids[: len("one two\n\nt")]
    assert answer.completion.generated_tokens == len("one two\n\nt")


def earliest(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Return how many characters must be read until a stop string is complete, and which: the longest of
    them.
    """
    for length in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:length].endswith(stop)]
        if complete:
            return length, max(complete, key=len)
    return None


@settings(deadline=None, max_examples=80)
@given(
    text=st.text("ab", min_size=1, max_size=24),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=3).map(tuple),
)
def test_no_part_of_a_stop_string_is_ever_seen(model: Scripted, text: str, stops: tuple[str, ...]) -> None:
    ids = model.will_say(text, end=EOS_ID)
    answer = ask(model.worker, PROMPT, stop=stops, max_tokens=60)
    done = answer.completion
    found = earliest(text, stops)
    assert done.reason is FinishReason.STOP
    if found is None:
        assert (answer.text, answer.ids, done.stop_matched) == (text, ids, "<|eos|>")
    else:
        length, stop = found
        assert answer.text == text[: length - len(stop)]
        assert answer.ids == ids[:length]
        assert done.stop_matched == stop
    assert done.generated_tokens == len(answer.ids)


def test_characters_held_back_come_when_the_limit_ends_the_answer(model: Scripted) -> None:
    model.will_say("so STO")
    answer = ask(model.worker, PROMPT, stop=("STOP",), max_tokens=6)
    assert answer.text == "so STO"
    assert "STO" not in "".join(update.text for update in answer.updates[:-1])
    assert answer.completion.reason is FinishReason.LENGTH


def test_a_stop_string_complete_on_the_last_allowed_token_is_a_stop(model: Scripted) -> None:
    model.will_say("so STOP")
    answer = ask(model.worker, PROMPT, stop=("STOP",), max_tokens=7)
    assert (answer.text, answer.completion.reason) == ("so ", FinishReason.STOP)
    assert answer.completion.generated_tokens == 7


def test_characters_of_several_tokens_stay_whole(model: Scripted) -> None:
    text = "ok 🙂🚀 東京 end"
    ids = model.will_say(text, end=EOS_ID)
    answer = ask(model.worker, PROMPT, max_tokens=60)
    assert (answer.text, answer.ids) == (text, ids)
    assert all("\ufffd" not in update.text for update in answer.updates)


def test_a_stop_string_of_several_bytes_ends_inside_no_character(model: Scripted) -> None:
    model.will_say("ok 🙂🚀 end", end=EOS_ID)
    answer = ask(model.worker, PROMPT, stop=("🚀",), max_tokens=60)
    assert answer.text == "ok 🙂"
    assert answer.completion.stop_matched == "🚀"


def test_nothing_is_computed_after_a_stop_string_and_neighbours_go_on(model: Scripted) -> None:
    model.will_say("aaSTOPbb")
    model.session.calls.clear()
    sink = Sink()
    model.worker.submit(request("stopping", PROMPT, stop=("STOP",)), sink)
    model.worker.submit(request("neighbour", (7, 8), max_tokens=30, ignore_eos=True), sink)
    answers = sink.answers("stopping", "neighbour")
    assert answers["stopping"].text == "aa"
    assert answers["neighbour"].ids == continuation((7, 8), 30, VOCAB)
    seen = [tokens for call in model.session.calls for tokens in call.tokens if tokens[:3] == PROMPT]
    assert max(map(len, seen)) == len(PROMPT) + len("aaSTO")


@pytest.mark.parametrize(("end", "text"), [(EOS_ID, "<|eos|>"), (TURN_END_ID, "<|turn_end|>")])
def test_any_of_the_models_stop_tokens_ends_and_is_named(model: Scripted, end: int, text: str) -> None:
    ids = model.will_say("done", end=end)
    answer = ask(model.worker, PROMPT, max_tokens=50)
    assert (answer.text, answer.ids) == ("done", ids)
    assert answer.completion.reason is FinishReason.STOP
    assert answer.completion.stop_matched == text
    assert answer.completion.generated_tokens == len(ids)


def test_a_stop_token_as_first_token_is_an_empty_answer(model: Scripted) -> None:
    model.will_say("", end=EOS_ID)
    answer = ask(model.worker, PROMPT)
    assert (answer.text, answer.ids, answer.completion.generated_tokens) == ("", [], 0)
    assert answer.completion.reason is FinishReason.STOP


def test_ignoring_eos_goes_on_past_the_models_stop_tokens_but_not_the_requests(model: Scripted) -> None:
    ids = model.will_say("ab", end=EOS_ID)
    through = ask(model.worker, PROMPT, ignore_eos=True, max_tokens=9)
    assert through.ids[:3] == [*ids, EOS_ID]
    assert len(through.ids) == 9
    stopped = ask(model.worker, PROMPT, ignore_eos=True, stop_token_ids=(EOS_ID,), max_tokens=9)
    assert stopped.ids == ids


def test_the_requests_own_stop_token_ends_and_is_named(model: Scripted) -> None:
    ids = model.will_say("abc")
    answer = ask(model.worker, PROMPT, stop_token_ids=(ids[2],))
    assert (answer.text, answer.completion.stop_matched) == ("ab", "c")
    assert answer.completion.reason is FinishReason.STOP


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stop_tokens_are_impossible_before_min_tokens(model: Scripted, count: int) -> None:
    model.session.rule = lambda tokens: EOS_ID if tokens[:3] == PROMPT else None
    answer = ask(model.worker, PROMPT, min_tokens=count, max_tokens=20)
    assert len(answer.ids) == count
    assert EOS_ID not in answer.ids
    assert TURN_END_ID not in answer.ids
    assert answer.completion.reason is FinishReason.STOP


def test_characters_held_back_come_when_a_stop_token_ends_the_answer(
    model: Scripted,
) -> None:
    model.will_say("abSTO", end=EOS_ID)
    answer = ask(model.worker, PROMPT, stop=("STOP",))
    assert (answer.text, answer.completion.stop_matched) == ("abSTO", "<|eos|>")
