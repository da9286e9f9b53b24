"""The most likely token, found where the logits are: what numpy's argmax finds, and only ids cross to the
host.
"""

from __future__ import annotations

from collections.abc import Callable
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
from llorch_serve.runtime import greedy_graph
from llorch_serve.runtime.choosers import Choosers
from llorch_serve.runtime.greedy_graph import greedy_model, greedy_session
from llorch_serve.runtime.opening import LoadReport
from llorch_serve.runtime.session import DecoderSession
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids
from support.fakes.played_memory import PlayedMemory
from support.fakes.runtime import ChangedRuntime
from support.harness.played_device import watched

Opener = Callable[..., DecoderSession]
ON_CPU = ActiveProvider(CPU, find_provider("cpu"), {})


def chosen(logits: npt.NDArray[np.float32]) -> list[int]:
    session = onnxruntime.InferenceSession(greedy_model(logits.shape[1]), providers=[CPU])
    (ids,) = session.run(["ids"], {"logits": logits})
    assert ids.dtype == np.int64
    found: list[int] = ids.tolist()
    return found


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 512, 49152, 128256])
def test_ids_are_those_of_argmax(vocab_size: int) -> None:
    logits = np.random.default_rng(vocab_size).standard_normal((17, vocab_size)).astype(np.float32)
    assert chosen(logits) == logits.argmax(axis=1).tolist()
    assert chosen(np.round(logits)) == np.round(logits).argmax(axis=1).tolist(), "many are equal"


def test_its_operators_are_of_versions_that_cudas_provider_has_kernels_for() -> None:
    """onnxruntime's list of kernels (docs/OperatorKernels.md): for each operator, the first opset of the
    newest kernel, or of the one up to the graph's opset where there is a newer one.
    """
    kernels = {"ReduceMax": 18, "ReduceSum": 13, "Equal": 13, "Cast": 13, "Mul": 14, "Sub": 14}
    model = onnx.load_from_string(greedy_model(8))
    (opset,) = model.opset_import
    used = {node.op_type for node in model.graph.node}
    assert {name: onnx.defs.get_schema(name, opset.version).since_version for name in used} == kernels


def test_of_equal_logits_the_first_is_taken_whatever_their_sign_of_zero() -> None:
    zeros = np.array([[-1, -0.0, 0.0, -2], [-1, 0.0, -0.0, -2], [5, 5, 5, 5], [1, 2, 3, 3]], np.float32)
    assert chosen(zeros) == [1, 1, 0, 2]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_row_with_a_logit_that_is_not_finite_has_none(value: float, place: int) -> None:
    logits = np.random.default_rng(1).standard_normal((3, 7)).astype(np.float32)
    expected = logits.argmax(axis=1).tolist()
    logits[1, place] = value
    assert chosen(logits) == [expected[0], -1, expected[2]]


def test_the_largest_numbers_are_finite() -> None:
    most = np.finfo(np.float32).max
    assert chosen(np.array([[-most, most, most], [-most, -most, -most]], np.float32)) == [1, 0]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("greedy")
    return export_tiny(write_hf_folder(folder / "source"), folder / "out")


@pytest.mark.parametrize("options", [(), ("enable_cuda_graph=0",)])
def test_a_greedy_step_gives_the_ids_of_its_logits_and_copies_no_others(
    artifact: Artifact, opened: Opener, memory: PlayedMemory, options: tuple[str, ...]
) -> None:
    session, plain = opened(options, slots=5), open_tiny(artifact, slots=5)
    assert session.capabilities.greedy_decode
    assert not plain.capabilities.greedy_decode
    for each in (session, plain):
        for slot in range(5):
            each.prefill(slot, random_ids(4, seed=slot), 0)
    for step, count in enumerate((3, 5, 1, 2)):
        tokens, lengths = random_ids(count, seed=step), [5 + step] * count
        expected = plain.decode(tokens, lengths).argmax(axis=1)
        memory.bytes_read = 0
        np.testing.assert_array_equal(session.decode_greedy(tokens, lengths), expected)
        assert memory.bytes_read == 8 * count
        rows = [*range(count)][::-2]
        some = session.step_logits(rows).copy()
        assert memory.bytes_read == 8 * count + some.nbytes
        logits = session.decode(tokens, lengths)
        np.testing.assert_array_equal(logits.argmax(axis=1), expected, "a step may be made again")
        np.testing.assert_array_equal(some, logits[rows])
        tokens = random_ids(5 - count, seed=step)
        for slot, token in enumerate(tokens, count):  # the others keep up
            for each in (session, plain):
                each.prefill(slot, [token], 4 + step)


def test_a_choice_that_fails_is_a_providers_error(opened: Opener) -> None:
    session = opened(("enable_cuda_graph=0",))
    watched(session)

    class Broken:
        def io_binding(self) -> Any:
            return SimpleNamespace(bind_input=lambda *_: None, bind_output=lambda *_: None)

        def run_with_iobinding(self, io: Any, options: Any) -> None:
            raise RuntimeError("CUDA failure 700\nat line 1")

    session._decode._choosers = Choosers(Broken())  # type: ignore[attr-defined]
    with pytest.raises(ProviderError, match=r"failed in a step: CUDA failure 700$"):
        session.decode_greedy([7], [1])


def raising(_ids: Any) -> Any:
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda ids: np.where(ids == 256, 511, ids), r"gives the ids \[.*\] for logits whose largest are at"),
        (lambda ids: np.where(ids < 0, 0, ids), "gives the ids"),
        (raising, "does not choose tokens: no kernel image is available"),
    ],
)
def test_a_provider_that_chooses_wrongly_is_not_relied_upon(
    change: Callable[[Any], Any], fault: str, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProviderError, match=fault):
        greedy_session(ChangedRuntime(lambda found: [change(found[0])]), ON_CPU, 512)
    real = greedy_graph.greedy_session
    monkeypatch.setattr(
        "llorch_serve.runtime.choosers.greedy_session",
        lambda _runtime, provider, vocab_size: real(
            ChangedRuntime(lambda found: [change(found[0])]), provider, vocab_size
        ),
    )
    reports: list[LoadReport] = []
    session = opened((), reports.append)
    assert not session.capabilities.greedy_decode
    assert "tokens are chosen on the host: " in (reports[0].notice or "")
    session.decode([7], [1])
