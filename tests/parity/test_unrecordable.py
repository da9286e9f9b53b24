"""Where steps cannot be recorded: what makes no steps refuses it, and a graph with nodes elsewhere is told by
its nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from llorch_export.graph.stage_choice import parse_stages
from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, ProviderError, UsageError
from llorch_serve.providers import CPU, ActiveProvider, ProviderChoice
from llorch_serve.runtime import embedding_session, opening, operator_check
from llorch_serve.stages import pipeline
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny
from support.fakes.played_memory import PlayedMemory
from support.harness.played_device import PLAYED, open_played


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize(
    ("module", "opens", "options", "what"),
    [
        (embedding_session, embedding_session.open_embedder, {"embed": "last"}, "which embeds texts"),
        (pipeline, pipeline.open_pipeline, {"stages": parse_stages("2")}, "which is in stages"),
    ],
    ids=["embeds", "staged"],
)
def test_a_graph_without_recorded_calls_refuses_the_option(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    opens: Callable[..., Any],
    options: dict[str, Any],
    what: str,
) -> None:
    artifact = export_tiny(source, tmp_path / "out", **options)
    active = ActiveProvider(CPU, PLAYED, {"enable_cuda_graph": "1"})
    monkeypatch.setattr(module, "activate", lambda _choice, _runtime: active)
    config = SessionConfig(threads=1, provider=ProviderChoice("cuda", ("enable_cuda_graph=1",)))
    with pytest.raises(UsageError, match=f"enable_cuda_graph=1 has no effect on .*, {what}"):
        opens(artifact, config, lambda _report: None)


class Runtime:
    """onnxruntime, which refuses to record: with the words that its CUDA provider has for that.

    elsewhere: nodes that are on another provider. broken: it does not load the graph at all.
    """

    def __init__(self, elsewhere: tuple[Any, ...] = (), *, broken: bool = False) -> None:
        self.elsewhere = elsewhere
        self.broken = broken

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime, name)

    def InferenceSession(self, *arguments: Any, **named: Any) -> Any:  # noqa: N802 - onnxruntime's name
        ((_, options),) = named["providers"]
        if self.broken:
            raise RuntimeError("No graph was found in the protobuf")
        if options.get("enable_cuda_graph") == "1":
            raise RuntimeError("This session cannot use the graph capture feature as requested by the user")
        session = onnxruntime.InferenceSession(*arguments, **named)
        parts = (*session.get_provider_graph_assignment_info(), *self.elsewhere)
        return SimpleNamespace(
            get_providers=session.get_providers,
            get_inputs=session.get_inputs,
            get_outputs=session.get_outputs,
            get_provider_graph_assignment_info=lambda: parts,
        )


@pytest.fixture(scope="module")
def artifact(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export_tiny(source, tmp_path_factory.mktemp("whole") / "out")


def nodes_elsewhere() -> Any:
    node = SimpleNamespace(name="gather", op_type="Gather")
    return SimpleNamespace(ep_name="OtherExecutionProvider", get_nodes=lambda: [node])


@pytest.mark.parametrize(
    ("runtime", "error", "told"),
    [
        (Runtime((nodes_elsewhere(),)), ProviderError, "OtherExecutionProvider has 1 Gather"),
        (Runtime(), ProviderError, r"graph capture .* are not with --provider-option enable_cuda_graph=0$"),
        (Runtime(broken=True), ArtifactError, "No graph was found"),
    ],
    ids=["elsewhere", "all", "broken"],
)
def test_a_graph_that_only_recording_keeps_from_loading_is_told_why(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, runtime: Runtime, error: type, told: str
) -> None:
    monkeypatch.setattr(opening, "import_runtime", lambda _version: runtime)
    monkeypatch.setattr(operator_check, "attention_rows", lambda *_: None)
    with pytest.raises(error, match=told):
        open_played(artifact, PlayedMemory())
