"""A session on a model in stages gives the bits of a session on one graph, wherever its stages run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from llorch_export.graph.stage_choice import parse_stages
from llorch_export.options import ExportOptions, Rule
from llorch_serve.artifact.folder import Artifact, load_artifact
from llorch_serve.config import SessionConfig, StageChoice
from llorch_serve.errors import ArtifactError, ResourceError, UsageError
from llorch_serve.loading.models import open_artifact, open_lanes
from llorch_serve.runtime.opening import open_session
from llorch_serve.runtime.session import DecoderSession, SessionGraphs
from llorch_serve.stages import wire
from llorch_serve.stages.chain import Chain, MirroredCache
from llorch_serve.stages.pipeline import Pipeline, open_pipeline
from llorch_serve.stages.remote import RemotePort, answered
from llorch_serve.stages.stage import LocalPort, Stage
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, random_ids
from support.harness.processes import llorch
from support.harness.slot_calls import slot_calls

LAYERS = {"num_hidden_layers": 4}
Both = tuple[Artifact, Artifact]
CONFIG = SessionConfig(threads=1, slots=3, max_context=48)
TRANSFORMS = ("rotate", "hadamard")
OWN_PROMPTS = ExportOptions(
    "",
    Path(),
    precision="int8",
    activations="row",
    rules=(Rule(("*.mlp.down_proj",), activations="block"),),
    kv_dtype="float32",
    transforms=TRANSFORMS,
)
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "as by default": {
        "precision": "int8", "kv_dtype": "int8", "transforms": TRANSFORMS, "prompts": OWN_PROMPTS,
    },
    "int4": {"precision": "int4", "kv_dtype": "int8"},
}  # fmt: skip


@pytest.fixture(scope="module", params=FORMS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """A model as one graph and as two stages."""
    folder, options = tmp_path_factory.mktemp("stages"), FORMS[request.param]
    source = write_hf_folder(folder / "source", LAYERS)
    whole = export_tiny(source, folder / "whole", **options)
    return whole, export_tiny(source, folder / "staged", stages=parse_stages("2"), **options)


@contextlib.contextmanager
def opened(artifact: Artifact, config: SessionConfig = CONFIG, **choice: Any) -> Iterator[Pipeline]:
    pipeline = open_pipeline(artifact, replace(config, stages=StageChoice(**choice)), lambda _report: None)
    try:
        yield pipeline
    finally:
        pipeline.close()


@contextlib.contextmanager
def one_lane(artifact: Artifact, config: SessionConfig) -> Iterator[DecoderSession]:
    with opened(artifact, config) as pipeline:
        (session,) = pipeline.sessions
        yield session


def calls(session: DecoderSession) -> list[np.ndarray]:
    """Return what calls of every kind give, and what is left of a slot that was released in part."""
    found = slot_calls(session)
    session.prefill(0, random_ids(40, seed=5), 0)
    session.release_slot(0, 24)
    # Goes on where the rest was given back, in parts of odd length, one of them to the context's end.
    found += [session.prefill(0, random_ids(11, seed=6), 24, (0, 4, 10)).copy()]
    found += [session.prefill(0, random_ids(13, seed=7), 35, ()).copy(), session.decode([3], [30]).copy()]
    return found


def check_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def whole_session(artifact: Artifact, **options: Any) -> DecoderSession:
    return open_session(artifact, replace(CONFIG, **options), lambda _report: None)


def test_stages_give_the_bits_of_one_graph(both: Both) -> None:
    check_stages(both, processes=False)


@pytest.mark.parametrize("both", ["as by default"], indirect=True)
def test_so_do_stages_in_processes_of_their_own(both: Both) -> None:
    check_stages(both, processes=True)


def check_stages(both: Both, *, processes: bool) -> None:
    whole, staged = both
    session = whole_session(whole)
    with opened(staged, processes=processes, lanes=1) as pipeline:
        (lane,) = pipeline.sessions
        assert lane.capabilities == session.capabilities
        assert lane.kv_dtype == session.kv_dtype
        assert lane.capacity == session.capacity
        check_same(calls(lane), calls(session))
        first, last = pipeline.times()
        assert first.calls == last.calls > 10
        assert first.busy_s > 0
        assert last.busy_s > 0


SETTINGS: list[dict[str, Any]] = [{"batch_invariant": True}, {"single_graph": True}, {"kv_dtype": "float32"}]


@pytest.mark.parametrize("options", SETTINGS)
def test_settings_of_a_session_hold_for_every_stage(both: Both, options: dict[str, Any]) -> None:
    config = replace(CONFIG, **options)

    def tried(make: Callable[[], AbstractContextManager[DecoderSession]]) -> list[np.ndarray] | str:
        try:
            with make() as session:
                return [*calls(session), np.array(session.capabilities.batch_invariant, np.uint32)]
        except UsageError as refusal:
            return str(refusal)

    expected = tried(lambda: contextlib.nullcontext(whole_session(both[0], **options)))
    found = tried(lambda: one_lane(both[1], config))
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
    else:
        check_same(found, expected)


def test_lanes_share_the_weights_and_nothing_else(both: Both) -> None:
    whole, staged = both
    expected = calls(whole_session(whole))
    with opened(staged, replace(CONFIG, slots=9), lanes=3) as pipeline:
        assert [lane.capacity.slots for lane in pipeline.sessions] == [3, 3, 3]
        for lane in pipeline.sessions[1:]:
            lane.prefill(0, random_ids(30, seed=9), 0)
        for lane in pipeline.sessions:
            check_same(calls(lane), expected)


@pytest.mark.parametrize("both", ["as by default"], indirect=True)
def test_a_stage_process_refuses_as_one_graph_does(both: Both, tmp_path: Path) -> None:
    broken = Artifact(tmp_path / "broken", both[1].manifest)
    shutil.copytree(both[1].folder, broken.folder)
    last = (broken.manifest.stages or ())[-1]
    graph = broken.folder / (last.decode_graph or last.graph)
    graph.write_bytes(bytes(graph.stat().st_size))
    for processes in (False, True):
        with (
            pytest.raises(ArtifactError, match=f"{graph.name} cannot be loaded: .*Export the model again"),
            opened(broken, processes=processes),
        ):
            pass


def test_a_choice_of_places_that_does_not_fit_is_refused(both: Both) -> None:
    whole, staged = both
    for choice, flag in (
        (StageChoice((0, 1)), "--stage-device"),
        (StageChoice((), True), "--stage-processes"),
    ):
        with pytest.raises(UsageError, match=f"{flag} has no effect on .* --stages N"):
            open_artifact(whole, replace(CONFIG, stages=choice), lambda _report: None)
    with pytest.raises(UsageError, match="names 3 devices and the artifact has 2 stages"):
        open_lanes(staged, replace(CONFIG, stages=StageChoice((0, 1, 2))), lambda _report: None)
    with pytest.raises(UsageError, match="cpu has one; leave it out"):
        open_lanes(staged, replace(CONFIG, stages=StageChoice((0, 1))), lambda _report: None)
    assert open_lanes(whole, CONFIG, lambda _report: None) is None


def test_memory_that_does_not_suffice_is_told_before_loading(both: Both) -> None:
    with (
        pytest.raises(ResourceError, match="KV cache"),
        opened(both[1], replace(CONFIG, kv_cache_bytes=2**10)),
    ):
        pass


STEPS = 101


def steps(session: DecoderSession) -> np.ndarray:
    """Return the logits of a prompt and of the greedy tokens behind it, in a slot that was copied."""
    prompt = list(range(100, 150))
    found = [session.prefill(1, prompt, 0).copy()]
    session.copy_slot(1, 0, len(prompt))
    for step in range(1, STEPS):
        token = int(found[-1].argmax())
        found.append(session.decode([token], [len(prompt) + step]).copy())
    return np.concatenate(found)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--precision", "fp32"), ()], ids=["fp32", "by default"])
def test_a_real_model_gives_the_same_bits_in_two_and_three_stages(
    smollm2_gguf: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    def made(name: str, *more: str) -> Artifact:
        outcome = llorch("export", smollm2_gguf, "--output", tmp_path / name, *flags, *more)
        assert outcome.code == 0, outcome
        return load_artifact(tmp_path / name)

    config = SessionConfig(slots=2, max_context=256)
    expected = steps(open_session(made("whole"), config, lambda _report: None))
    for stages in ("2", "3"):
        staged = made(stages, "--stages", stages)
        for processes in (False, True):
            with opened(staged, config, processes=processes, lanes=1) as pipeline:
                check_same([steps(pipeline.sessions[0])], [expected])


@pytest.mark.parametrize("both", ["as by default"], indirect=True)
def test_bytes_are_all_that_crosses(both: Both) -> None:
    """A lane through ports that carry nothing but bytes, as an actor of a cluster would, is a session too."""
    whole, staged = both
    with opened(staged) as pipeline:
        (lane,) = pipeline.sessions
        hosts = pipeline._places.hosts
        carried: list[int] = []

        def carry(stage: Stage, question: wire.Buffers) -> memoryview:
            answer = b"".join(answered(stage, 0, memoryview(b"".join(question))))
            carried.append(len(answer))
            return memoryview(answer)

        local = [cast("LocalPort", host.port(0)).stage for host in hosts]
        ports = [RemotePort(partial(carry, stage)) for stage in local]
        chains = SessionGraphs(Chain(ports, prompt=False), Chain(ports, prompt=True), None)
        cache = MirroredCache(ports, lane.cache.kv, lane.capacity, takes_batches=True)
        session = DecoderSession(
            staged, lane.placement, cache, chains, capacity=lane.capacity, batch_invariant=True
        )
        check_same(calls(session), calls(whole_session(whole)))
        assert ports[-1].times().calls == local[-1].times.calls == len(carried) / 2 - 3  # and three edits
