"""A folder of onnxruntime-genai's model builder, described from its ``genai_config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from llorch_serve.artifact.kinds import ModelKind
from llorch_serve.artifact.manifest import Count, GenerationDefaults
from llorch_serve.errors import ArtifactError
from llorch_serve.files.text import writable
from llorch_serve.foreign.detect import GENAI_CONFIG
from llorch_serve.foreign.files import ForeignFolder
from llorch_serve.foreign.model import ForeignArchitecture, ForeignManifest, ForeignModel, GraphNames
from llorch_serve.foreign.tokens import TokenIds, chat_templates, special_tokens

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_LayerName = Annotated[str, msgspec.Meta(pattern=r"^[^%]*%d[^%]*$", max_length=200)]


class _Inputs(msgspec.Struct):
    input_ids: _Name = "input_ids"
    attention_mask: _Name = "attention_mask"
    position_ids: _Name = "position_ids"
    past_key_names: _LayerName = "past_key_values.%d.key"
    past_value_names: _LayerName = "past_key_values.%d.value"


class _Outputs(msgspec.Struct):
    logits: _Name = "logits"
    present_key_names: _LayerName = "present.%d.key"
    present_value_names: _LayerName = "present.%d.value"


class _SessionOptions(msgspec.Struct):
    custom_ops_library: str | None = None


class _Decoder(msgspec.Struct):
    filename: _Name
    head_size: Count
    num_attention_heads: Count
    num_hidden_layers: Count
    num_key_value_heads: Count
    inputs: _Inputs = msgspec.field(default_factory=_Inputs)
    outputs: _Outputs = msgspec.field(default_factory=_Outputs)
    session_options: _SessionOptions = msgspec.field(default_factory=_SessionOptions)
    sliding_window: object = None
    pipeline: object = None


class _Model(msgspec.Struct):
    decoder: _Decoder
    vocab_size: Count
    context_length: Annotated[int, msgspec.Meta(ge=2, lt=2**31)]
    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    encoder: object = None
    vision: object = None
    speech: object = None
    embedding: object = None


class _Search(msgspec.Struct):
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    past_present_share_buffer: bool = True


class _Config(msgspec.Struct):
    model: _Model
    search: _Search = msgspec.field(default_factory=_Search)


def describe_genai(path: Path) -> ForeignModel:
    """Read and check a folder. Raises ArtifactError if it is damaged, unsafe, or more than a decoder of
    text.
    """
    folder = ForeignFolder(path)
    config = folder.read_json(GENAI_CONFIG, _Config)
    if config is None:
        raise ArtifactError(f"{path} holds no {GENAI_CONFIG}; build it again with onnxruntime-genai")
    model, decoder = config.model, config.model.decoder
    _refuse_extras(path, model)
    again = "build the folder again with onnxruntime-genai's builder"
    names = GraphNames(
        input_ids=decoder.inputs.input_ids,
        attention_mask=decoder.inputs.attention_mask,
        position_ids=decoder.inputs.position_ids,
        logits=decoder.outputs.logits,
        past_key=decoder.inputs.past_key_names,
        past_value=decoder.inputs.past_value_names,
        present_key=decoder.outputs.present_key_names,
        present_value=decoder.outputs.present_value_names,
    )
    tokens = special_tokens(folder, model.bos_token_id, (model.eos_token_id,), model.vocab_size)
    return ForeignModel(
        folder=path,
        kind=ModelKind.GENAI,
        manifest=ForeignManifest(
            model_id=writable(path.resolve().name),
            fingerprint=folder.fingerprint(),
            model=ForeignArchitecture(
                vocab_size=model.vocab_size,
                layers=decoder.num_hidden_layers,
                heads=decoder.num_attention_heads,
                kv_heads=decoder.num_key_value_heads,
                head_dim=decoder.head_size,
            ),
            context_length=model.context_length,
            bos_token_id=tokens.bos_token_id,
            eos_token_id=tokens.eos_token_id,
            stop_token_ids=tokens.stop_token_ids,
            generation=_defaults(config.search),
        ),
        graph_path=folder.required(decoder.filename, again),
        tokenizer_path=folder.required("tokenizer.json", again),
        templates=chat_templates(folder),
        names=names,
        shared_cache=config.search.past_present_share_buffer,
        total_bytes=folder.total_bytes(),
    )


def _refuse_extras(path: Path, model: _Model) -> None:
    """Refuse what only onnxruntime-genai itself can run, by name."""
    parts = [name for name in ("encoder", "vision", "speech", "embedding") if getattr(model, name)]
    parts += [f"decoder.{name}" for name in ("pipeline", "sliding_window") if getattr(model.decoder, name)]
    if parts:
        raise ArtifactError(
            f"{path / GENAI_CONFIG} has {', '.join(parts)}; expected a plain decoder of text. Export its "
            f"checkpoint "
            "with llorch export instead"
        )
    library = model.decoder.session_options.custom_ops_library
    if library is not None:
        raise ArtifactError(
            f"{path / GENAI_CONFIG} asks for the custom operators {library[:100]!r}; code from a model's "
            f"folder is "
            "never loaded. Build the folder for the cpu provider"
        )


def _defaults(search: _Search) -> GenerationDefaults:
    """Return the recommended sampling; without ``do_sample`` it is greedy, whatever else is written."""
    if not search.do_sample:
        return GenerationDefaults(temperature=0.0, repetition_penalty=search.repetition_penalty)
    return GenerationDefaults(
        temperature=search.temperature,
        top_k=search.top_k,
        top_p=search.top_p,
        repetition_penalty=search.repetition_penalty,
    )
