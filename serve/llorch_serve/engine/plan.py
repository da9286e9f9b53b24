"""What one step computes, as plain data: the scheduler writes it, the runner carries it out.

No numpy, no runtime, no clock: a plan can be compared, printed and tested without a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from llorch_serve.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Copy the first ``tokens`` positions of the KV cache from one slot to another."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SlotSwap:
    """Exchange the first ``tokens`` positions of two slots."""

    first: int
    second: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SlotRelease:
    """Give the memory of a slot's positions from ``keep`` on back to the system; their content is not
    needed.
    """

    slot: int
    keep: int


SlotEdit = SlotCopy | SlotSwap | SlotRelease


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Run ``token_ids`` at positions ``start`` and on.

    samples: whether the next token follows from the last one. scored: indices into ``token_ids`` of those
        whose logits go to
    the sequence's scores.
    """

    sequence: Sequence
    slot: int
    token_ids: tuple[int, ...]
    start: int
    samples: bool
    scored: range = range(0)


@dataclass(frozen=True, slots=True)
class SharedStart:
    """Let a sequence take its first token from the logits of a prompt that it shares; its slot holds the
    prompt already.
    """

    sequence: Sequence
    slot: int


@dataclass(frozen=True, slots=True)
class VerifyChunk:
    """Run a sequence's last token and a guess of what follows, at positions ``start`` and on, with logits for
    each.
    """

    sequence: Sequence
    slot: int
    token_ids: tuple[int, ...]
    start: int

    @property
    def draft(self) -> tuple[int, ...]:
        """Return the guessed tokens."""
        return self.token_ids[1:]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Run one token in a slot. length: tokens of the slot including this one."""

    sequence: Sequence
    token_id: int
    length: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: the edits in their order, then at most one call of the model.

    The call is a chunk of one prompt, or the check of one sequence's draft, or one token of each running
    sequence (row i runs in slot i). A shared start needs none.
    """

    edits: tuple[SlotEdit, ...] = ()
    prefill: PrefillChunk | None = None
    start: SharedStart | None = None
    verify: VerifyChunk | None = None
    decode: tuple[DecodeRow, ...] = ()

    def sampled(self) -> list[Sequence]:
        """Return the sequences that get tokens in this step, in the order of the logits."""
        if self.prefill is not None:
            return [self.prefill.sequence] if self.prefill.samples else []
        if self.start is not None:
            return [self.start.sequence]
        if self.verify is not None:
            return [self.verify.sequence]
        return [row.sequence for row in self.decode]

    def computed(self) -> list[Sequence]:
        """Return the sequences whose tokens the call computes."""
        return [self.prefill.sequence] if self.prefill is not None else self.sampled()
