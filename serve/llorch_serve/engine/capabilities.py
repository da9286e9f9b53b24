"""What a session can do, so that the scheduler plans within it and people are told what is missing.

The session says it; the runner, the scheduler and the worker read it, which passes it on to ``GetModelInfo``
and to the terminal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Everything is possible in a graph of llorch's own.

    batched_decode: one model call advances all running sequences; else ``decode`` makes a call for each.
    batch_invariant: what else is running changes no bit of a sequence's logits.
    chunked_prefill: a prompt may be cut into several calls; else it is one, however long.
    chosen_logits: only the wanted rows of logits are computed; else those of every prompt token are.
    prompt_logits: logits can be had for any position of a prompt; else for the last one of a call.
    prefix_reuse: a sequence may start from part of what a slot holds.
    drafts: several tokens of a running sequence may be checked in one call, with logits for each.
    greedy_decode: the most likely next tokens can be had without their logits.
    leading_decode: so many of the likeliest next tokens of each sequence can be had without all other logits.
    separate_prompts: prompts run on another graph than running sequences do.
    attention_crossover: see :func:`llorch_serve.engine.chunking.attention_crossover`; None: not known.
    """

    batched_decode: bool = True
    batch_invariant: bool = True
    chunked_prefill: bool = True
    chosen_logits: bool = True
    prompt_logits: bool = True
    prefix_reuse: bool = True
    drafts: bool = True
    greedy_decode: bool = False
    leading_decode: int = 0
    separate_prompts: bool = False
    attention_crossover: int | None = None

    def limits(self) -> tuple[str, ...]:
        """Return what is missing, each as a phrase for people; empty if nothing is."""
        missing = (
            (self.batched_decode, "no batching: each running sequence takes model calls of its own"),
            (self.chunked_prefill, "no chunked prefill: a long prompt holds up every other answer"),
            (self.chosen_logits, "logits of every prompt token are computed"),
            (self.prompt_logits, "no log-probabilities of a prompt's own tokens, so no scores"),
            (self.prefix_reuse, "no prefix reuse: every prompt is computed from its first token"),
            (self.drafts, "no --lookup and no --draft"),
        )
        return tuple(phrase for able, phrase in missing if not able)


FULL: Final = Capabilities()
