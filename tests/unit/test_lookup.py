"""Guesses from a sequence's own text: found as a plain search finds them, and given up where they fail."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llorch_serve.engine.lookup import LONGEST_NGRAM, SHORTEST_NGRAM, PromptLookup


def plain_draft(tokens: list[int], count: int) -> tuple[int, ...]:
    for size in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
        if len(tokens) <= size:
            continue
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tuple(tokens[start + size : start + size + count])
    return ()


# 0, 1, 256 and 65536 have bytes that look alike when read at the wrong place.
tokens = st.lists(st.sampled_from([0, 1, 256, 65536, 2**31 - 1]), max_size=40)


@given(prompt=tokens, answer=tokens, limit=st.integers(0, 6))
def test_a_guess_is_what_followed_the_latest_longest_match(
    prompt: list[int], answer: list[int], limit: int
) -> None:
    lookup = PromptLookup(prompt, max_draft=4)
    lookup.extend(answer)
    assert lookup.draft(limit) == plain_draft([*prompt, *answer], min(limit, 4))


class WatchedBytes(bytearray):
    """Bytes that count how often they are searched."""

    searches = 0

    def rfind(self, *given: Any) -> int:
        self.searches += 1
        return super().rfind(*given)


def test_tokens_that_look_alike_at_the_wrong_place_do_not_prolong_a_search() -> None:
    """256 and 1 are the same bytes, shifted by one: the tokens sought are found between the tokens, 16,000
    times.
    """
    lookup = PromptLookup([256] * 16_000 + [1, 1, 1, 1], max_draft=4)
    watched = lookup._data = WatchedBytes(lookup._data)
    lookup.draft(4)
    assert 0 < watched.searches <= 1_000


def test_a_right_guess_makes_the_next_one_longer_and_a_wrong_one_shorter() -> None:
    lookup = PromptLookup(list(range(20)) * 3, max_draft=16)
    assert len(lookup.draft(99)) == 4
    lookup.learn(drafted=4, accepted=4)
    assert len(lookup.draft(99)) == 8
    lookup.learn(drafted=8, accepted=8)
    lookup.learn(drafted=16, accepted=16)
    assert len(lookup.draft(99)) == 16
    lookup.learn(drafted=16, accepted=6)
    assert len(lookup.draft(99)) == 7


def test_guesses_that_fail_pause_for_ever_more_tokens() -> None:
    lookup = PromptLookup([1, 2] * 10, max_draft=4)
    pauses = []
    for _ in range(8):
        assert lookup.draft(4)
        lookup.learn(drafted=4, accepted=0)
        pauses.append(0)
        while not lookup.draft(4):
            lookup.extend([1 + sum(pauses) % 2])
            pauses[-1] += 1
            assert pauses[-1] < 100
    assert pauses == [1, 2, 4, 8, 16, 32, 32, 32]


def test_a_good_guess_ends_the_pauses() -> None:
    lookup = PromptLookup([1, 2] * 10, max_draft=4)
    for _ in range(4):
        lookup.learn(drafted=4, accepted=0)
    lookup.extend([1, 2] * 20)
    lookup.learn(drafted=4, accepted=1)
    lookup.learn(drafted=4, accepted=0)
    lookup.extend([1])
    assert lookup.draft(4)
