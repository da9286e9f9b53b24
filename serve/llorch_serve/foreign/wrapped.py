"""An artifact that holds Optimum's graph, described as Optimum's own folders are, so that the same session
runs it.
"""

from __future__ import annotations

from llorch_serve.artifact.folder import Artifact
from llorch_serve.foreign.model import (
    ForeignArchitecture,
    ForeignManifest,
    ForeignModel,
    ForeignRecipe,
    GraphNames,
)


def wrapped_model(artifact: Artifact) -> ForeignModel:
    """Return the description of an artifact whose layout is ``optimum``. Raises ArtifactError for a bad
    template.
    """
    manifest = artifact.manifest
    assert manifest.layout == "optimum"
    return ForeignModel(
        folder=artifact.folder,
        kind=artifact.kind,
        manifest=ForeignManifest(
            model_id=manifest.model_id,
            fingerprint=manifest.fingerprint,
            model=ForeignArchitecture(
                vocab_size=manifest.model.vocab_size,
                layers=manifest.kv.layers,
                heads=manifest.model.num_attention_heads,
                kv_heads=manifest.kv.kv_heads,
                head_dim=manifest.kv.head_dim,
            ),
            context_length=manifest.context_length,
            bos_token_id=manifest.bos_token_id,
            eos_token_id=manifest.eos_token_id,
            stop_token_ids=manifest.stop_token_ids,
            generation=manifest.generation,
            template_tokens=manifest.template_tokens,
            recipe=ForeignRecipe(manifest.recipe.precision, manifest.recipe.head_precision),
        ),
        graph_path=artifact.graph_path,
        tokenizer_path=artifact.tokenizer_path,
        templates=artifact.chat_templates(),
        names=GraphNames(),
        shared_cache=False,
        total_bytes=sum(entry.bytes for entry in manifest.files),
    )
