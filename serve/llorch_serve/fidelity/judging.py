"""Compares a session with expected logits on every graph that it serves with: prompts' and, if it is another,
answers'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from llorch_serve.artifact.manifest import Manifest
from llorch_serve.engine.capabilities import Capabilities
from llorch_serve.fidelity.divergence import Divergence, DivergenceSum, Logits

SLOTS: Final = 2
"""Slots that a session of :class:`Judge` needs: each graph reads what it has written itself. In one slot the
next part of a prompt would read keys and values of the other graph.
"""


class Judged(Protocol):
    """What is needed of a session."""

    @property
    def capabilities(self) -> Capabilities:
        """Whether prompts have a graph of their own."""

    def prefill(
        self, slot: int, token_ids: Sequence[int], start: int, wanted: Sequence[int] | None = None
    ) -> Logits:
        """Run tokens as a part of a prompt."""

    def verify(self, slot: int, token_ids: Sequence[int], start: int) -> Logits:
        """Run tokens as those of a running sequence."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """worst: of the graph that diverges most. prefill_kl, decode_kl: each graph's; None where one graph does
    both.

    limit: of the graph that comes nearest to its own, or goes beyond it most. passed: every graph stays
        within its limit.
    """

    worst: Divergence
    prefill_kl: float | None
    decode_kl: float | None
    limit: float
    passed: bool


class Judge:
    """Adds up one text, chunk by chunk: as a prompt in slot 0, as a running sequence's in slot 1.

    session: has :data:`SLOTS` slots. manifest: says what each graph may diverge by. of: what is compared of
        the model's logits. rounding: what the reference itself may be off by.
    """

    def __init__(
        self,
        session: Judged,
        manifest: Manifest,
        of: Callable[[Logits], Logits] = lambda logits: logits,
        *,
        rounding: float = 0,
    ) -> None:
        decoding = manifest.recipe.kl_limit + rounding
        own = manifest.prompts
        self._limits = (decoding if own is None else own.recipe.kl_limit + rounding, decoding)
        self._session = session
        self._of = of
        self._prompts = DivergenceSum()
        self._answers = DivergenceSum() if session.capabilities.separate_prompts else None

    def add(self, token_ids: Sequence[int], start: int, expected: Logits) -> None:
        """Run tokens at positions ``start`` and on, after those before them; expected: [tokens,
        vocabulary].
        """
        found = self._session.prefill(0, token_ids, start, range(len(token_ids)))
        self._prompts.add(expected, self._of(found))
        if self._answers is not None:
            self._answers.add(expected, self._of(self._session.verify(1, token_ids, start)))

    def result(self) -> Verdict:
        """Return the figures over everything added."""
        prompts, limits = self._prompts.result(), self._limits
        if self._answers is None:
            return Verdict(prompts, None, None, limits[1], passed=prompts.kl <= limits[1])
        answers = self._answers.result()
        passed = prompts.kl <= limits[0] and answers.kl <= limits[1]
        nearest = limits[0] if prompts.kl / limits[0] > answers.kl / limits[1] else limits[1]
        worst = max(prompts, answers, key=lambda found: found.kl)
        return Verdict(worst, prompts.kl, answers.kl, nearest, passed)
