"""Whether what a request asks of sampling is in range: numbers, stop strings, biases, lists of ids.

Used by ``params.py``, which says which field takes what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from llorch_serve.errors import FieldViolation

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_BIASED_IDS = 1024
MAX_BIAS = 100.0
MAX_LISTED_IDS = 16  # bad ids of a field that are named one by one; a status message has room for few


@dataclass(frozen=True, slots=True)
class Range:
    """Which numbers a field accepts; None is always fine, NaN and infinity never.

    accepted: the same in words. open_low: ``low`` itself is out of range.
    """

    name: str
    low: float
    high: float
    accepted: str
    open_low: bool = False

    def violation(self, value: float | None, prefix: str) -> FieldViolation | None:
        """Return what is wrong with a value of the field below ``prefix``, or None."""
        if value is None:
            return None
        above = value > self.low if self.open_low else value >= self.low
        if above and value <= self.high and value != math.inf:  # NaN fails every comparison
            return None
        return FieldViolation(f"{prefix}.{self.name}", f"found {value!r}, expected {self.accepted}")


def range_violations(params: object, ranges: Iterable[Range], prefix: str) -> Iterator[FieldViolation]:
    """Yield what is wrong with the fields of ``params`` that ranges are given for."""
    for each in ranges:
        found = each.violation(getattr(params, each.name), prefix)
        if found is not None:
            yield found


def stop_violations(stop: Sequence[str], name: str) -> list[FieldViolation]:
    """Return what is wrong with stop strings, the field ``name``."""
    bad: list[FieldViolation] = []
    if len(stop) > MAX_STOP_STRINGS:
        found = f"found '{len(stop)} strings', expected at most {MAX_STOP_STRINGS} strings"
        bad.append(FieldViolation(name, found))
    for index, text in enumerate(stop[:MAX_STOP_STRINGS]):
        size = len(text.encode("utf-8", "surrogatepass"))
        if not 0 < size <= MAX_STOP_BYTES:
            found = f"found '{size} bytes', expected 1 to {MAX_STOP_BYTES} bytes"
            bad.append(FieldViolation(f"{name}[{index}]", found))
        if _has_surrogate(text):
            found = f"found {text!r}, expected text without lone surrogates"
            bad.append(FieldViolation(f"{name}[{index}]", found))
    return bad


def bias_violations(bias: Mapping[int, float], name: str, vocab_size: int) -> list[FieldViolation]:
    """Return what is wrong with biases of tokens, the field ``name``."""
    if len(bias) > MAX_BIASED_IDS:
        return [FieldViolation(name, f"found {len(bias)} ids, expected at most {MAX_BIASED_IDS}")]
    outside = [(token, token) for token in bias if not 0 <= token < vocab_size]
    beyond = [
        (token, value)
        for token, value in bias.items()
        if not -MAX_BIAS <= value <= MAX_BIAS  # NaN neither
    ]
    return listed(name, outside, f"an id of the vocabulary, 0 to {vocab_size - 1}") + listed(
        name, beyond, f"a number from -{MAX_BIAS:g} to {MAX_BIAS:g}"
    )


def listed(name: str, bad: Sequence[tuple[int, object]], accepted: str) -> list[FieldViolation]:
    """Return a violation for each bad element, given by its index or key; many are counted instead."""
    listed = [
        FieldViolation(f"{name}[{key}]", f"found {value!r}, expected {accepted}")
        for key, value in bad[:MAX_LISTED_IDS]
    ]
    if len(bad) > MAX_LISTED_IDS:
        listed.append(FieldViolation(name, f"found {len(bad) - MAX_LISTED_IDS} more, expected {accepted}"))
    return listed


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)
