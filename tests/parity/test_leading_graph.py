"""The likeliest tokens, found where the logits are: those of numpy's sort, what all weigh together, and only
these cross to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

from llorch_serve.artifact.folder import Artifact
from llorch_serve.errors import ProviderError
from llorch_serve.providers import CPU, ActiveProvider
from llorch_serve.providers.table import find_provider
from llorch_serve.runtime import choosers, leading_graph
from llorch_serve.runtime.leading_graph import LEADING, leading_model, leading_session
from llorch_serve.runtime.opening import LoadReport
from llorch_serve.runtime.session import DecoderSession
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids
from support.fakes.played_memory import PlayedMemory
from support.fakes.runtime import ChangedRuntime
from support.fakes.session import sequence_of
from support.harness.engine_run import answers, run_all
from support.harness.played_device import watched
from tolerances import STEPWISE_LOGITS, STEPWISE_WEIGHTS, WEIGHTS_TOGETHER

Opener = Callable[..., DecoderSession]
Found = dict[str, npt.NDArray[Any]]
ON_CPU = ActiveProvider(CPU, find_provider("cpu"), {})
OUTPUTS = ("scores", "ids", "totals")


def found(logits: npt.NDArray[np.float32], *temperatures: float) -> Found:
    session = onnxruntime.InferenceSession(leading_model(logits.shape[1]), providers=[CPU])
    scale = 1 / np.resize(np.array(temperatures or (1.0,), np.float32), (len(logits), 1))
    return dict(zip(OUTPUTS, session.run(OUTPUTS, {"logits": logits, "scale": scale}), strict=True))


@pytest.mark.parametrize("vocab_size", [129, 512, 49152, 128256])
def test_they_are_the_largest_logits_and_totals_are_sums_over_all(vocab_size: int) -> None:
    logits = (4 * np.random.default_rng(vocab_size).standard_normal((5, vocab_size))).astype(np.float32)
    temperatures = np.array([0.1, 0.5, 1.0, 2.0, 50.0])
    got = found(logits, *temperatures)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :LEADING]
    np.testing.assert_array_equal(got["scores"], np.take_along_axis(logits, order, axis=1))
    np.testing.assert_array_equal(np.take_along_axis(logits, got["ids"], axis=1), got["scores"])
    below = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    np.testing.assert_allclose(
        got["totals"], np.exp(below / temperatures[:, None]).sum(axis=1), rtol=WEIGHTS_TOGETHER
    )
    assert [got[name].dtype for name in OUTPUTS] == [np.float32, np.int64, np.float64]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 300])
def test_the_total_of_a_row_with_a_logit_that_is_not_finite_is_none(value: float, place: int) -> None:
    logits = np.random.default_rng(1).standard_normal((3, 301)).astype(np.float32)
    logits[1, place] = value
    assert np.isfinite(found(logits)["totals"]).tolist() == [True, False, True]


def test_its_operators_are_of_versions_that_cudas_provider_has_kernels_for() -> None:
    """As in ``test_greedy_graph.py``; TopK has had one since 11, and its next version is of 24."""
    kernels = {
        "ReduceMax": 18,
        "ReduceSum": 13,
        "Sub": 14,
        "Mul": 14,
        "Add": 14,
        "Exp": 13,
        "Cast": 13,
        "TopK": 11,
    }
    model = onnx.load_from_string(leading_model(200))
    (opset,) = model.opset_import
    used = {node.op_type for node in model.graph.node}
    assert {name: onnx.defs.get_schema(name, opset.version).since_version for name in used} == kernels


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies of tiny models are large enough."""
    monkeypatch.setattr(choosers, "FEWEST_TOKENS", LEADING + 1)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("leading")
    return export_tiny(write_hf_folder(folder / "source"), folder / "out")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", [(), ("enable_cuda_graph=0",)], ids=["recorded", "not recorded"])
def test_only_the_likeliest_tokens_come_to_the_host(
    artifact: Artifact, opened: Opener, memory: PlayedMemory, options: tuple[str, ...]
) -> None:
    session, plain = opened(options), open_tiny(artifact, slots=3)
    watched(session)
    assert session.capabilities.leading_decode == LEADING
    for step, count in enumerate((3, 2, 1, 3)):
        for each in (session, plain):
            for slot in range(3):
                each.prefill(slot, random_ids(4, seed=9 * step + slot), 0)
        tokens, lengths = random_ids(count, seed=step), [5] * count
        temperatures = [0.5, 1.0, 2.0][:count]
        expected = plain.decode(tokens, lengths)
        memory.bytes_read = 0
        ids, scores, totals = session.decode_leading(tokens, lengths, temperatures)
        assert memory.bytes_read == count * (LEADING * (8 + 4) + 8)
        largest = -np.sort(-expected, axis=1)[:, :LEADING]
        np.testing.assert_allclose(scores, largest, atol=STEPWISE_LOGITS)
        np.testing.assert_allclose(np.take_along_axis(expected, ids, axis=1), scores, atol=STEPWISE_LOGITS)
        below = expected.astype(np.float64) - expected.max(axis=1, keepdims=True)
        sums = np.exp(below / np.array(temperatures)[:, None]).sum(axis=1)
        np.testing.assert_allclose(totals, sums, rtol=STEPWISE_WEIGHTS)
        for rows in ([*range(count)], [0, count - 1][-count:], [count - 1]):
            np.testing.assert_allclose(session.step_logits(rows), expected[rows], atol=STEPWISE_LOGITS)


def replaced(session: DecoderSession, run: Callable[[Any, Any], None]) -> Any:
    """Have ``run`` called in place of the graph, which is returned."""
    graph: Any = session._decode
    inner = graph._choosers.leading
    played = SimpleNamespace(io_binding=inner.io_binding, run_with_iobinding=run)
    graph._choosers = replace(graph._choosers, leading=played)
    return inner


@pytest.mark.usefixtures("small")
def test_it_is_never_recorded_and_first_made_as_large_as_it_gets(opened: Opener) -> None:
    session = opened()
    watched(session)
    seen: list[tuple[str, int]] = []

    def run(io: Any, options: Any) -> None:
        inner.run_with_iobinding(io, options)
        rows = io.get_outputs()[0].shape()[0]
        seen.append((options.get_run_config_entry("gpu_graph_id"), rows))

    inner = replaced(session, run)
    session.decode([7], [1])
    assert seen == [("-1", 3)], "by a worker that warms up"
    for _ in range(2):
        session.decode_leading([7], [1], [1.0])
    assert seen[1:] == [("-1", 1)] * 2


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", [(), ("enable_cuda_graph=0",)], ids=["recorded", "not recorded"])
def test_where_it_fails_all_logits_are_fetched_from_then_on(
    artifact: Artifact, opened: Opener, caplog: pytest.LogCaptureFixture, options: tuple[str, ...]
) -> None:
    session, plain = opened(options), open_tiny(artifact, slots=3)
    tried: list[object] = []

    def run(io: Any, options: Any) -> None:
        tried.append(io)
        raise RuntimeError("out of memory\nat line 1")

    replaced(session, run)
    for step in range(3):
        _, _, totals = session.decode_leading([7, 8], [1 + step] * 2, [1.0, 0.5])
        assert np.isnan(totals).all()
        expected = plain.decode([7, 8], [1 + step] * 2)
        np.testing.assert_allclose(session.step_logits([0, 1]), expected, atol=STEPWISE_LOGITS)
    assert len(tried) == 1
    assert caplog.text.count("not found on the device any more") == 1
    assert "out of memory" in caplog.text


def test_small_vocabularies_are_copied_whole(opened: Opener) -> None:
    able = opened().capabilities
    assert (able.greedy_decode, able.leading_decode) == (True, 0)


@pytest.mark.usefixtures("small")
def test_a_temperature_near_nothing_leaves_it_to_the_host(opened: Opener) -> None:
    session = opened()
    _, _, totals = session.decode_leading([7, 8], [1, 1], [1e-45, 1.0])
    assert np.isfinite(totals).tolist() == [False, True]


@pytest.mark.usefixtures("small")
def test_an_engine_draws_the_same_tokens_over_a_device(
    artifact: Artifact, opened: Opener, memory: PlayedMemory
) -> None:
    def drawn(session: DecoderSession) -> list[list[int]]:
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.9, "top_k": 20},
            {},
            {"temperature": 0.3, "top_p": 0.6},
            {"temperature": 0.7, "min_p": 0.2},
        ]
        sequences = [
            sequence_of(str(place), random_ids(5, seed=place), 8, **{"seed": place, **asked})
            for place, asked in enumerate(kinds)
        ]
        assert not run_all(session, sequences)
        return answers(sequences)

    session = opened(slots=4)
    session.decode([1], [1])  # as a worker warms up
    memory.bytes_read = 0
    found = drawn(session)
    prompts, steps = 4, 7
    few = steps * 4 * (LEADING * 12 + 8)
    assert memory.bytes_read <= prompts * 512 * 4 + few, "of no step a row of logits"
    assert found == drawn(open_tiny(artifact, slots=4))


def changed(change: Callable[[Found], object]) -> ChangedRuntime:
    """Return onnxruntime, whose sessions give what ``change`` has made of it."""

    def changing(given: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        change(dict(zip(OUTPUTS, given, strict=True)))
        return given

    return ChangedRuntime(changing)


def twice(got: Found) -> None:
    """In a row of equal logits, as only there it shows in nothing else."""
    got["ids"][2, 1] = got["ids"][2, 0]


def raising(_got: Found) -> None:
    raise RuntimeError("no kernel image is available")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda got: got["scores"].__setitem__((0, 3), got["scores"][0, 4]), "row 0 has other logits"),
        (lambda got: got["ids"].__setitem__((0, 3), got["ids"][0, 4]), "row 0 has other logits"),
        (twice, "row 2 has a token twice"),
        (lambda got: got["totals"].__imul__(1.0001), r"row 0 has the total .*, expected"),
        (lambda got: got["totals"].__setitem__(np.isnan(got["totals"]), 1), "row 5 .* not finite, and the"),
        (raising, "does not find the likeliest tokens: no kernel image is available"),
    ],
)
def test_a_provider_that_finds_others_is_not_relied_upon(
    change: Callable[[Found], object], fault: str, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProviderError, match=fault):
        leading_session(changed(change), ON_CPU, 512)
    real = leading_graph.leading_session
    monkeypatch.setattr(
        "llorch_serve.runtime.choosers.leading_session",
        lambda _runtime, provider, vocab_size: real(changed(change), provider, vocab_size),
    )
    reports: list[LoadReport] = []
    session = opened((), reports.append)
    assert (session.capabilities.greedy_decode, session.capabilities.leading_decode) == (True, 0)
    assert "tokens are drawn on the host: " in (reports[0].notice or "")
    session.decode([7], [1])
