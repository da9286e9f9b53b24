"""What one step computes and what came of it, as plain data.

The scheduler writes a :class:`StepPlan`, the runner carries it out, and the sampler gives a result for each
of its sequences back to the scheduler. No numpy, no runtime, no clock: a plan can be compared, printed and
tested without a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from llorch_serve.engine.sequence import Sequence
from llorch_serve.sampling.logprobs import TokenScores


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


SlotEdit: TypeAlias = SlotCopy | SlotSwap | SlotRelease


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Run ``token_ids`` of one prompt at positions ``start`` and on.

    samples: whether the next token follows from the last one.
    scored: indices into ``token_ids`` of those whose logits go to the sequence's scores.
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
    prompt already, so that the model is not called.
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
class DecodeBatch:
    """Run one token of each running sequence: row i in slot i."""

    rows: tuple[DecodeRow, ...]


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Guess at most ``most`` tokens of a sequence in a slot."""

    sequence: Sequence
    slot: int
    most: int


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Have a draft model guess what running sequences will say next; the model itself is not called.

    rows: in the order of their slots.
    """

    rows: tuple[DraftRow, ...]


StepCall: TypeAlias = PrefillChunk | SharedStart | VerifyChunk | DecodeBatch | DraftBatch


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: the edits in their order, then one call."""

    call: StepCall
    edits: tuple[SlotEdit, ...] = ()

    def sequences(self) -> list[Sequence]:
        """Return the sequences of the call, in the order of its results; none that are only guessed for."""
        match self.call:
            case DecodeBatch(rows=rows):
                return [row.sequence for row in rows]
            case DraftBatch():
                return []
            case call:
                return [call.sequence]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one sequence got in a step.

    token_ids: its new tokens; none after a chunk before the last one of its prompt, where only the prompt is
        wanted, or where its grammar lets nothing follow.
    scores: the log-probabilities of each, if the sequence asks for them.
    complete: its grammar lets nothing follow them.
    """

    token_ids: tuple[int, ...] = ()
    scores: tuple[TokenScores, ...] = ()
    complete: bool = False


Result: TypeAlias = Sampled | Exception
"""What a sequence got, or the error that ends it and no other."""
