"""What the prefix index knows of replicas, against a list of prompts that are compared token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_serve.cluster import prefix_index
from llorch_serve.cluster.prefix_index import BLOCK, SHORTEST_MATCH, PrefixIndex, prefix_of
from llorch_serve.engine.reuse import SHORTEST_REUSE, common_prefix

PIECES = [[number] * (BLOCK // 2) for number in range(3)]
"""Half blocks: prompts made of them part at borders of blocks and within them."""

prompts = st.builds(
    lambda pieces, rest: [token for piece in pieces for token in piece] + rest,
    st.lists(st.sampled_from(PIECES), max_size=8),
    st.lists(st.integers(0, 2), max_size=20),
)
replicas = st.sampled_from(["a", "b"])


class Model:
    """The prompts of each replica, none of which gives way but to one that goes on from it."""

    def __init__(self) -> None:
        self._held: dict[str, list[list[int]]] = {"a": [], "b": []}

    def match(self, replica: str, prompt: list[int]) -> int:
        """Return the length of the longest match; 0 if there is none."""
        lengths = [_common(held, prompt) for held in self._held[replica]]
        return max((length for length in lengths if length >= SHORTEST_MATCH), default=0)

    def sent(self, replica: str, prompt: list[int]) -> None:
        length = self.match(replica, prompt)
        if length and prompt[:length] in self._held[replica]:
            self._held[replica].remove(prompt[:length])
        self._held[replica].append(prompt)


def _common(held: list[int], prompt: list[int]) -> int:
    """Return the length of a common prefix; within the whole blocks of what is held, only blocks count."""
    common = common_prefix(held, prompt)
    return common if common >= len(held) // BLOCK * BLOCK else common // BLOCK * BLOCK


@given(st.lists(st.tuples(replicas, prompts), max_size=20), prompts)
def test_a_match_is_as_long_as_a_comparison_token_by_token_finds(
    sent: list[tuple[str, list[int]]], asked: list[int]
) -> None:
    index, model = PrefixIndex(), Model()
    index.keep({"a": 30, "b": 30})
    for replica, prompt in sent:
        index.sent(replica, prefix_of(prompt))
        model.sent(replica, prompt)
    found = {replica: match.length for replica, match in index.matches(prefix_of(asked)).items()}
    assert found == {replica: model.match(replica, asked) for replica in "ab" if model.match(replica, asked)}


@given(st.lists(st.tuples(replicas, prompts), max_size=40))
def test_a_replica_holds_no_more_prompts_than_it_has_slots(sent: list[tuple[str, list[int]]]) -> None:
    index = PrefixIndex()
    index.keep({"a": 1, "b": 3})
    for replica, prompt in sent:
        index.sent(replica, prefix_of(prompt))
        assert sum(map(len, index._by_end.values())) <= 4
        assert all(held for held in index._by_hash.values())
        found = index.matches(prefix_of(prompt)).get(replica)
        assert (found is not None and found.length == len(prompt)) or len(prompt) < SHORTEST_MATCH
    index.keep({"b": 1})
    assert sum(map(len, index._by_end.values())) <= 1
    index.keep({})
    assert index._by_end == index._by_hash == {}


def prompt(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def test_matches_shorter_than_what_a_replica_reuses_are_none() -> None:
    assert SHORTEST_MATCH == SHORTEST_REUSE
    index = PrefixIndex()
    index.keep({"a": 2})
    index.sent("a", prefix_of(prompt(0, 40)))
    assert index.matches(prefix_of(prompt(0, 15))) == {}
    index.sent("a", prefix_of(prompt(100, 16)))
    assert index.matches(prefix_of(prompt(100, 50)))["a"].length == 16


def test_a_short_conversation_is_told_from_another_with_the_same_beginning() -> None:
    index = PrefixIndex()
    index.keep({"a": 4, "b": 4})
    system = prompt(0, 40)
    index.sent("a", prefix_of([*system, 900, 901, 902]))
    index.sent("b", prefix_of([*system, 910, 911, 912]))
    matches = index.matches(prefix_of([*system, 910, 911, 912, *prompt(500, 60)]))
    assert (matches["a"].length, matches["b"].length) == (40, 43)


def test_nothing_is_shared_between_cache_salts() -> None:
    index = PrefixIndex()
    index.keep({"a": 4})
    for length in (20, 100):
        index.sent("a", prefix_of(prompt(0, length), "anna"))
    assert index.matches(prefix_of(prompt(0, 100), "bert")) == {}
    assert index.matches(prefix_of(prompt(0, 100), "anna"))["a"].length == 100


def test_a_prompt_that_goes_on_takes_the_place_of_the_one_before() -> None:
    index = PrefixIndex()
    index.keep({"a": 2})
    index.sent("a", prefix_of(prompt(0, 70)))
    index.sent("a", prefix_of(prompt(1000, 70)))
    index.sent("a", prefix_of(prompt(0, 130)))
    assert index.matches(prefix_of(prompt(0, 200)))["a"].length == 130
    assert index.matches(prefix_of(prompt(1000, 200)))["a"].length == 70


def test_the_prompt_that_was_not_used_for_longest_gives_way() -> None:
    index = PrefixIndex()
    index.keep({"a": 2})
    index.sent("a", prefix_of(prompt(0, 70)))
    index.sent("a", prefix_of(prompt(1000, 70)))
    assert index.last_use("a") == 1
    index.sent("a", prefix_of(prompt(2000, 70)))
    assert index.matches(prefix_of(prompt(0, 70))) == {}
    assert index.matches(prefix_of(prompt(1000, 70)))["a"].length == 70
    assert PrefixIndex().last_use("a") == 0


def test_what_a_replica_held_is_forgotten_with_it() -> None:
    index = PrefixIndex()
    index.keep({"a": 2, "b": 2})
    index.sent("a", prefix_of(prompt(0, 70)))
    index.keep({"b": 2})
    assert index.matches(prefix_of(prompt(0, 70))) == {}
    index.sent("a", prefix_of(prompt(0, 70)))  # one that has just left is no error
    assert index.matches(prefix_of(prompt(0, 70))) == {}


def test_long_prompts_of_many_replicas_take_no_more_than_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MOST_HASHES", 50)
    index = PrefixIndex()
    index.keep({"a": 8, "b": 8})
    for number in range(20):  # a hash each for the salt and ten blocks
        index.sent("ab"[number % 2], prefix_of(prompt(1000 * number, 10 * BLOCK)))
    known = [n for n in range(20) if index.matches(prefix_of(prompt(1000 * n, 10 * BLOCK)))]
    assert known == [16, 17, 18, 19]
    index.keep({})
    assert index._hashes == 0


def test_a_prompt_that_is_told_twice_is_held_once() -> None:
    index = PrefixIndex()
    index.keep({"a": 2})
    for _ in range(2):
        index.sent("a", prefix_of(prompt(0, 40)))
    index.sent("a", prefix_of([*prompt(0, 39), 7]))  # as long, and another
    assert index.matches(prefix_of(prompt(0, 40)))["a"].length == 40
    assert index.matches(prefix_of([*prompt(0, 39), 7]))["a"].length == 40
    assert index.last_use("a") > 0
