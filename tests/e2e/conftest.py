"""Artifacts and workers that the end-to-end tests share: made once a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.builders.checkpoints import write_gguf, write_hf_folder
from support.cluster import RayCluster, ray_cluster
from support.harness.processes import WorkerProcess, llorch_here, serving
from support.harness.routing import WAYS, going


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a Hugging Face folder; 128 positions, 512 tokens."""
    return write_hf_folder(tmp_path_factory.mktemp("tiny") / "source")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("tiny-gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def export_here() -> Callable[..., Path]:
    """Return a function that exports a source to a folder, and returns that folder."""

    def export(source: Path, output: Path, *flags: str) -> Path:
        outcome = llorch_here("export", source, "--output", output, *flags)
        assert outcome.code == 0, outcome
        return output

    return export


@pytest.fixture(scope="session")
def tiny(tiny_source: Path, export_here: Callable[..., Path]) -> Path:
    """The tiny model's default artifact."""
    return export_here(tiny_source, tiny_source.parent / "artifact")


@pytest.fixture(scope="session")
def tiny_staged(tiny_source: Path, export_here: Callable[..., Path]) -> Path:
    """The tiny model in two stages."""
    return export_here(tiny_source, tiny_source.parent / "staged", "--stages", "2")


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory, export_here: Callable[..., Path]) -> Path:
    """A tiny artifact whose context is so long that an answer does not end during a test."""
    folder = tmp_path_factory.mktemp("long")
    source = write_hf_folder(folder / "source", {"max_position_embeddings": 200_000})
    return export_here(source, folder / "artifact")


@pytest.fixture(scope="session")
def tiny_worker(tiny: Path) -> Iterator[WorkerProcess]:
    """A worker process that serves the tiny model."""
    with serving(tiny) as worker:
        yield worker


@pytest.fixture(scope="session")
def smollm2_worker(smollm2: Callable[..., Path]) -> Iterator[Callable[..., WorkerProcess]]:
    """Return a function that serves the real model at a precision and with flags, one worker process for
    each.
    """
    started: dict[tuple[str, ...], WorkerProcess] = {}
    with contextlib.ExitStack() as stack:

        def serve(precision: str, *flags: str) -> WorkerProcess:
            key = (precision, *flags)
            if key not in started:
                folder = smollm2(precision)
                started[key] = stack.enter_context(serving(folder, "--max-context", "2048", *flags))
            return started[key]

        yield serve


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Fronts reach their generators as a worker's do, and then through a replica in bytes."""
    with going(request.param):
        yield request.param


@pytest.fixture(scope="module", params=["worker", pytest.param("replicas", marks=pytest.mark.slow)])
def way_at_leisure(request: pytest.FixtureRequest) -> Iterator[str]:
    """As ``way``, for fronts of which that shows little more."""
    with going(request.param):
        yield request.param


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    """The one Ray cluster of a test session, which takes seconds to start; this process is its driver."""
    with ray_cluster() as started:
        yield started
