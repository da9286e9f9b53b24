"""Numbers of OpenAI's bodies that mean more than they say: what other servers and their clients agree on.

Used by ``openai_requests.py``. What is in neither the table of docs/http.md nor in the range of the generator
is left as it is, and refused there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from llorch_serve.errors import FieldViolation
from llorch_serve.sampling.params import MAX_SEED, SamplingParams

_LOWEST_SEED: Final = -(2**63)


def read_limit(sent: int | None, default: int | None) -> int | None:
    """Return the most tokens of an answer; -1, and None by default: until the context is full."""
    if sent is None:
        return default
    return None if sent == -1 else sent


def read_seed(sent: int | None, bad: list[FieldViolation]) -> int | None:
    """Return the seed; None, and -1: one is drawn. Other negative ones are taken modulo 2**63."""
    if sent is None or sent == -1:
        return None
    if sent < _LOWEST_SEED:
        bad.append(FieldViolation("seed", f"found {sent}, expected an integer from {_LOWEST_SEED}"))
    return sent if sent >= 0 else sent % (MAX_SEED + 1)


def read_filters(sampling: SamplingParams) -> SamplingParams:
    """Return the same sampling, in our numbers: top_k of -1 keeps all tokens, top_p of 0 only the
    likeliest.
    """
    if sampling.top_k == -1:
        sampling = replace(sampling, top_k=0)
    if sampling.top_p == 0:
        sampling = replace(sampling, top_p=None, top_k=1)
    return sampling
