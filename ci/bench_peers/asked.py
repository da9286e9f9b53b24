"""What llorch sets out to reach beside its peers, and whether a run shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bench_peers.ours import SMALLEST
from bench_peers.peers import GENAI, LLAMA_CPP, OPENVINO
from bench_peers.results import DECODE, PREFILL, Metric, Ratio, Run, Subject, fastest, ratio, series
from bench_peers.reuse import PROMPTS, LookupGain

TIE: Final = 0.75
"""Logits. Answers that part where two tokens are nearer than this have met a tie. The same tokens prefilled
and decoded give int8 margins between the two likeliest that differ by up to 0.37 (rms 0.11, 328 positions);
here two such differences add up.
"""

_BEST: Final = (LLAMA_CPP, GENAI, OPENVINO)
_FAITHFUL: Final = 0.0027
"""Nats: what llama.cpp's own run of the file diverges by."""
_LOOKUP: Final = 1.8
_PREFIX: Final = 0.1


@dataclass(frozen=True, slots=True)
class Demand:
    """A ratio that is asked for, against the fastest of some peers.

    kl_limit: our recipes that count diverge by at most this, in nats; None: only ``recipe`` counts, whatever
        it costs.
    """

    metric: Metric
    against: tuple[str, ...]
    at_least: float
    kl_limit: float | None = None
    recipe: str | None = None

    def allows(self, subject: Subject) -> bool:
        """Whether a recipe of ours counts."""
        if self.kl_limit is not None:
            return subject.kl <= self.kl_limit
        return subject.label == self.recipe


DEMANDS: Final = (
    Demand(DECODE[0], (LLAMA_CPP,), 1.2, kl_limit=_FAITHFUL),
    Demand(PREFILL, (LLAMA_CPP,), 3.0, kl_limit=_FAITHFUL),
    Demand(DECODE[1], (LLAMA_CPP,), 2.0, kl_limit=_FAITHFUL),
    Demand(DECODE[0], _BEST, 1.25, kl_limit=0.01),
    Demand(DECODE[0], _BEST, 1.5, recipe=SMALLEST),
    Demand(PREFILL, (OPENVINO,), 0.85, kl_limit=0.01),
    Demand(PREFILL, (OPENVINO,), 1.0, kl_limit=0.05),
    Demand(DECODE[1], (OPENVINO,), 1.2, kl_limit=0.01),
    Demand(DECODE[1], (OPENVINO,), 1.3, kl_limit=0.05),
    Demand(DECODE[2], (OPENVINO,), 1.1, kl_limit=0.01),
    Demand(DECODE[2], (OPENVINO,), 1.2, kl_limit=0.05),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of the table: what was asked, what was compared, what was found; ``found`` is None if nothing
    could be.
    """

    figure: str
    condition: str
    compared: str
    asked: str
    found: Ratio | None
    holds: bool
    note: str = ""


def verdicts(run: Run) -> list[Verdict]:
    """Judge a run by every demand."""
    rows = [_speed(run, demand) for demand in DEMANDS]
    rows += [_lookup(run, prompt) for prompt in PROMPTS]
    return [*rows, _prefix(run)]


def _speed(run: Run, demand: Demand) -> Verdict:
    condition = f"KL <= {demand.kl_limit:g}" if demand.kl_limit is not None else f"{demand.recipe}, any KL"
    asked = f">= {demand.at_least:g}"
    ours = fastest(run, [subject for subject in run.of(ours=True) if demand.allows(subject)], demand.metric)
    rivals = [subject for subject in run.of(ours=False) if subject.label in demand.against]
    theirs = fastest(run, rivals, demand.metric)
    if ours is None or theirs is None:
        missing = "no recipe of ours" if ours is None else "no peer"
        return Verdict(str(demand.metric), condition, missing, asked, None, holds=False)
    found = ratio(series(run, ours.label, demand.metric), series(run, theirs.label, demand.metric))
    return Verdict(
        figure=str(demand.metric),
        condition=condition,
        compared=f"{ours.label} (KL {ours.kl:.2g}) to {theirs.label} (KL {theirs.kl:.2g})",
        asked=asked,
        found=found,
        holds=found.value >= demand.at_least,
    )


def _lookup(run: Run, prompt: str) -> Verdict:
    gains = [gain for one in run.gains for gain in one.lookup if gain.prompt == prompt]
    found = ratio([gain.lookup_tokens_per_s for gain in gains], [gain.plain_tokens_per_s for gain in gains])
    alike, note = _same_ids(gains)
    return Verdict(
        figure=f"greedy decode on a repetitive text ({prompt.replace('_', ' ')})",
        condition=run.gains_of,
        compared="lookup on to off",
        asked=f">= {_LOOKUP:g}, same ids but for ties",
        found=found,
        holds=found.value >= _LOOKUP and alike,
        note=f"{sum(gain.accepted for gain in gains)} of {sum(gain.drafted for gain in gains)} guesses "
        f"right; {note}",
    )


def _same_ids(gains: list[LookupGain]) -> tuple[bool, str]:
    parted = [gain.parted for gain in gains if gain.parted is not None]
    if not parted:
        return True, "same ids"
    worst = max(parted, key=lambda tie: tie.gap)
    place = f"ids part at token {worst.position}, where two logits are {worst.gap:.2g} apart"
    return worst.gap <= TIE, f"{place}: {'a tie' if worst.gap <= TIE else 'no tie'}"


def _prefix(run: Run) -> Verdict:
    found = ratio([gain.second_ttft_ms for gain in run.gains], [gain.first_ttft_ms for gain in run.gains])
    tokens = run.gains[0].prefix_tokens
    return Verdict(
        figure=f"time to first token, second request with the same {tokens}-token prefix",
        condition=run.gains_of,
        compared="second to first request",
        asked=f"<= {_PREFIX:g}",
        found=found,
        holds=found.value <= _PREFIX,
        note=f"{min(gain.reused_tokens for gain in run.gains)} tokens reused",
    )
