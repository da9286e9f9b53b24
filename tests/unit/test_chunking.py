"""Chunks of a prompt take about as long at its end as at its beginning, where others wait for them."""

from __future__ import annotations

import pytest

from llorch_serve.engine.chunking import STEP, attention_crossover, shortened
from llorch_serve.engine.plan import DecodeBatch, PrefillChunk, Sampled, StepPlan
from llorch_serve.engine.scheduler import Scheduler, SchedulerConfig
from llorch_serve.engine.sequence import Limits, Sequence
from support.builders.checkpoints import tiny_llama_config

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}


def test_attention_of_smollm2_costs_as_much_as_the_rest_from_position_1000_on() -> None:
    # 576 x (2 x 576 + 2 x 192 + 3 x 1536) products in the projections, 2 x 576 a position in attention.
    assert attention_crossover(tiny_llama_config(**SMOLLM2)) == 3072 // 3


@pytest.mark.parametrize(
    ("start", "expected"), [(0, 256), (100, 256), (1000, 128), (3000, 64), (7000, 32), (10**6, 32)]
)
def test_a_chunk_takes_as_long_as_one_at_the_beginning(start: int, expected: int) -> None:
    assert shortened(256, start, 1000) == expected


def test_short_chunks_stay_as_they_are() -> None:
    assert [shortened(chunk, 10**6, 1) for chunk in (1, 4, STEP)] == [1, 4, STEP]


def chunks(*, busy: bool) -> list[int]:
    """Return the lengths of the chunks of a prompt of 400 tokens, beside a running sequence or alone."""
    scheduler = Scheduler(
        SchedulerConfig(slots=2, budget=2000, prefill_chunk=128, max_waiting=4, attention_crossover=100)
    )

    def submitted(prompt: int) -> Sequence:
        sequence = Sequence(f"{prompt}", list(range(prompt)), prompt, Limits(max_new_tokens=300))
        scheduler.add(sequence)
        return sequence

    def step() -> StepPlan:
        plan = scheduler.schedule()
        assert plan is not None
        sampled = isinstance(plan.call, DecodeBatch) or plan.call.samples
        scheduler.update(plan, [Sampled((1,) if sampled else ())] * len(plan.sequences()))
        return plan

    if busy:
        submitted(3)
        step()
    long = submitted(400)
    found = []
    while long.cache.computed < 400:
        plan = step()
        if isinstance(plan.call, PrefillChunk):
            found.append(len(plan.call.token_ids))
    return found


def test_only_beside_running_sequences_are_chunks_shortened() -> None:
    assert chunks(busy=False) == [128, 128, 128, 16]
    assert chunks(busy=True) == [128, 64, 64, 64, 32, 32, 16]
