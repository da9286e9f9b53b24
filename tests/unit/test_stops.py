"""Stop strings are found wherever the text was cut, and no part of one is shown."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llorch_serve.text.stops import StopMatcher, ThoughtMarks

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def oracle(stops: list[str], text: str) -> tuple[str, str | None]:
    """From the definition: the first prefix of the text that ends with a stop string, and the longest such
    string.
    """
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def could_begin(stops: list[str], text: str) -> int:
    """Length of the longest suffix of the text with which some stop string begins."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@given(STOPS, st.lists(st.text("ab\n", max_size=4), max_size=12))
def test_any_cut_gives_what_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, seen = "", ""
    for piece in pieces:
        seen += piece
        emitted, matched = matcher.push(piece)
        shown += emitted
        expected, stop = oracle(stops, seen)
        assert matched == stop
        if matched is not None:
            assert shown == expected
            return
        assert shown == seen[: len(seen) - could_begin(stops, seen)]
    assert shown + matcher.flush() == seen


BEGIN, END = "<a>", "</a>"
WORDS = ["<a>", "</a>", "<", "/", "a", ">", "\n", " ", "b", "</", "</a"]


def awake_oracle(stops: list[str], text: str, *, begun: bool) -> tuple[str, str | None]:
    """From the definition: thoughts, and white space around them, are only looked through for stop strings
    that hold the mark of their end.
    """
    opening = re.match(r"\s*" + ("" if begun else re.escape(BEGIN)), text)
    if opening is None or (not begun and re.match(r"\s*$", text)):
        return oracle(stops, text)
    end = text.find(END, 0 if begun else opening.end())
    after = len(text) if end < 0 else end + len(END)
    after += len(text[after:]) - len(text[after:].lstrip())
    for place in range(len(text) + 1):
        ending = [
            stop
            for stop in stops
            if text[:place].endswith(stop) and (END in stop or place - len(stop) >= after)
        ]
        if ending:
            stop = max(ending, key=len)
            return text[: place - len(stop)], stop
    return text, None


@given(
    st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map("".join), max_size=4),
    st.lists(st.lists(st.sampled_from(WORDS), max_size=3).map("".join), max_size=10),
    st.booleans(),
)
def test_stop_strings_are_not_looked_for_in_thoughts_wherever_the_text_was_cut(
    stops: list[str], pieces: list[str], begun: bool
) -> None:
    matcher = StopMatcher(stops, ThoughtMarks(BEGIN, END, begun))
    shown, matched = "", None
    for piece in pieces:
        emitted, matched = matcher.push(piece)
        shown += emitted
        if matched is not None:
            break
    text = "".join(pieces)
    expected, stop = awake_oracle(stops, text, begun=begun)
    if matched is None:
        shown += matcher.flush()  # which may find one in what was not decided before
        assert stop is None or text.lstrip() in BEGIN
    else:
        assert matched == stop
    assert shown == expected


@given(STOPS, st.text("ab\n", max_size=8), st.text("ab\n", max_size=8))
def test_a_fork_goes_on_by_itself(stops: list[str], first: str, second: str) -> None:
    plain, forked = StopMatcher(stops), StopMatcher(stops)
    assert plain.push(first) == forked.push(first)
    assume(oracle(stops, first)[1] is None)
    tried = forked.fork().push(second)
    assert tried == plain.push(second)
    assert forked.push(second) == tried


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["abcd", "bc"], "xabcd", ("xa", "bc")),  # complete first
        (["c", "bc"], "abc", ("a", "bc")),  # complete together: the longest
        (["aab"], "aaab", ("a", "aab")),  # overlaps itself
        (["\nUser:"], "ok\nUser: hi", ("ok", "\nUser:")),
        (["😀"], "a😀b", ("a", "😀")),
    ],
)
def test_which_stop_wins(stops: list[str], text: str, expected: tuple[str, str]) -> None:
    assert StopMatcher(stops).push(text) == expected


def test_a_hostile_stop_string_costs_linear_time() -> None:
    matcher = StopMatcher(["a" * 1023 + "b"] * 16)
    shown = "".join(matcher.push("a")[0] for _ in range(5000))
    assert len(shown) == 5000 - 1023
