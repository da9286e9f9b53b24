"""The speeds that count: from prompts and streams to tests of ``llorch bench``, and to names of figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from llorch_export.tune.candidates import PREFILL_CHUNKS
from llorch_export.tune.standing import Lap, Scenario
from llorch_serve.bench.offline import longest, plan_tests
from llorch_serve.bench.schema import Entry, OfflineTest
from llorch_serve.errors import UsageError

Prefer = Literal["balance", "prompts", "answers"]
"""Which speeds weigh more."""

DEFAULT_PROMPT: Final = 512
_ANSWER: Final = 32  # tokens whose time is taken, after those of the streams that begin first
_MORE: Final = 3.0  # weight of preferred speeds beside the others

_FIGURES: Final = {"prefill": "prefill_tokens_per_s", "decode": "decode_tokens_per_s"}


@dataclass(frozen=True, slots=True)
class Scenarios:
    """What every candidate does in a round. tests: one for each number of streams."""

    tests: tuple[OfflineTest, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return longest(self.tests)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of each prompt."""
        return max(test.prompt_tokens for test in self.tests)

    @property
    def slots(self) -> int:
        """Most streams at once."""
        return max(test.streams for test in self.tests)

    def weights(self, prefer: Prefer) -> dict[Scenario, float]:
        """Return what each speed counts."""
        weight = {
            "prefill": _MORE if prefer == "prompts" else 1.0,
            "decode": _MORE if prefer == "answers" else 1.0,
        }
        return {_name(work, test): weight[work] for test in self.tests for work in _FIGURES}

    def lap(self, entry: Entry) -> Lap:
        """Return an entry's part of a race from what ``llorch bench`` says of it."""
        problem = entry.problem or next((row.problem for row in entry.rows if row.problem), None)
        if problem is not None:
            return Lap(peak_mib=entry.peak_rss_mib, problem=problem.message)
        columns = {
            _name(work, row.test): row.figures[figure].values
            for row in entry.rows
            if isinstance(row.test, OfflineTest)
            for work, figure in _FIGURES.items()
        }
        rounds = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        if any(min(speeds.values()) <= 0 for speeds in rounds):
            return Lap(
                peak_mib=entry.peak_rss_mib,
                problem="some stream ended before the last one began; choose fewer --streams",
            )
        return Lap(rounds=tuple(rounds), peak_mib=entry.peak_rss_mib)


def scenarios(streams: Sequence[int], prompt_tokens: int | None, context: int) -> Scenarios:
    """Return the scenarios of a model. context: its length; prompt_tokens: None takes 512, or what it holds.

    Raises UsageError if the model's context does not hold them.
    """
    wanted = DEFAULT_PROMPT if prompt_tokens is None else prompt_tokens
    answer = _answer_tokens(max(streams), wanted)
    if prompt_tokens is None and wanted + answer > context:
        wanted = max(1, context - _answer_tokens(max(streams), context))
        answer = _answer_tokens(max(streams), wanted)
    if wanted + answer > context:
        raise UsageError(
            f"--prompt-tokens {wanted} with {max(streams)} streams needs a context of {wanted + answer} "
            f"tokens; this model has {context}. Choose fewer of either"
        )
    found = plan_tests(
        ("mixed",), prompt_tokens=wanted, generated_tokens=answer, depths=[0], streams=sorted(streams)
    )
    return Scenarios(tuple(found))


def _answer_tokens(streams: int, prompt: int) -> int:
    """Return how many tokens each stream generates: while prompts of others are taken, some at a time, those
    before them go on answering, and only what comes after the last has begun is counted.
    """
    return _ANSWER + streams * math.ceil(prompt / min(PREFILL_CHUNKS))


def _name(work: str, test: OfflineTest) -> Scenario:
    return f"{work}, {test.streams} stream{'' if test.streams == 1 else 's'}"
