"""Other tools' graphs compute what numpy computes from the definition: whole, in parts, in batches, and side
by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.foreign.growing import GrowingSession
from llorch_serve.foreign.shared import SharedSession
from llorch_serve.loading.models import load_model, open_model
from llorch_serve.loading.worker import load_worker
from llorch_serve.requests import GenerationUpdate
from llorch_serve.worker.served import ServedSession
from llorch_serve.worker.worker import Worker
from support.builders.checkpoints import VOCAB_SIZE
from support.builders.foreign_folders import greedy, reference, write_genai_folder, write_optimum_folder
from support.harness.worker import Sink, request

PROMPTS = [[5], [9, 8, 7], list(range(100, 140)), [300, 2, 2, 17, 450, 33, 8, 1, 0, 511, 60]]
TOLERANCE = 1e-4
HALF_TOLERANCE = 2e-2

Opener = Callable[..., ServedSession]
KINDS: dict[str, Callable[[Path], Path]] = {
    "genai": write_genai_folder,
    "genai with position_ids": lambda path: write_genai_folder(path, positions=True),
    "genai with a growing cache": lambda path: write_genai_folder(path, shared=False),
    "optimum": write_optimum_folder,
    "optimum in float16": lambda path: write_optimum_folder(path, half=True),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[kind](tmp_path_factory.mktemp("foreign") / "model")


@pytest.fixture
def session(folder: Path) -> ServedSession:
    return open_model(load_model(folder), SessionConfig(threads=1, slots=4), lambda _report: None)


@pytest.fixture
def tolerance(kind: str) -> float:
    return HALF_TOLERANCE if "float16" in kind else TOLERANCE


def last(tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    return reference(tokens)[-1]


def test_the_cache_is_of_the_kind_that_the_folder_says(session: ServedSession, kind: str) -> None:
    shared = kind in ("genai", "genai with position_ids")
    assert isinstance(session, SharedSession if shared else GrowingSession)
    assert (session.capabilities.batched_decode, session.capabilities.chunked_prefill) == (shared, shared)


def test_a_prompt_and_the_tokens_after_it(session: ServedSession, tolerance: float) -> None:
    for slot, prompt in enumerate(PROMPTS):
        logits = session.prefill(slot, prompt, 0)
        assert (logits.shape, logits.dtype) == ((1, VOCAB_SIZE), np.float32)
        np.testing.assert_allclose(logits[0], last(prompt), atol=tolerance)
    np.testing.assert_allclose(session.prefill(0, PROMPTS[2], 0), [last(PROMPTS[2])], atol=tolerance)
    tokens = [*PROMPTS[2]]
    for token in (4, 400, 77):
        tokens.append(token)
        np.testing.assert_allclose(session.decode([token], [len(tokens)])[0], last(tokens), atol=tolerance)


def test_wanted_rows_are_those_positions(session: ServedSession, tolerance: float) -> None:
    everything = session.prefill(0, PROMPTS[3], 0, range(len(PROMPTS[3]))).copy()
    np.testing.assert_allclose(everything, reference(PROMPTS[3]), atol=tolerance)
    np.testing.assert_array_equal(session.prefill(0, PROMPTS[3], 0, (7, 2)), everything[[7, 2]])
    assert session.prefill(0, PROMPTS[3], 0, ()).shape == (0, VOCAB_SIZE)


def test_slots_of_all_lengths_decode_together(session: ServedSession, tolerance: float) -> None:
    tokens = [list(prompt) for prompt in PROMPTS]
    for slot, prompt in enumerate(PROMPTS):
        session.prefill(slot, prompt, 0)
    for step in range(3):
        new = [10 * step + slot for slot in range(4)]
        for row, token in zip(tokens, new, strict=True):
            row.append(token)
        logits = session.decode(new, [len(row) for row in tokens])
        np.testing.assert_allclose(logits, [last(row) for row in tokens], atol=tolerance)


def test_a_copied_slot_goes_on_by_itself(session: ServedSession, tolerance: float) -> None:
    session.prefill(2, PROMPTS[3], 0)
    session.copy_slot(2, 0, len(PROMPTS[3]))
    session.copy_slot(2, 1, len(PROMPTS[3]))
    ends = [[*PROMPTS[3], 1], [*PROMPTS[3], 2]]
    logits = session.decode([1, 2], [len(ends[0])] * 2)
    np.testing.assert_allclose(logits, [last(row) for row in ends], atol=tolerance)


@pytest.mark.parametrize("positions", [False, True])
def test_a_shared_cache_takes_a_prompt_in_parts(tmp_path: Path, positions: bool) -> None:
    folder = write_genai_folder(tmp_path / "model", positions=positions)
    session = open_model(load_model(folder), SessionConfig(threads=1, slots=3), lambda _report: None)
    prompt = PROMPTS[2]
    # The slot below decodes between the parts, and slot 1, in the middle of its prompt, rides along.
    session.prefill(0, PROMPTS[1], 0)
    below = list(PROMPTS[1])
    for start, end in itertools.pairwise((0, 13, 20, len(prompt))):
        logits = session.prefill(1, prompt[start:end], start).copy()
        below.append(start)
        rode = session.decode([start, 0], [len(below), end + 1])
        np.testing.assert_allclose(rode[0], last(below), atol=TOLERANCE)
    np.testing.assert_allclose(logits[0], last(prompt), atol=TOLERANCE)
    np.testing.assert_allclose(
        session.decode([3, 9], [len(below) + 1, len(prompt) + 1])[1], last([*prompt, 9]), atol=TOLERANCE
    )


@pytest.mark.parametrize("shared", [True, False])
def test_a_graph_may_compute_the_last_logits_alone(tmp_path: Path, shared: bool) -> None:
    folder = write_genai_folder(tmp_path / "model", shared=shared, pruned=True)
    session = open_model(load_model(folder), SessionConfig(threads=1, slots=2), lambda _report: None)
    assert session.capabilities.chosen_logits
    np.testing.assert_allclose(session.prefill(0, PROMPTS[3], 0), [last(PROMPTS[3])], atol=TOLERANCE)
    assert session.prefill(1, PROMPTS[1], 0, ()).shape == (0, VOCAB_SIZE)
    after = session.decode([4, 5], [len(PROMPTS[3]) + 1, len(PROMPTS[1]) + 1])
    np.testing.assert_allclose(after, [last([*PROMPTS[3], 4]), last([*PROMPTS[1], 5])], atol=TOLERANCE)


@pytest.fixture(params=["genai", "optimum"])
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Worker]:
    folder = KINDS[request.param](tmp_path / "model")
    chunk = {"genai": {"prefill_chunk": 4}}.get(request.param, {})  # the other takes a prompt whole
    config = EngineConfig(SessionConfig(threads=1, slots=2), **chunk)
    opened = load_worker(folder, config, lambda _report: None)
    opened.warm_up()
    yield opened
    opened.close()


def test_more_requests_than_slots_all_get_their_own_answers(worker: Worker) -> None:
    sink = Sink()
    lengths = dict(zip("abcd", (5, 12, 7, 9), strict=True))
    for name, prompt in zip("abcd", PROMPTS, strict=True):
        worker.submit(request(name, prompt, max_tokens=lengths[name], ignore_eos=True), sink)
    answers = sink.answers(*"abcd")
    for name, prompt in zip("abcd", PROMPTS, strict=True):
        assert answers[name].ids == greedy(prompt, lengths[name]), name


def test_a_cancelled_answer_leaves_the_others_alone(worker: Worker) -> None:
    class Cancelling(Sink):
        def deliver(
            self, updates: list[GenerationUpdate]
        ) -> None:  # on the engine's thread, so before its next step
            if any(update.request_id == "long" and update.token_ids for update in updates):
                aborts[0]()
            super().deliver(updates)

    sink = Cancelling()
    aborts = [worker.submit(request("long", PROMPTS[1], max_tokens=100, ignore_eos=True), sink)]
    worker.submit(request("short", PROMPTS[3], max_tokens=8, ignore_eos=True), sink)
    worker.submit(request("queued", PROMPTS[0], max_tokens=8, ignore_eos=True), sink)
    answers = sink.answers("long", "short", "queued")
    assert answers["long"].completion.reason is FinishReason.CANCELLED
    assert answers["short"].ids == greedy(PROMPTS[3], 8)
    assert answers["queued"].ids == greedy(PROMPTS[0], 8)


def test_the_cache_can_be_left_unused(tmp_path: Path) -> None:
    for write in (write_genai_folder, write_optimum_folder):
        folder = write(tmp_path / write.__name__)
        config = EngineConfig(SessionConfig(threads=1, slots=1), kv_cache=False)
        worker = load_worker(folder, config, lambda _report: None)
        sink = Sink()
        worker.submit(request("a", PROMPTS[3], max_tokens=4, ignore_eos=True), sink)
        assert sink.answers("a")["a"].ids == greedy(PROMPTS[3], 4)
        worker.close()
