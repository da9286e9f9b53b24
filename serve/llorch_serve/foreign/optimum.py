"""A folder of Optimum's ONNX exporter, described from ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec

from llorch_serve.artifact.kinds import ModelKind
from llorch_serve.artifact.manifest import Count, GenerationDefaults
from llorch_serve.errors import ArtifactError
from llorch_serve.files.text import writable
from llorch_serve.foreign.detect import OLD_OPTIMUM_GRAPHS, OPTIMUM_GRAPH
from llorch_serve.foreign.files import ForeignFolder
from llorch_serve.foreign.model import ForeignArchitecture, ForeignManifest, ForeignModel, GraphNames
from llorch_serve.foreign.tokens import TokenIds, chat_templates, special_tokens

EXPORT_AGAIN: Final = (
    "export the model again with optimum-onnx: optimum-cli export onnx --model MODEL "
    "--task text-generation-with-past DIR"
)


class _Config(msgspec.Struct):
    """A decoder's ``config.json``; encoder-decoders and models of several parts lack some of it."""

    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    max_position_embeddings: Annotated[int, msgspec.Meta(ge=2, lt=2**31)]
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    is_encoder_decoder: bool = False


class _Generation(msgspec.Struct):
    do_sample: bool = True
    eos_token_id: TokenIds = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None


def describe_optimum(path: Path) -> ForeignModel:
    """Read and check a folder. Raises ArtifactError if it is damaged, unsafe, or of an older or another
    layout.
    """
    folder = ForeignFolder(path)
    graph = folder.file(OPTIMUM_GRAPH)
    if graph is None:
        old = [name for name in OLD_OPTIMUM_GRAPHS if folder.file(name) is not None]
        raise ArtifactError(
            f"{path} holds {', '.join(old) or 'no graph'}, an older Optimum's layout; expected one "
            f"{OPTIMUM_GRAPH}: " + EXPORT_AGAIN
        )
    config = folder.read_json("config.json", _Config)
    if config is None or config.is_encoder_decoder:
        found = "is missing" if config is None else "is an encoder-decoder's"
        raise ArtifactError(f"{path / 'config.json'} {found}; expected a decoder's: {EXPORT_AGAIN}")
    generation = folder.read_json("generation_config.json", _Generation) or _Generation()
    tokens = special_tokens(
        folder, config.bos_token_id, (config.eos_token_id, generation.eos_token_id), config.vocab_size
    )
    return ForeignModel(
        folder=path,
        kind=ModelKind.OPTIMUM,
        manifest=ForeignManifest(
            model_id=writable(path.resolve().name),
            fingerprint=folder.fingerprint(),
            model=ForeignArchitecture(
                vocab_size=config.vocab_size,
                layers=config.num_hidden_layers,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads or config.num_attention_heads,
                head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            ),
            context_length=config.max_position_embeddings,
            bos_token_id=tokens.bos_token_id,
            eos_token_id=tokens.eos_token_id,
            stop_token_ids=tokens.stop_token_ids,
            generation=_defaults(generation),
        ),
        graph_path=graph,
        tokenizer_path=folder.required("tokenizer.json", EXPORT_AGAIN),
        templates=chat_templates(folder),
        names=GraphNames(),
        shared_cache=False,
        total_bytes=folder.total_bytes(),
    )


def _defaults(generation: _Generation) -> GenerationDefaults:
    """Return the recommended sampling; ``do_sample: false`` makes it greedy, whatever else is written."""
    if not generation.do_sample:
        return GenerationDefaults(temperature=0.0, repetition_penalty=generation.repetition_penalty)
    return GenerationDefaults(
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        min_p=generation.min_p,
        typical_p=generation.typical_p,
        repetition_penalty=generation.repetition_penalty,
    )
