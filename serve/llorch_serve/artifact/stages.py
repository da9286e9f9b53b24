"""One stage of an artifact, seen as an artifact of its own.

Input is an artifact that is cut into stages; output is, for each, what a session needs to know of it: its
graphs, its inputs and outputs, the KV cache of its layers, and the files that it reads.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from llorch_serve.artifact.folder import Artifact, load_artifact
from llorch_serve.artifact.manifest import (
    PLAIN_SCHEMA_VERSION,
    FileEntry,
    Int8Cache,
    Manifest,
    PromptGraph,
    Stage,
)
from llorch_serve.errors import ArtifactError


def load_stage(folder: Path, number: int) -> Artifact:
    """Read an artifact of which one stage is to run here: the files of the others need not be there.

    Raises as :func:`llorch_serve.artifact.folder.load_artifact` does, and ArtifactError where there is no
    such stage.
    """

    def needed(manifest: Manifest) -> tuple[FileEntry, ...]:
        stages = manifest.stages or ()
        if number >= len(stages):
            raise ArtifactError(
                f"{folder} holds {len(stages) or 'no'} stages, and stage {number} was asked for; bring the "
                "artifact here that the others have"
            )
        return stage_files(manifest, stages[number])

    return load_artifact(folder, needed=needed)


def stage_artifacts(artifact: Artifact) -> tuple[Artifact, ...]:
    """Return the stages in the order in which they run; the artifact itself where it is not cut."""
    stages = artifact.manifest.stages or ()
    views = (Artifact(artifact.folder, stage_manifest(artifact.manifest, stage)) for stage in stages)
    return tuple(views) or (artifact,)


def stage_manifest(manifest: Manifest, stage: Stage) -> Manifest:
    """Return a manifest like that of an artifact of one graph, of a stage: ``model`` and all that is said of
    text stay the whole model's; graphs, tensors, cache and files are the stage's.
    """
    return msgspec.structs.replace(
        manifest,
        schema_version=PLAIN_SCHEMA_VERSION,
        stages=msgspec.UNSET,
        graph=stage.graph,
        inputs=stage.inputs,
        outputs=stage.outputs,
        kv=msgspec.structs.replace(manifest.kv, layers=stage.layers),
        int8_cache=_int8_cache(manifest, stage),
        prompts=_prompts(manifest, stage),
        files=stage_files(manifest, stage),
        widened_bytes=stage.widened_bytes,
    )


def stage_files(manifest: Manifest, stage: Stage) -> tuple[FileEntry, ...]:
    """Return the files that a device needs which runs one stage: its graphs and weights, and what belongs to
    no stage, as the tokenizer.
    """
    staged = {name for each in manifest.stages or () for name in each.files}
    return tuple(e for e in manifest.files if e.path not in staged or e.path in stage.files)


def _int8_cache(manifest: Manifest, stage: Stage) -> Int8Cache | None:
    if manifest.int8_cache is None:
        return None
    assert stage.decode_graph is not msgspec.UNSET, "checked when the manifest was read"
    assert stage.scales is not msgspec.UNSET, "likewise"
    return msgspec.structs.replace(manifest.int8_cache, decode_graph=stage.decode_graph, scales=stage.scales)


def _prompts(manifest: Manifest, stage: Stage) -> PromptGraph | None:
    if manifest.prompts is None:
        return None
    assert stage.prompts_graph is not msgspec.UNSET, "checked when the manifest was read"
    assert stage.prompts_data is not msgspec.UNSET, "likewise"
    return msgspec.structs.replace(manifest.prompts, graph=stage.prompts_graph, data=stage.prompts_data)
