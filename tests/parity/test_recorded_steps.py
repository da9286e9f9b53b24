"""Steps that are recorded for few numbers of rows, on a device played by the CPU: padding changes nobody's
answer, and recordings are made once, before sequences run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llorch_serve.artifact.folder import Artifact
from llorch_serve.cache.shared_device_cache import SharedDeviceCache
from llorch_serve.engine.engine import Engine
from llorch_serve.engine.scheduler import Scheduler, SchedulerConfig
from llorch_serve.engine.sequence import Sequence
from llorch_serve.errors import ProviderError
from llorch_serve.providers.recording_turns import TURNS
from llorch_serve.runtime.opening import LoadReport
from llorch_serve.runtime.session import DecoderSession
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids
from support.fakes.played_memory import PlayedMemory
from support.fakes.session import sequence_of
from support.harness.played_device import watched, watched_choice
from support.harness.slot_calls import slot_calls
from tolerances import STEPWISE_LOGITS

Opener = Callable[..., DecoderSession]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("recorded")
    return export_tiny(write_hf_folder(folder / "source"), folder / "out")


def test_recorded_steps_compute_what_a_cache_in_host_memory_does(artifact: Artifact, opened: Opener) -> None:
    session = opened()
    seen = watched(session)
    for mine, expected in zip(slot_calls(session), slot_calls(open_tiny(artifact, slots=3)), strict=True):
        np.testing.assert_allclose(mine, expected, atol=STEPWISE_LOGITS)
    first_step = ["3", "2", "1", "2"]
    assert seen.recordings == ["-1", "-1", "-1", *first_step, "3", "-1", "1", "2"]


def test_recording_is_the_default_where_nothing_runs_on_the_cpu(opened: Opener) -> None:
    for options, cpu_nodes, recorded in (
        ((), False, True),
        (("enable_cuda_graph=0",), False, False),
        (("enable_cuda_graph=1",), True, True),
        ((), True, False),
        (("enable_cuda_graph=0",), True, False),
    ):
        reports: list[LoadReport] = []
        session = opened(options, reports.append, allow_cpu_nodes=cpu_nodes)
        seen = watched(session)
        session.prefill(0, random_ids(5), 0)
        session.decode([7], [6])
        assert set(seen.recordings) == ({"-1", "1", "2", "3"} if recorded else {None})
        notice = reports[0].notice or ""
        assert ("steps are not recorded" in notice) == (cpu_nodes and not options)


def test_a_recorded_step_is_told_the_longest_length(opened: Opener) -> None:
    for options, told in ((), 64), (("enable_cuda_graph=0",), 6):
        session = opened(options, max_context=64)
        session.prefill(0, random_ids(5), 0)
        session.decode([7], [6])
        step = session._decode._steps[1, not options]  # type: ignore[attr-defined]
        assert int(step._total) == told


def test_padding_spoils_neither_a_prefix_nor_a_prompt_under_way(artifact: Artifact, opened: Opener) -> None:
    session = opened(slots=8)
    seen = watched(session)
    held = {slot: random_ids(3 + slot, seed=slot) for slot in range(8)}

    def step(rows: int) -> None:
        for slot in range(rows):
            held[slot] = [*held[slot], slot]
        session.decode(list(range(rows)), [len(held[slot]) for slot in range(rows)])

    for slot, prompt in held.items():
        session.prefill(slot, prompt, 0)
    step(8)
    step(8)
    session.copy_slot(7, 5, 12)
    session.swap_slots(5, 6, 12)
    session.release_slot(7, 2)
    held |= {5: held[6], 6: held[7], 7: held[7][:2]}
    session.prefill(4, [9], len(held[4]))
    held[4] = [*held[4], 9]
    assert isinstance(session.cache, SharedDeviceCache)
    assert session.cache.ends == [len(held[slot]) for slot in range(8)]
    for _ in range(4):
        step(5)
    assert seen.recordings[-4:] == ["8"] * 4
    plain = open_tiny(artifact, slots=1)
    for slot, tokens in held.items():
        following = random_ids(3, seed=20 + slot)
        found = session.prefill(slot, following, len(tokens), range(3)).copy()
        expected = plain.prefill(0, [*tokens, *following], 0, range(len(tokens), len(tokens) + 3))
        np.testing.assert_allclose(found, expected, atol=STEPWISE_LOGITS)


def test_a_full_slot_gets_no_padding_and_the_step_is_not_recorded(artifact: Artifact, opened: Opener) -> None:
    session, plain = opened(slots=4, max_context=16), open_tiny(artifact, slots=4)
    seen, full = watched(session), random_ids(15, seed=9)
    for each in (session, plain):
        for slot in range(3):
            each.prefill(slot, random_ids(4, seed=slot), 0)
        each.prefill(3, full, 0)
    prompts = len(seen.recordings)
    np.testing.assert_allclose(
        session.decode([1, 2, 3], [5, 5, 5]), plain.decode([1, 2, 3], [5, 5, 5]), atol=STEPWISE_LOGITS
    )
    assert seen.recordings[prompts:] == ["4", "2", "1", "4"], "a place is left"
    last = random_ids(1, seed=10)
    expected = plain.prefill(3, last, 15).copy()
    np.testing.assert_allclose(session.prefill(3, last, 15), expected, atol=STEPWISE_LOGITS)
    found = session.decode([1, 2, 3], [6, 6, 6])
    np.testing.assert_allclose(found, plain.decode([1, 2, 3], [6, 6, 6]), atol=STEPWISE_LOGITS)
    assert seen.recordings[prompts + 4 :] == ["-1", "-1"]
    expected = plain.prefill(3, last, 15).copy()
    np.testing.assert_allclose(session.prefill(3, last, 15), expected, atol=STEPWISE_LOGITS)


def test_each_thread_records_once(opened: Opener) -> None:
    """As onnxruntime keeps the recordings of a thread from all others."""
    session = opened()
    seen = watched(session)

    def steps() -> None:
        session.decode([7], [1])
        session.decode([8, 9], [2, 1])

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    assert seen.recordings == ["3", "2", "1", "1", "2"]
    steps()
    assert seen.recordings[5:] == ["3", "2", "1", "1", "2"]
    steps()
    assert seen.recordings[10:] == ["1", "2"]


def test_a_size_whose_slots_were_full_is_recorded_when_they_have_room(opened: Opener) -> None:
    session = opened(slots=4, max_context=16)
    seen = watched(session)
    session.prefill(3, random_ids(16, seed=9), 0)
    session.decode([1, 2, 3], [1, 1, 1])
    assert seen.recordings == ["-1", "2", "1", "-1"]
    session.release_slot(3, 5)
    session.decode([1, 2, 3], [2, 2, 2])
    session.decode([1, 2, 3], [3, 3, 3])
    assert seen.recordings[4:] == ["4", "4", "4"]
    session.prefill(0, random_ids(4), 3)
    session.verify(0, random_ids(9), 7)  # guesses up to the end, which are wrong
    session.decode([1], [8])
    assert seen.recordings[-1] == "1", "its own slot's end does not matter"


def test_a_recording_waits_for_the_calls_of_another_model_and_they_for_it(opened: Opener) -> None:
    """As CUDA allows no other thread's calls meanwhile."""
    recording, other = opened(), opened(("enable_cuda_graph=0",))
    seen = watched(recording)
    inside, going_on = threading.Event(), threading.Event()
    real = seen.run_with_iobinding

    def slow(io: Any, options: Any) -> None:
        inside.set()
        assert going_on.wait(20)
        real(io, options)

    seen.run_with_iobinding = slow  # type: ignore[method-assign]
    first = threading.Thread(target=recording.decode, args=([7], [1]))
    first.start()
    assert inside.wait(20)
    done: list[str] = []
    calls: list[Callable[[], Any]] = [
        lambda: other.prefill(0, [1, 2], 0),
        lambda: other.copy_slot(0, 1, 2),
        lambda: other.swap_slots(0, 1, 2),
        lambda: other.decode([7], [3]),
        lambda: other.decode_greedy([7], [4]),
        opened,
    ]

    def call(made: Callable[[], Any]) -> None:
        made()
        done.append("")

    threads = [threading.Thread(target=call, args=(made,)) for made in calls]
    for thread in threads:
        thread.start()
    threads[0].join(0.1)
    assert not done, "all of them wait"
    going_on.set()
    for thread in (first, *threads):
        thread.join(20)
    assert len(done) == len(calls)


def test_a_step_that_cannot_be_recorded_for_full_slots_waits_for_no_other_models_call(opened: Opener) -> None:
    session = opened(slots=4, max_context=16)
    session.prefill(3, random_ids(16, seed=9), 0)
    inside, going_on = threading.Event(), threading.Event()

    def call() -> None:
        with TURNS.call():
            inside.set()
            going_on.wait(20)

    def steps() -> None:
        session.decode([1, 2, 3], [1, 1, 1])
        recorded.set()
        assert inside.wait(20)
        session.decode([1, 2, 3], [2, 2, 2])
        done.set()

    recorded, done = threading.Event(), threading.Event()
    running, other = threading.Thread(target=steps), threading.Thread(target=call)
    running.start()
    assert recorded.wait(20)
    other.start()
    try:
        assert done.wait(5)
    finally:
        going_on.set()
        running.join(20)
        other.join(20)


def test_a_step_that_cannot_be_recorded_says_how_to_do_without(opened: Opener) -> None:
    session = opened()
    seen = watched(session)

    def broken(io: Any, options: Any) -> None:
        raise RuntimeError("CUDA error 900: operation not permitted when stream is capturing")

    seen.run_with_iobinding = broken  # type: ignore[method-assign]
    with pytest.raises(
        ProviderError, match=r"error 900.*; steps of 3 sequences .* --provider-option enable_cuda_graph=0$"
    ):
        session.decode([7], [1])


def traffic() -> list[Sequence]:
    """Requests that share prefixes and end at different times."""
    stem = random_ids(20, seed=3)
    return [
        sequence_of(f"{number}", [*stem[: 2 * number], *random_ids(3, seed=number)], 3 + 5 * (number % 4))
        for number in range(11)
    ]


def engine_of(session: DecoderSession, *, slots: int) -> Engine:
    config = SchedulerConfig(
        slots=slots, budget=slots * 64, max_waiting=20, prefill_chunk=7, shortest_reuse=2
    )
    return Engine(session, Scheduler(config))


def answers(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    """Run requests, three at first, then one more for every second step."""
    waiting = list(sequences)
    engine.add(*(waiting.pop(0) for _ in range(3)))
    steps = 0
    while engine.live or waiting:
        engine.step()
        steps += 1
        if waiting and steps % 2:
            engine.add(waiting.pop(0))
    return [sequence.token_ids[sequence.prompt_length :] for sequence in sequences]


def test_answers_in_any_company_are_those_alone_and_no_recording_is_made_meanwhile(
    artifact: Artifact, opened: Opener, memory: PlayedMemory
) -> None:
    session = opened(slots=6, max_context=64)
    seen, choosing = watched(session), watched_choice(session)
    engine = engine_of(session, slots=6)
    engine.add(sequence_of("warm-up", [0] * 8, 2))
    while engine.live:
        engine.step()
    made = set(seen.recorded)
    assert made == set(choosing.recorded) == {"1", "2", "4", "6"}
    memory.bytes_read = 0
    found = answers(engine, traffic())
    assert set(seen.recorded) == set(choosing.recorded) == made
    tokens = sum(map(len, found))
    assert memory.bytes_read == 8 * (tokens - len(found)), "an id for each token but the prompts' own"
    alone = open_tiny(artifact, slots=1)
    for sequence, answer in zip(traffic(), found, strict=True):
        expected = engine_of(alone, slots=1)
        expected.add(sequence)
        while expected.live:
            expected.step()
        assert answer == sequence.token_ids[sequence.prompt_length :]
