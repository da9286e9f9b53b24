"""Folders that can be served, whoever made them: llorch, onnxruntime-genai or Optimum.

:func:`load_model` reads a folder and :func:`open_model` loads its graph; what they return fits the protocols
of ``worker/served.py``. What opens folders of other kinds than most is imported when there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llorch_serve.artifact.folder import Artifact, is_artifact, load_artifact
from llorch_serve.artifact.kinds import ModelKind
from llorch_serve.config import SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.foreign.detect import foreign_kind
from llorch_serve.runtime import huge_pages
from llorch_serve.runtime.memory_plan import Beside
from llorch_serve.runtime.opening import LoadReport, open_session
from llorch_serve.runtime.session import DecoderSession
from llorch_serve.stages.checks import refuse_choice

if TYPE_CHECKING:
    from llorch_serve.foreign.model import ForeignModel
    from llorch_serve.runtime.fixed_session import FixedSession
    from llorch_serve.stages.hosts import HostOpener
    from llorch_serve.stages.pipeline import Pipeline
    from llorch_serve.worker.served import ServedSession


def load_model(folder: Path) -> Artifact | ForeignModel:
    """Read and check a folder; its own manifest comes before any other tool's files.

    Raises ArtifactError if it holds no model, or one that is damaged, unsafe or of a kind that cannot be run.
    """
    kind = None if is_artifact(folder) else foreign_kind(folder)
    if kind is None:
        return load_artifact(folder)
    if kind is ModelKind.GENAI:
        from llorch_serve.foreign.genai import describe_genai

        return describe_genai(folder)
    from llorch_serve.foreign.optimum import describe_optimum

    return describe_optimum(folder)


def open_model(
    model: Artifact | ForeignModel,
    config: SessionConfig,
    report: Callable[[LoadReport], None],
    *,
    prompts_first: bool = False,
    beside: Beside | None = None,
) -> ServedSession:
    """Load a model's graph and make its cache. See :func:`llorch_serve.runtime.opening.open_session` for
    ``prompts_first`` and the errors. beside: a draft, which goes with one graph of llorch's own; None:
    nothing.

    Raises UsageError too where ``config.huge_pages`` is asked for and has no effect.
    """
    if config.huge_pages:
        huge_pages.require()
        if config.share_weights:
            raise UsageError(
                "--huge-pages has no effect on weights that --share-weights maps from a file; leave one of "
                "them out"
            )
    # What is loaded later would stay in small pages.
    prompts_first = prompts_first and config.huge_pages is False
    session = _open(model, config, report, prompts_first=prompts_first, beside=beside)
    _gather(session, config)
    return session


def _gather(session: ServedSession, config: SessionConfig, *, here: bool = True) -> None:
    """Move weights into huge pages, where that is asked for and possible. here: they are in this process, and
    not in others that have done it.
    """
    if config.huge_pages is not False:
        if session.placement.device == "cpu":
            if here:
                huge_pages.gather()
        elif config.huge_pages:
            raise UsageError(
                f"--huge-pages has no effect on weights that lie on {session.placement.device}; leave it out"
            )


def _open(
    model: Artifact | ForeignModel,
    config: SessionConfig,
    report: Callable[[LoadReport], None],
    *,
    prompts_first: bool,
    beside: Beside | None,
) -> ServedSession:
    if isinstance(model, Artifact):
        if model.kind is ModelKind.LLORCH:
            if config.share_weights and (model.manifest.fixed_shapes is not None or model.manifest.stages):
                raise _not_shared(model.folder)
            return open_artifact(model, config, report, prompts_first=prompts_first, beside=beside)
        from llorch_serve.foreign.wrapped import wrapped_model

        model = wrapped_model(model)
    refuse_choice(config.stages, model.folder)
    if config.share_weights:
        raise _not_shared(model.folder)
    from llorch_serve.foreign.opening import open_foreign

    return open_foreign(model, config, report)


def _not_shared(folder: Path) -> UsageError:
    return UsageError(
        f"--share-weights has no effect on {folder}: expected an artifact of llorch's own for the CPU that "
        "generates text and has one stage; leave it out"
    )


def open_lanes(
    model: Artifact | ForeignModel,
    config: SessionConfig,
    report: Callable[[LoadReport], None],
    elsewhere: HostOpener | None = None,
) -> Pipeline | None:
    """Load the stages of a model that is cut into stages; None for one that is not. See :func:`open_model`
    for the errors. elsewhere: as of :func:`llorch_serve.stages.pipeline.open_pipeline`.
    """
    if not isinstance(model, Artifact) or not model.manifest.stages:
        return None
    if config.share_weights:
        raise _not_shared(model.folder)
    if config.huge_pages:
        huge_pages.require()
    from llorch_serve.stages.pipeline import open_pipeline

    pipeline = open_pipeline(model, config, report, elsewhere)
    try:
        _gather(pipeline.sessions[0], config, here=elsewhere is None and not config.stages.processes)
    except BaseException:
        pipeline.close()
        raise
    return pipeline


def open_artifact(
    artifact: Artifact,
    config: SessionConfig,
    report: Callable[[LoadReport], None],
    *,
    prompts_first: bool = False,
    beside: Beside | None = None,
) -> DecoderSession | FixedSession:
    """Load the graphs of an artifact with one of llorch's own; those of stages in this process, as one lane,
    since who runs a session by hand makes one call after the other. See
    :func:`llorch_serve.runtime.opening.open_session` for ``prompts_first`` and the errors.
    """
    if artifact.manifest.stages:
        from llorch_serve.stages.pipeline import open_pipeline

        stages = replace(config.stages, processes=False, lanes=1)
        return open_pipeline(artifact, replace(config, stages=stages), report).sessions[0]
    refuse_choice(config.stages, artifact.folder)
    if artifact.manifest.fixed_shapes is None:
        return open_session(artifact, config, report, prompts_first=prompts_first, beside=beside)
    from llorch_serve.runtime.fixed_session import open_fixed

    return open_fixed(artifact, config, report)
