"""When the graph that decodes may be loaded behind the first token, and when it may not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from llorch_export.options import ExportOptions
from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.requests import GenerationRequest, TextPrompt
from llorch_serve.runtime.late_graph import LateGraph
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.terminal.opening import open_worker
from llorch_serve.worker.local import LocalClient
from llorch_serve.worker.worker import Worker
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny

SESSION = SessionConfig(threads=1, slots=1, huge_pages=False)
REQUEST = GenerationRequest(
    "one", TextPrompt("Once"), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("late")
    own = ExportOptions("", Path(), precision="int8", activations="row", kv_dtype="float32")
    source = write_hf_folder(folder / "source")
    return export_tiny(source, folder / "artifact", precision="int8", prompts=own)


def is_late(worker: Worker) -> bool:
    return isinstance(cast("Any", worker._session)._decode, LateGraph)


@pytest.mark.parametrize(("guesses", "late"), [({}, True), ({"lookup": 4}, False)], ids=["none", "lookup"])
def test_it_is_not_where_guesses_are_weighed_by_what_calls_take(
    artifact: Artifact, guesses: dict[str, Any], late: bool
) -> None:
    worker = open_worker(artifact.folder, EngineConfig(session=SESSION, **guesses), tokenizer=None)
    try:
        assert is_late(worker) == late
    finally:
        worker.close()


def test_nothing_is_read_after_signed_files_have_been_checked(artifact: Artifact, tmp_path: Path) -> None:
    folder = shutil.copytree(artifact.folder, tmp_path / "signed")

    class Signed:
        """Stands for a checked folder, of which somebody changes a file as soon as it may not be looked
        at again.
        """

        def check_unchanged(self) -> None:
            for graph in folder.glob("*.onnx"):
                graph.write_bytes(b"another graph")

    config = EngineConfig(session=SESSION)
    worker = open_worker(folder, config, tokenizer=None, signed=(cast("Any", Signed()),))
    try:
        (answer,) = LocalClient(worker).complete(REQUEST)
        assert len(answer.token_ids) == 4
    finally:
        worker.close()
