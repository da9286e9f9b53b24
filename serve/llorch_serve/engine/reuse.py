"""What a sequence can start from: which slot of the KV cache holds most of its prompt.

The slot table asks for it when it gives a slot, and has the cached positions copied where they are elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final

from llorch_serve.engine.sequence import Sequence

SHORTEST_REUSE: Final = 16
"""Tokens below which a prefix is computed again: they cost less than what taking a slot from its prefix would
lose.
"""

ROWS_LEFT: Final = 2
"""Tokens of a prompt that are always computed: a single row would take another kernel, whose last bits
differ.
"""


@dataclass(slots=True)
class Slot:
    """sequence: who has it; None: idle.

    tokens: what an idle slot's cache holds, from position 0; prefilled: how many of them prefill calls
        computed.
    cache_salt: of the sequence that left them.
    committed: positions that may have memory behind them. used: when it was last given back.
    """

    sequence: Sequence | None = None
    tokens: list[int] = field(default_factory=list)
    prefilled: int = 0
    cache_salt: str = ""
    committed: int = 0
    used: int = 0

    def held(self) -> int:
        """Return how many positions hold something that is needed."""
        return len(self.tokens) if self.sequence is None else self.sequence.cache.computed

    def needed(self) -> int:
        """Return how many positions count against the budget."""
        return len(self.tokens) if self.sequence is None else self.sequence.most_tokens

    def computed_by_prefill(self) -> int:
        """Return how many leading positions prefill calls computed."""
        owner = self.sequence
        return self.prefilled if owner is None else owner.cache.prefilled

    def tokens_for(self, sequence: Sequence) -> list[int]:
        """Return the tokens in the slot that a sequence may start from."""
        owner = self.sequence  # read once, since other threads look too while the engine's goes on
        if owner is None:
            return self.tokens if self.cache_salt == sequence.ownership.cache_salt else []
        if owner.ownership.cache_salt != sequence.ownership.cache_salt:
            return []
        return owner.token_ids[: owner.cache.computed]


class PrefixSearch:
    """Searches the slots. The parameters are those of :class:`llorch_serve.engine.slots.SlotTable`."""

    def __init__(
        self, slots: Seq[Slot], *, prefix_cache: bool, strict_reuse: bool, shortest_reuse: int
    ) -> None:
        self._slots = slots
        self._prefix_cache = prefix_cache
        self._strict_reuse = strict_reuse
        self._shortest_reuse = shortest_reuse

    def holder(self, sequence: Sequence) -> int | None:
        """Return a slot that holds the whole prompt, or None; where several do, one that prefill calls
        filled.
        """
        length = sequence.prompt_length
        filled = {
            index: slot.computed_by_prefill() >= length
            for index, slot in enumerate(self._slots)
            if slot.tokens_for(sequence)[:length] == sequence.token_ids
        }
        usable = [index for index in filled if filled[index] or not self._strict_reuse]
        # Of equals an idle one is better, since it can be used where it is.
        return max(
            usable, key=lambda index: (filled[index], self._slots[index].sequence is None), default=None
        )

    def longest_prefix(self, sequence: Sequence) -> tuple[int | None, int]:
        """Return the slot that holds the longest prefix of a prompt, and its length; None and 0 if none is
        worth it.
        """
        if not self._prefix_cache:
            return None, 0
        best, longest = None, self._shortest_reuse - 1
        wanted = sequence.token_ids[: min(max(sequence.prompt_length - ROWS_LEFT, 0), sequence.reusable)]
        for index, slot in enumerate(self._slots):
            length = common_prefix(wanted, slot.tokens_for(sequence))
            if self._strict_reuse:
                length = min(length, slot.computed_by_prefill())
            # Of equals an idle one is better, since it can be used where it is.
            if length > longest or (length == longest and best is not None and slot.sequence is None):
                best, longest = index, length
        return (None, 0) if best is None else (best, longest)


def common_prefix(first: list[int], second: list[int]) -> int:
    """Return how many leading elements are equal: by halving, since comparing slices is far quicker than a
    loop.
    """
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
