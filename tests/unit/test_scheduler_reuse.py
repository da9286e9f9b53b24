"""What the slot table decides about prefixes, room and eviction; that answers stay right is shown by the
random tests.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_serve.engine.plan import Sampled, SlotCopy, SlotRelease
from llorch_serve.engine.reuse import common_prefix
from llorch_serve.engine.runner import apply_edit, run
from llorch_serve.engine.scheduler import Scheduler, SchedulerConfig
from llorch_serve.engine.sequence import Ownership, Sequence
from llorch_serve.engine.shared_prompt import SharedPrompt
from support.fakes.session import FakeSession, sequence_of

CONTEXT = 128


class Bench:
    """A scheduler on a fake session whose budget and reuse a test chooses."""

    def __init__(self, *, slots: int = 2, budget: int | None = None, **options: object) -> None:
        self.session = FakeSession(slots=slots, context=CONTEXT, vocab_size=64)
        self.scheduler = Scheduler(
            SchedulerConfig(
                slots=slots,
                budget=slots * CONTEXT if budget is None else budget,
                prefill_chunk=64,
                max_waiting=100,
                **options,  # type: ignore[arg-type]
            )
        )

    def start(
        self,
        prompt: list[int],
        count: int,
        client: str = "",
        salt: str = "",
        shared: SharedPrompt | None = None,
    ) -> Sequence:
        sequence = sequence_of("r", prompt, count, ownership=Ownership(client, salt), shared=shared)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[object]:
        plan = self.scheduler.schedule()
        assert plan is not None
        for edit in plan.edits:
            apply_edit(self.session, edit)
        tokens = [int(row.argmax()) for row in run(self.session, plan.call)]
        self.scheduler.update(plan, [Sampled((token,)) for token in tokens] or [Sampled()])
        return list(plan.edits)

    def finish(self, prompt: list[int], count: int, salt: str = "") -> Sequence:
        sequence = self.start(prompt, count, salt=salt)
        while self.scheduler.running + self.scheduler.waiting:
            self.step()
        return sequence


LONG = list(range(40))


def test_the_same_prompt_again_leaves_two_tokens_to_compute() -> None:
    bench = Bench()
    first, second = bench.finish(LONG, 3), bench.finish(LONG, 3)
    assert (first.cache.reused, second.cache.reused) == (0, 38)
    assert second.token_ids == first.token_ids
    assert [len(call.token_ids) for call in bench.session.calls if call.kind == "prefill"] == [40, 2]
    load = bench.scheduler.load()
    assert (load.prompt_tokens, load.cached_tokens, load.generated_tokens) == (80, 38, 6)


def test_a_conversation_goes_on_in_its_own_slot() -> None:
    bench = Bench(slots=3)
    first = bench.finish(LONG, 5)
    second = bench.finish([*first.token_ids, 7, 8, 9], 2)
    # All but the last answer token was computed, and it is part of the new prompt.
    assert second.cache.reused == len(first.token_ids) - 1
    assert bench.session.moves == bench.session.swaps == []


def test_strict_reuse_stops_where_decoding_began() -> None:
    bench = Bench(strict_reuse=True)
    first = bench.finish(LONG, 5)
    again = bench.finish([*first.token_ids, 7, 8, 9], 2)
    assert again.cache.reused == 40
    # What came after was prefilled this time.
    third = bench.finish([*again.token_ids, 1, 2], 1)
    assert third.cache.reused == again.prompt_length


def test_a_running_sequence_shares_its_prompt_by_copy() -> None:
    bench = Bench()
    first = bench.start(LONG, 30)
    bench.step()
    second = bench.start([*LONG[:30], 60, 61, 62], 3)
    bench.step()
    edits = bench.step()
    assert second.cache.reused == 30
    assert SlotCopy(0, 1, 30) in edits or bench.session.moves == [(0, 1, 30)]
    assert first.cache.slot == 0


def test_a_prefix_that_others_share_is_copied_not_taken() -> None:
    bench = Bench(slots=2)
    bench.finish(LONG, 2)
    second = bench.finish([*LONG[:30], 60, 61, 62], 2)
    assert second.cache.reused == 30
    assert bench.finish(LONG, 2).cache.reused == 38, (
        "the first prompt's rest was thrown away for an empty slot"
    )


def test_an_idle_slot_serves_its_own_cache_salt_alone() -> None:
    bench = Bench(slots=3)
    bench.finish(LONG, 3, "a")
    assert bench.finish(LONG, 3, "b").cache.reused == 0
    assert bench.finish(LONG, 3).cache.reused == 0
    assert [bench.finish(LONG, 3, salt).cache.reused for salt in ("a", "b", "")] == [38, 38, 38]
    assert bench.session.moves == [], "each had a slot of its own"


def test_a_running_sequence_shares_nothing_with_another_cache_salt() -> None:
    bench = Bench()
    bench.start(LONG, 30, salt="a")
    bench.step()
    second = bench.start([*LONG[:30], 60, 61, 62], 3, salt="b")
    bench.step()
    bench.step()
    assert (second.cache.reused, second.cache.computed > 0) == (0, True)
    assert bench.session.moves == []


@pytest.mark.parametrize("kept", [False, True], ids=["taken from a running one", "taken from an idle one"])
def test_a_shared_prompt_is_not_taken_from_another_cache_salt(kept: bool) -> None:
    """Another answer of a request would otherwise start at once from a stranger's copy of its prompt."""
    bench = Bench(slots=3)
    other = bench.start(LONG, 1 if kept else 30, salt="b")
    while other.cache.computed < len(LONG):
        bench.step()
    shared = SharedPrompt(np.zeros(64, np.float32))
    answer = bench.start(LONG, 3, salt="a", shared=shared)
    while answer.cache.slot is None:
        bench.step()
    assert answer.cache.reused == 0


def test_moved_slots_keep_their_cache_salt() -> None:
    """A decoding sequence changes places with an idle slot below it, which goes on serving its own salt
    alone.
    """
    bench = Bench(slots=2)
    short = bench.start(LONG, 2, salt="a")
    long = bench.start(list(range(60, 20, -1)), 30, salt="b")
    while bench.scheduler.running + bench.scheduler.waiting:
        bench.step()
    assert bench.session.swaps, "nothing changed places"
    for sequence, salt, cached in ((short, "b", 0), (long, "a", 0), (short, "a", 38), (long, "b", 38)):
        wanted = sequence.token_ids[: sequence.prompt_length]
        bench.scheduler.add(again := sequence_of("r", wanted, 1, ownership=Ownership(cache_salt=salt)))
        found = bench.scheduler._table._prefixes.longest_prefix(again)[1]
        bench.scheduler.remove(again)
        assert found == cached


@given(st.data())
def test_what_strangers_send_never_shows_in_what_was_cached(data: st.DataObject) -> None:
    """The same requests with and without a stranger's prompts between them, where no slot has to be
    emptied.
    """
    prompts = st.lists(st.integers(0, 1), min_size=20, max_size=60)
    own = data.draw(st.lists(prompts, min_size=1, max_size=4))
    strange = data.draw(st.lists(prompts, min_size=len(own), max_size=len(own)))
    alone, beside = Bench(slots=20), Bench(slots=20)
    for mine, other in zip(own, strange, strict=True):
        beside.finish(other, 2, "stranger")
        beside.finish(mine, 2, "stranger")
        assert beside.finish(mine, 2, "me").cache.reused == alone.finish(mine, 2, "me").cache.reused


def test_prefixes_too_short_to_matter_are_computed() -> None:
    bench = Bench()
    bench.finish(LONG, 2)
    assert bench.finish([*LONG[:15], 60, 61], 2).cache.reused == 0
    assert bench.finish([*LONG[:16], 60, 61], 2).cache.reused == 16


def test_without_prefix_cache_nothing_is_kept() -> None:
    bench = Bench(prefix_cache=False)
    bench.finish(LONG, 2)
    assert bench.scheduler.load().kv_tokens_idle == 0
    assert bench.finish(LONG, 2).cache.reused == 0


def test_a_sequence_whose_numbers_failed_leaves_nothing_behind() -> None:
    bench = Bench()
    sequence = bench.start(LONG, 5)
    bench.step()
    bench.scheduler.remove(sequence, keep_cache=False)
    assert bench.scheduler.load().kv_tokens_idle == 0
    assert bench.finish(LONG, 2).cache.reused == 0


def test_an_aborted_prompt_serves_the_next_as_far_as_it_came() -> None:
    bench = Bench()
    prompt = [i % 50 for i in range(100)]
    sequence = bench.start(prompt, 5)
    bench.step()
    assert sequence.cache.computed == 64
    bench.scheduler.remove(sequence)
    assert bench.finish(prompt, 2).cache.reused == 64


def test_the_slot_that_was_not_used_for_longest_is_emptied_first() -> None:
    bench = Bench(slots=3, budget=CONTEXT)
    for start in (0, 20, 40):
        bench.finish([start + i % 20 for i in range(40)], 1)  # 40 of 128 tokens each
    assert bench.scheduler.load().kv_tokens_idle == 120
    bench.finish([63] * 50, 1)  # 51 tokens: 80 and 51 do not fit together
    assert bench.scheduler.load().kv_tokens_idle == 90
    assert bench.finish([40 + i % 20 for i in range(40)], 1).cache.reused == 38
    assert bench.session.releases, "memory beyond the budget was kept"


def test_a_request_waits_until_its_tokens_fit() -> None:
    bench = Bench(slots=4, budget=CONTEXT)
    first, second = bench.start([1] * 50, 20), bench.start([2] * 50, 20)
    bench.step()
    bench.step()
    assert (first.cache.slot, second.cache.slot) == (0, None)
    while first.generated < 20:
        bench.step()
    bench.step()
    assert second.cache.slot is not None


def test_memory_beyond_what_a_slot_needs_goes_back_when_the_budget_is_tight() -> None:
    bench = Bench(slots=2, budget=CONTEXT, prefix_cache=False)
    bench.finish([1] * 100, 5)
    second = bench.start([2] * 20, 9)
    assert bench.step() == []
    third = bench.start([3] * 60, 5)
    edits: list[object] = []
    while third.cache.slot is None:
        edits = bench.step()
    assert SlotRelease(0, second.most_tokens) in edits


def test_clients_are_served_by_tokens_not_by_requests() -> None:
    bench = Bench(slots=1)
    crowd = [bench.start([i + 1] * 20, 10, client="crowd") for i in range(4)]
    single = bench.start([50] * 20, 10, client="single")
    order: list[Sequence] = []
    while len(order) < 5:
        bench.step()
        order += [s for s in (*crowd, single) if s.cache.slot is not None and s not in order]
    assert order.index(single) == 1, "one client's crowd kept another waiting"


def test_a_client_that_was_away_has_no_credit() -> None:
    bench = Bench(slots=1)
    for _ in range(3):
        bench.finish([1] * 20, 10)
    busy = [bench.start([2] * 20, 10, client="busy") for _ in range(2)]
    late = bench.start([3] * 20, 10, client="late")
    order: list[Sequence] = []
    while len(order) < 3:
        bench.step()
        order += [s for s in (*busy, late) if s.cache.slot is not None and s not in order]
    assert order == [busy[0], late, busy[1]]


@given(first=st.lists(st.integers(0, 1)), second=st.lists(st.integers(0, 1)))
def test_the_common_prefix_is_that_of_a_plain_loop(first: list[int], second: list[int]) -> None:
    pairs = zip(first, second, strict=False)
    expected = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    assert common_prefix(first, second) == expected


@pytest.mark.parametrize("count", [1, 2, 3])
def test_prompts_of_a_token_or_two_reuse_nothing(count: int) -> None:
    bench = Bench(shortest_reuse=1)
    bench.finish([1] * 30, 2)
    assert bench.finish([1] * count, 2).cache.reused == max(count - 2, 0)
