"""The real session on a tiny exported model: cutting, batching, moving and neighbours never change a
sequence's logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import SessionConfig
from llorch_serve.engine.plan import PrefillChunk, Sampled
from llorch_serve.engine.scheduler import Scheduler, SchedulerConfig
from llorch_serve.engine.sequence import Limits
from llorch_serve.engine.sequence import Sequence as TokenSequence
from llorch_serve.errors import ProviderError
from llorch_serve.providers import CPU, ActiveProvider, import_runtime
from llorch_serve.runtime import opening as session_module
from llorch_serve.runtime import operator_check
from llorch_serve.runtime.graph_loading import runtime_options
from llorch_serve.runtime.opening import LoadReport, open_session
from llorch_serve.runtime.session import DecoderSession
from support.builders.checkpoints import VOCAB_SIZE, write_hf_folder

Logits = npt.NDArray[np.float32]
TOLERANCE = {"fp32": 2e-5, "fp16": 0.02, "int8": 0.1}  # one row alone against many together
PROMPTS = [[5], [9, 8, 7], list(range(100, 140)), [300, 2, 2, 17, 450, 33, 8, 1, 0, 511, 60]]


RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "int8": {"precision": "int8"},
    "int8 in float16": {"precision": "int8", "compute_type": "float16"},
}


@pytest.fixture(scope="module", params=RECIPES)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("session")
    source = write_hf_folder(folder / "source")
    options = ExportOptions(str(source), folder / "artifact", **RECIPES[request.param])
    return export(options, lambda _phase, _done, _total: None).artifact


def tolerance(session: DecoderSession) -> float:
    return TOLERANCE[session.artifact.manifest.recipe.precision]


def opened(artifact: Artifact, *, slots: int = 4) -> DecoderSession:
    return open_session(artifact, SessionConfig(threads=1, slots=slots), lambda _report: None)


@pytest.fixture
def session(artifact: Artifact) -> DecoderSession:
    return opened(artifact)


def generate(session: DecoderSession, prompt: Sequence[int], count: int) -> list[Logits]:
    """Return the logits of ``count`` greedy steps of one sequence that has the session to itself, in slot
    0.
    """
    rows = [session.prefill(0, prompt, 0)[0].copy()]
    for step in range(1, count):
        rows.append(session.decode([int(rows[-1].argmax())], [len(prompt) + step])[0].copy())
    return rows


def test_logits_have_the_shape_of_what_is_wanted(session: DecoderSession) -> None:
    prompt = PROMPTS[2]
    assert session.prefill(0, prompt, 0).shape == (1, VOCAB_SIZE)
    assert session.prefill(0, prompt, 0, ()).shape == (0, VOCAB_SIZE)
    assert session.prefill(0, prompt, 0, (7, 2)).shape == (2, VOCAB_SIZE)


def test_wanted_rows_are_those_positions_and_more_than_slots_are_possible(session: DecoderSession) -> None:
    prompt = PROMPTS[2]
    everything = session.prefill(1, prompt, 0, range(len(prompt))).copy()
    assert len(everything) > session.capacity.slots
    np.testing.assert_array_equal(session.prefill(1, prompt, 0)[0], everything[-1])
    np.testing.assert_array_equal(session.prefill(1, prompt, 0, (7, 2)), everything[[7, 2]])
    # An independent look at a row in the middle: a prompt that ends there.
    np.testing.assert_array_equal(session.prefill(1, prompt[:8], 0)[0], everything[7])


def test_prompts_take_as_many_calls_as_the_providers_attention_needs(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another provider than the CPU's, whose attention is found to be right for three rows alone."""
    prompt = PROMPTS[2]
    free = opened(artifact)
    whole = free.prefill(1, prompt, 0, range(len(prompt))).copy()
    free.prefill(1, prompt[:9], 0)
    rest = free.verify(1, prompt[9:], 9).copy()
    monkeypatch.setattr(session_module, "CPU", "none")
    monkeypatch.setattr(operator_check, "attention_rows", lambda *_: 3)
    reports: list[LoadReport] = []
    session = open_session(artifact, SessionConfig(threads=1, slots=2), reports.append)
    assert "attention over more than 3 rows is wrong here, so prompts go 3 tokens at a time" in str(
        reports[0].notice
    )
    calls: list[int] = []
    run = session._prompts.run
    monkeypatch.setattr(session._prompts, "run", lambda *of: calls.append(len(of[1])) or run(*of))
    found = session.prefill(1, prompt, 0, (7, 2, len(prompt) - 1))
    assert calls == [3] * (len(prompt) // 3) + [len(prompt) % 3] * (len(prompt) % 3 > 0)
    np.testing.assert_allclose(found, whole[[7, 2, len(prompt) - 1]], atol=tolerance(session))
    assert session.prefill(1, prompt, 0, ()).shape == (0, VOCAB_SIZE)
    session.prefill(1, prompt[:9], 0)
    np.testing.assert_allclose(session.verify(1, prompt[9:], 9), rest, atol=tolerance(session))


@pytest.mark.parametrize("cuts", [[20], [2, 17], [3, 6, 38], [13, 26]])
def test_a_prompt_in_chunks_equals_the_whole_bit_for_bit(session: DecoderSession, cuts: list[int]) -> None:
    prompt = PROMPTS[2]
    whole = session.prefill(0, prompt, 0)[0].copy()
    edges = [0, *cuts, len(prompt)]
    for start, end in itertools.pairwise(edges):
        last = session.prefill(1, prompt[start:end], start, None if end == len(prompt) else ())
    np.testing.assert_array_equal(last[0], whole)
    token = int(whole.argmax())
    np.testing.assert_array_equal(*session.decode([token, token], [len(prompt) + 1] * 2))


def test_one_token_at_a_time_agrees_with_the_whole(session: DecoderSession) -> None:
    prompt = PROMPTS[3]
    whole = session.prefill(0, prompt, 0)[0].copy()
    session.prefill(0, prompt[:1], 0)
    for length in range(2, len(prompt) + 1):
        stepped = session.decode([prompt[length - 1]], [length])
    np.testing.assert_allclose(stepped[0], whole, atol=tolerance(session))


def test_slots_of_different_lengths_decode_as_each_does_alone(
    artifact: Artifact, session: DecoderSession
) -> None:
    alone = [generate(opened(artifact, slots=1), prompt, 10) for prompt in PROMPTS]
    together = [[session.prefill(slot, prompt, 0)[0].copy()] for slot, prompt in enumerate(PROMPTS)]
    for step in range(1, 10):
        tokens = [int(rows[-1].argmax()) for rows in together]
        logits = session.decode(tokens, [len(prompt) + step for prompt in PROMPTS])
        for rows, row in zip(together, logits, strict=True):
            rows.append(row.copy())
    np.testing.assert_array_equal(together, alone)


def test_a_newcomer_and_a_slot_that_rides_along_change_nobody(
    artifact: Artifact, session: DecoderSession
) -> None:
    first, second = PROMPTS[3], PROMPTS[2]
    expected_first = generate(opened(artifact, slots=1), first, 8)
    expected_second = generate(opened(artifact, slots=1), second, 4)
    # The second prompt arrives in slot 0 in chunks between the steps of slot 1; slot 0 rides along meanwhile.
    got_first = [session.prefill(1, first, 0)[0].copy()]
    got_second: list[Logits] = []
    done = 0
    for step in range(1, 8):
        if done < len(second):
            end = min(done + 10, len(second))
            logits = session.prefill(0, second[done:end], done, None if end == len(second) else ())
            done = end
            got_second += [row.copy() for row in logits]
        riding = not got_second
        token = 0 if riding else int(got_second[-1].argmax())
        length = done + 1 if riding else len(second) + len(got_second)
        rows = session.decode([token, int(got_first[-1].argmax())], [length, len(first) + step])
        if not riding:
            got_second.append(rows[0].copy())
        got_first.append(rows[1].copy())
    np.testing.assert_array_equal(got_first, expected_first)
    np.testing.assert_array_equal(got_second[:4], expected_second)


def test_chunks_as_the_scheduler_cuts_them_keep_every_bit(session: DecoderSession) -> None:
    prompt = [(7 * i) % 400 for i in range(100)]
    expected = session.prefill(0, prompt, 0, range(len(prompt))).copy()
    for length in range(2, len(prompt) + 1):
        scheduler = Scheduler(SchedulerConfig(slots=1, budget=128, prefill_chunk=40, max_waiting=1))
        sequence = TokenSequence("r", prompt[:length], length, Limits(1))
        scheduler.add(sequence)
        while (plan := scheduler.schedule()) is not None:
            chunk = plan.call
            assert isinstance(chunk, PrefillChunk)
            logits = session.prefill(1, chunk.token_ids, chunk.start)
            scheduler.update(plan, [Sampled((0,) if chunk.samples else ())])
        np.testing.assert_array_equal(logits[0], expected[length - 1], err_msg=f"{length} tokens")


def test_a_sequence_goes_on_in_the_slot_it_was_copied_to(artifact: Artifact, session: DecoderSession) -> None:
    prompt = PROMPTS[3]
    expected = generate(opened(artifact, slots=1), prompt, 6)
    session.prefill(0, PROMPTS[2], 0)  # leaves something to overwrite
    got = [session.prefill(3, prompt, 0)[0].copy()]
    for step in range(1, 6):
        if step == 3:
            session.copy_slot(3, 0, len(prompt) + step - 1)
        lengths, token = len(prompt) + step, int(got[-1].argmax())
        rows = (
            session.decode([token] * 4, [1, 1, 1, lengths])
            if step < 3
            else session.decode([token], [lengths])
        )
        got.append(rows[-1].copy())
    np.testing.assert_array_equal(got, expected)


def test_the_last_position_of_the_context_is_usable(session: DecoderSession) -> None:
    context = session.capacity.context
    prompt = [i % 400 for i in range(context - 1)]
    token = int(session.prefill(2, prompt, 0).argmax())
    whole = session.prefill(3, [*prompt, token], 0)[0].copy()
    session.copy_slot(2, 0, len(prompt))
    stepped = session.decode([token], [context])[0]
    np.testing.assert_allclose(stepped, whole, atol=tolerance(session))


def test_a_failure_of_the_runtime_is_ours_and_the_session_goes_on(session: DecoderSession) -> None:
    expected = session.prefill(0, [1, 2, 3], 0).copy()
    with pytest.raises(ProviderError, match="the runtime failed in a step") as caught:
        session.prefill(0, [1, 2, 3], 0, (99,))
    assert "\n" not in str(caught.value)
    np.testing.assert_array_equal(session.prefill(0, [1, 2, 3], 0), expected)


def test_opening_tells_what_it_decided_and_where_it_runs(artifact: Artifact) -> None:
    reports: list[LoadReport] = []
    session = open_session(artifact, SessionConfig(threads=1, slots=2, max_context=64), reports.append)
    (report,) = reports
    assert (report.threads, report.notice) == (1, None)
    assert report.capacity == session.capacity
    assert (session.capacity.slots, session.capacity.context) == (2, 64)
    assert session.placement.provider == CPU
    assert session.placement.node_share == 1.0


def test_opening_tells_the_providers_device(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActiveProvider, "device", "cpu:7")
    assert opened(artifact).placement.device == "cpu:7"


def test_threads_are_told_not_to_outlast_a_call() -> None:
    """Those of one graph would take the processors from the other.

    What that costs is in docs/decisions/spinning-threads.md.
    """
    options = runtime_options(import_runtime("1.24"), 2)
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
    assert options.intra_op_num_threads == 2
