"""An artifact folder that everything but the runtime accepts: a true manifest and tokenizer beside a graph of
noise.

Tests change a manifest field by field, or put the fake session in place of the graph.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from llorch_serve.artifact.folder import MANIFEST_NAME
from llorch_serve.artifact.manifest import (
    PLAIN_SCHEMA_VERSION,
    FileEntry,
    GenerationDefaults,
    KvLayout,
    Manifest,
    Recipe,
    SourceInfo,
    TensorSpec,
    encode_manifest,
)
from support.builders.checkpoints import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    TURN_END_ID,
    tiny_llama_config,
    tiny_tokenizer_json,
)

CONTENT = {
    "model.onnx": b"not a graph",
    "tokenizer.json": tiny_tokenizer_json().encode(),
    "chat_template.jinja": CHAT_TEMPLATE.encode(),
}


def tiny_manifest(**overrides: object) -> Manifest:
    """Return a manifest of :data:`CONTENT`; an override replaces a field."""
    config = tiny_llama_config()
    kv = KvLayout(
        layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads, head_dim=config.head_dim
    )
    cache = ("batch", kv.kv_heads, "capacity", kv.head_dim)
    layers = [(layer, kind) for layer in range(kv.layers) for kind in ("key", "value")]
    past = [kv.past_name.format(layer=layer, kind=kind) for layer, kind in layers]
    present = [kv.present_name.format(layer=layer, kind=kind) for layer, kind in layers]
    manifest = Manifest(
        schema_version=PLAIN_SCHEMA_VERSION,
        model_id="tiny",
        fingerprint="0" * 64,
        model=config,
        recipe=Recipe(
            precision="fp32", head_precision="fp32", block_size=None, accuracy_level=None, kl_limit=1e-6
        ),
        graph="model.onnx",
        tokenizer="tokenizer.json",
        chat_template="chat_template.jinja",
        inputs=(
            TensorSpec(name="input_ids", dtype="int64", shape=("batch", "tokens")),
            *(TensorSpec(name=name, dtype="float32", shape=cache) for name in past),
        ),
        outputs=(
            TensorSpec(name="logits", dtype="float32", shape=("rows", config.vocab_size)),
            *(TensorSpec(name=name, dtype="float32", shape=cache) for name in present),
        ),
        kv=kv,
        context_length=config.max_position_embeddings,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        stop_token_ids=(EOS_ID, TURN_END_ID),
        generation=GenerationDefaults(),
        source=SourceInfo(kind="safetensors", name="tiny", fingerprint="0" * 64),
        files=tuple(
            FileEntry(path=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in CONTENT.items()
        ),
        versions={"llorch": "0"},
        min_onnxruntime="1.24",
    )
    return msgspec.structs.replace(manifest, **overrides)


def write_tiny_artifact(folder: Path, manifest: Manifest | None = None) -> Path:
    """Write :data:`CONTENT` and a manifest; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in CONTENT.items():
        (folder / name).write_bytes(data)
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest or tiny_manifest()))
    return folder
