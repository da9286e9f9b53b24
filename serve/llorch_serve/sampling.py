"""From logits to a token: :class:`SamplingParams` and the pure function :func:`sample`.

Order of operations, the one of transformers' processors and warpers: repetition penalty, ``min_tokens`` (stop
tokens masked), temperature, top-k, top-p, min-p, draw. A row's draw depends on its own logits, seed and position
only, never on its neighbours in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llorch_serve.errors import FieldViolation

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. None means: the artifact's default, else the neutral value.

    temperature: 0..2; 0 is greedy.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: (0, 1]; keep the smallest set of tokens whose probability reaches p.
    min_p: 0..1; drop tokens less likely than min_p times the most likely one.
    repetition_penalty: (0, 2]; logits of tokens already in prompt or answer are divided by it when positive and
        multiplied when negative (Keskar et al. 2019).
    seed: 0..2**63-1; absent: drawn at random and reported.
    max_tokens: most tokens to generate; absent: until the context is full.
    min_tokens: stop tokens are impossible before so many tokens.
    stop: strings that end generation and are not part of the text.
    stop_token_ids: further tokens that end generation.
    ignore_eos: the model's own stop tokens do not end generation.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def violations(self, *, vocab_size: int, prefix: str = "sampling") -> list[FieldViolation]:
        """Return every field that is out of range; empty if all is well."""
        bad: list[FieldViolation] = []

        def check(name: str, value: object, ok: bool, accepted: str) -> None:
            if not ok:
                bad.append(FieldViolation(f"{prefix}.{name}", f"found {value!r}, expected {accepted}"))

        def in_range(value: float | None, low: float, high: float, *, open_low: bool = False) -> bool:
            if value is None:
                return True
            return math.isfinite(value) and (value > low if open_low else value >= low) and value <= high

        check("temperature", self.temperature, in_range(self.temperature, 0, 2), "a number from 0 to 2")
        check("top_k", self.top_k, self.top_k is None or self.top_k >= 0, "an integer of at least 0")
        check("top_p", self.top_p, in_range(self.top_p, 0, 1, open_low=True), "a number above 0 and at most 1")
        check("min_p", self.min_p, in_range(self.min_p, 0, 1), "a number from 0 to 1")
        check(
            "repetition_penalty",
            self.repetition_penalty,
            in_range(self.repetition_penalty, 0, 2, open_low=True),
            "a number above 0 and at most 2",
        )
        check("seed", self.seed, in_range(self.seed, 0, MAX_SEED), f"an integer from 0 to {MAX_SEED}")
        check("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 0, "an integer of at least 0")
        check("min_tokens", self.min_tokens, self.min_tokens >= 0, "an integer of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens >= 0:
            check("min_tokens", self.min_tokens, False, f"at most max_tokens ({self.max_tokens})")
        check("stop", f"{len(self.stop)} strings", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings")
        for index, text in enumerate(self.stop[:MAX_STOP_STRINGS]):
            size = len(text.encode("utf-8", "surrogatepass"))
            check(f"stop[{index}]", f"{size} bytes", 0 < size <= MAX_STOP_BYTES, f"1 to {MAX_STOP_BYTES} bytes")
        for index, token in enumerate(self.stop_token_ids):
            check(
                f"stop_token_ids[{index}]", token, 0 <= token < vocab_size, f"an id of the vocabulary, 0 to {vocab_size - 1}"
            )
        return bad
