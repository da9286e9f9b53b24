"""Who has which slot of the KV cache, and what idle slots still hold: plain data for the scheduler.

An idle slot keeps the tokens of its last sequence. A new sequence starts from the longest prefix of its
prompt that any slot holds, its own or a running one's, whose sequence has the same cache salt: what was
cached, and the time to the first token, tell nothing about prompts of another salt. Memory is counted in
tokens: what running sequences may grow to, plus what idle slots hold, never exceeds the budget; idle slots
are emptied in the order of their last use, whatever their salt.

Decoding sequences are kept in the lowest slots, because a decode call runs over slots 0 to n-1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llorch_serve.engine.plan import SlotCopy, SlotEdit, SlotRelease, SlotSwap
from llorch_serve.engine.reuse import SHORTEST_REUSE, PrefixSearch, Slot
from llorch_serve.engine.sequence import Sequence, SequenceStatus


class SlotTable:
    """The slots.

    budget: tokens that all slots together may hold.
    prefix_cache: False empties a slot when its sequence leaves it.
    strict_reuse: reuse only tokens that prefill calls computed, whose keys and values are the same bits
        again.
    """

    def __init__(
        self,
        count: int,
        *,
        budget: int,
        prefix_cache: bool = True,
        strict_reuse: bool = False,
        shortest_reuse: int = SHORTEST_REUSE,
    ) -> None:
        self._slots = [Slot() for _ in range(count)]
        self._budget = budget
        self._prefix_cache = prefix_cache
        self._prefixes = PrefixSearch(
            self._slots,
            prefix_cache=prefix_cache,
            strict_reuse=strict_reuse,
            shortest_reuse=shortest_reuse,
        )
        self._clock = 0

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the sequences that have a slot, in the order of their slots."""
        # All are read before any is looked at, so that figures may be asked for from another thread.
        sequences = [slot.sequence for slot in self._slots]
        return (sequence for sequence in sequences if sequence is not None)

    @property
    def running_tokens(self) -> int:
        """Tokens of running sequences in the cache."""
        return sum(sequence.cache.computed for sequence in self)

    @property
    def idle_tokens(self) -> int:
        """Tokens that idle slots keep for reuse."""
        return sum(len(slot.tokens) for slot in self._slots)

    def held(self, sequence: Sequence) -> int:
        """Return how long a prefix of a prompt some slot holds; from any thread, as of about now."""
        return self._prefixes.longest_prefix(sequence)[1]

    def has_room(self, sequence: Sequence) -> bool:
        """Tell whether a slot is idle and the budget lets the sequence grow to its longest."""
        idle = any(slot.sequence is None for slot in self._slots)
        running = sum(other.most_tokens for other in self)
        return idle and running + sequence.most_tokens <= self._budget

    def give(self, sequence: Sequence, *, whole_prompt: bool = False) -> list[SlotEdit]:
        """Give an idle slot to a sequence, with as much of its prompt as the cache holds; :meth:`has_room`
        must hold.

        whole_prompt: nothing of it needs computing where a slot holds all of it, whatever the rules for reuse
            are.
        """
        source = self._prefixes.holder(sequence) if whole_prompt else None
        length = sequence.prompt_length
        if source is None:
            source, length = self._prefixes.longest_prefix(sequence)
        target = self._target(source, length)
        slot, edits = self._slots[target], list[SlotEdit]()
        sequence.cache.prefilled = 0
        if length:
            assert source is not None
            if source != target:
                edits.append(SlotCopy(source, target, length))
                self._touch(self._slots[source])
            sequence.cache.prefilled = min(self._slots[source].computed_by_prefill(), length)
        sequence.cache.computed = sequence.cache.reused = length
        sequence.cache.slot = target
        slot.sequence, slot.tokens = sequence, []
        slot.committed = max(slot.committed, length)
        return edits + self._shrink()

    def take_back(self, sequence: Sequence, *, keep: bool) -> None:
        """Make a sequence's slot idle. keep: what it holds may serve others."""
        assert sequence.cache.slot is not None
        slot = self._slots[sequence.cache.slot]
        slot.committed = max(slot.committed, sequence.cache.written)
        slot.sequence = sequence.cache.slot = None
        if keep and self._prefix_cache:
            slot.tokens = sequence.token_ids[: sequence.cache.computed]
            slot.prefilled = min(sequence.cache.prefilled, len(slot.tokens))
            slot.cache_salt = sequence.ownership.cache_salt
        self._touch(slot)

    def abandon(self, edits: Iterable[SlotEdit]) -> list[Sequence]:
        """Forget what idle slots hold that these edits, which were not carried out, were to change.

        Returns the sequences that have such a slot and something in it: it is not theirs.
        """
        changed: set[int] = set()
        for edit in edits:
            match edit:
                case SlotCopy(target=target):
                    changed.add(target)
                case SlotSwap(first=first, second=second):
                    changed |= {first, second}
                case SlotRelease(slot=released):  # the next time that memory is short it is released
                    self._slots[released].committed = self._budget
        damaged = []
        for index in sorted(changed):
            slot = self._slots[index]
            if slot.sequence is not None and slot.sequence.cache.computed:
                damaged.append(slot.sequence)
            slot.tokens, slot.prefilled = [], 0
        return damaged

    def compact(self) -> tuple[list[SlotEdit], list[Sequence]]:
        """Bring the decoding sequences, n of them, to the slots 0 to n-1.

        Returns the edits, and every sequence that has a slot, in the order of the slots then.
        """
        running = [slot.sequence for slot in self._slots if slot.sequence is not None]
        decoding = [sequence for sequence in running if sequence.status is SequenceStatus.DECODE]
        if not decoding or decoding[-1].cache.slot == len(decoding) - 1:
            return [], running
        edits: list[SlotEdit] = []
        for hole in range(len(decoding)):
            sequence = self._slots[hole].sequence
            if sequence is not None and sequence.status is SequenceStatus.DECODE:
                continue
            moved = decoding.pop()  # the highest of them lies beyond every hole
            assert moved.cache.slot is not None
            edits.append(self._exchange(hole, moved.cache.slot))
        return edits, list(self)

    def _exchange(self, low: int, high: int) -> SlotEdit:
        first, second = self._slots[low], self._slots[high]
        displaced, moved = first.held(), second.held()
        first.committed = second.committed = max(first.committed, second.committed)
        self._slots[low], self._slots[high] = second, first
        for index in (low, high):
            sequence = self._slots[index].sequence
            if sequence is not None:
                sequence.cache.slot = index
        if displaced:
            return SlotSwap(low, high, max(displaced, moved))
        return SlotCopy(high, low, moved)

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.used = self._clock

    def _target(self, source: int | None, length: int) -> int:
        """Return the idle slot whose loss hurts least: the source itself, or the one that was not used for
        longest.
        """
        idle = [index for index, slot in enumerate(self._slots) if slot.sequence is None]
        # Among empty ones the lowest: its memory is there already.
        oldest = min(idle, key=lambda index: self._slots[index].used if self._slots[index].tokens else 0)
        if source not in idle:
            return oldest
        assert source is not None
        lost = len(self._slots[source].tokens) - length
        return source if lost <= len(self._slots[oldest].tokens) else oldest

    def _shrink(self) -> list[SlotEdit]:
        """Empty idle slots until the budget holds, and give back memory that is not needed where that is not
        enough.
        """
        edits: list[SlotEdit] = []
        while sum(slot.needed() for slot in self._slots) > self._budget:
            idle = [slot for slot in self._slots if slot.sequence is None and slot.tokens]
            oldest = min(idle, key=lambda slot: slot.used)
            oldest.tokens, oldest.prefilled = [], 0
        committed = sum(max(slot.committed, slot.needed()) for slot in self._slots)
        for index, slot in enumerate(self._slots):
            needed = slot.needed()
            if committed > self._budget and slot.committed > needed:
                committed -= slot.committed - needed
                slot.committed = needed
                edits.append(SlotRelease(index, needed))
        return edits
