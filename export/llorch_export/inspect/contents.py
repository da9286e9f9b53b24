"""What is in an artifact: ``llorch inspect``.

Reads the manifest and the tokenizer, which a worker needs too, and the graph's structure, for which the onnx
package is needed; without it that part is None. Weights are never read.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from llorch_export.formats.targets import TARGETS
from llorch_export.inspect.stages import StageContents, stage_contents
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import (
    EmbeddingForm,
    FileEntry,
    FixedShapes,
    GenerationDefaults,
    Int8Cache,
    KvDtype,
    LlamaConfig,
    PromptGraph,
    Recipe,
    SourceForm,
    SourceInfo,
    Target,
)
from llorch_serve.artifact.stages import stage_artifacts
from llorch_serve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import onnx

    from llorch_export.inspect.modules import StoredModule

SLOTS: Final = (1, 8, 32)
_SHORT_CONTEXT: Final = 2048
_BLOCK_INPUTS: Final = {2: "scales", 3: "zero points"}
_QUANTISED_INPUTS: Final = {
    "MatMulNBits": _BLOCK_INPUTS,
    "GatherBlockQuantized": _BLOCK_INPUTS,
    "MatMulIntegerToFloat": {2: "constants", 3: "scales", 4: "constants"},
    "MoE": {2: "experts", 4: "experts"},
    "QMoE": {
        2: "experts",
        3: "scales",
        5: "experts",
        6: "scales",
        11: "zero points",
        12: "zero points",
    },
}
_DEQUANTIZED: Final = (None, "scales", "zero points")
_TABLES: Final = ("embedding", "lm_head.weight")
_HEADS: Final = ("logits", "logits/narrow", "logits/uncapped")
_PRODUCTS: Final = ("MatMul", "Gemm", "MatMulNBits", "MatMulIntegerToFloat")


@dataclass(frozen=True, slots=True)
class StopToken:
    """A token that ends generation, and how it is spelled; None if the tokenizer does not know it."""

    id: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of weights and of a full KV cache at so many slots of so many tokens."""

    slots: int
    context: int
    kv_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class GraphContents:
    """Nodes by operator type, most frequent first, and bytes of weights by what they are for.

    modules: how each matrix is stored.
    """

    ops: dict[str, int]
    weight_bytes: dict[str, int]
    opset: dict[str, int]
    modules: tuple[StoredModule, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """What ``llorch inspect --json`` prints.

    graph: None where the onnx package is not installed. memory: full cache; it is committed only as it is
        used.
    kv_dtypes: what the KV cache may hold, the default first, which the bytes are of; nothing, with no memory,
        where texts are embedded, without a cache.
    embedding: how texts become vectors; None: they do not.
    stages: what each device needs that runs one; none: there is one graph.
    layout, interop, int8_cache, prompts, ignored_settings, code_not_run, source_forms: as in
        :class:`llorch_serve.artifact.manifest.Manifest`.
    checked_on: providers on which graphs of this target have been compared with the reference;
        not_checked_on: its own provider, if it is not among them.
    """

    model_id: str
    fingerprint: str
    model: LlamaConfig
    recipe: Recipe
    context_length: int
    source: SourceInfo
    versions: dict[str, str]
    min_onnxruntime: str
    files: tuple[FileEntry, ...]
    total_bytes: int
    kv_bytes_per_token: int
    memory: tuple[Memory, ...]
    bos_token_id: int | None
    eos_token_id: int | None
    stop_tokens: tuple[StopToken, ...]
    generation: GenerationDefaults
    chat_template: bool
    graph: GraphContents | None
    layout: str
    embedding: EmbeddingForm | None
    interop: tuple[str, ...]
    target: Target
    checked_on: tuple[str, ...]
    not_checked_on: str | None
    fixed_shapes: FixedShapes | None
    kv_dtypes: tuple[KvDtype, ...]
    int8_cache: Int8Cache | None
    prompts: PromptGraph | None
    ignored_settings: tuple[str, ...]
    code_not_run: tuple[str, ...]
    source_forms: tuple[SourceForm, ...]
    stages: tuple[StageContents, ...]


def contents(artifact: Artifact) -> Contents:
    """Describe an artifact. Raises ArtifactError if its tokenizer or graph cannot be read."""
    manifest = artifact.manifest
    tokenizer = Tokenizer.load(artifact.tokenizer_path)
    own = TARGETS[manifest.target].provider
    total = sum(entry.bytes for entry in manifest.files)
    loaded = total + (manifest.widened_bytes or 0)
    lengths = sorted({min(_SHORT_CONTEXT, manifest.context_length), manifest.context_length})
    embeds = manifest.embeds is not None
    kv_bytes = (
        0 if embeds else msgspec.structs.replace(manifest.kv, dtype=manifest.kv_dtypes[0]).bytes_per_token
    )
    memory = [
        Memory(slots, length, kv := slots * length * kv_bytes, loaded + kv)
        for slots in SLOTS
        for length in lengths
        if not embeds
    ]
    return Contents(
        model_id=manifest.model_id,
        fingerprint=manifest.fingerprint,
        model=manifest.model,
        recipe=manifest.recipe,
        context_length=manifest.context_length,
        source=manifest.source,
        versions=manifest.versions,
        min_onnxruntime=manifest.min_onnxruntime,
        files=manifest.files,
        total_bytes=total,
        kv_bytes_per_token=kv_bytes,
        memory=tuple(memory),
        bos_token_id=manifest.bos_token_id,
        eos_token_id=manifest.eos_token_id,
        stop_tokens=tuple(StopToken(id_, tokenizer.token_text(id_)) for id_ in manifest.stop_token_ids),
        generation=manifest.generation,
        chat_template=manifest.chat_template is not None,
        graph=_graph(artifact) if importlib.util.find_spec("onnx") else None,
        layout=manifest.layout,
        embedding=manifest.embeds,
        interop=manifest.interop,
        target=manifest.target,
        checked_on=manifest.checked_on,
        not_checked_on=None if own in (None, *manifest.checked_on) else own,
        fixed_shapes=manifest.fixed_shapes,
        kv_dtypes=() if embeds else manifest.kv_dtypes,
        int8_cache=manifest.int8_cache,
        prompts=manifest.prompts,
        ignored_settings=manifest.ignored_settings or (),
        code_not_run=manifest.code_not_run or (),
        source_forms=manifest.source_forms or (),
        stages=stage_contents(artifact),
    )


def _graph(artifact: Artifact) -> GraphContents:
    """Describe the graph, or those of all stages together."""
    from llorch_export.inspect.modules import stored_modules
    from llorch_export.verify.layers.graph import read_graph

    models = [read_graph(stage) for stage in stage_artifacts(artifact)]
    ops = Counter(node.op_type for model in models for node in model.graph.node)
    weights: dict[tuple[str, str], tuple[str, int]] = {}
    for number, model in enumerate(models):
        weights |= _weights(model, number)
    sizes: Counter[str] = Counter()
    for purpose, size in weights.values():
        sizes[purpose] += size
    return GraphContents(
        ops=dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        weight_bytes=dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))),
        opset={entry.domain or "ai.onnx": entry.version for entry in models[0].opset_import},
        modules=tuple(module for model in models for module in stored_modules(model)),
    )


def _weights(model: onnx.ModelProto, number: int) -> dict[tuple[str, str], tuple[str, int]]:
    """Return what each region of the data files is for, and its bytes; by file and offset, so that those that
    initialisers or stages share are there once.

    number: of the graph among several, which tells weights inside it from those of others.
    """
    from llorch_export.inspect.widening import Widening

    widening = Widening(model)
    purposes: dict[str, str] = {}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if node.op_type != "Cast" and not widening.makes(node.output[0]):
                purposes.setdefault(name, _purpose(node, index))
    for node in reversed(model.graph.node):
        if node.op_type == "Cast" or widening.makes(node.output[0]):  # stored narrower than it is used
            for name in node.input:
                purposes.setdefault(name, purposes.get(node.output[0], "constants"))
    found: dict[tuple[str, str], tuple[str, int]] = {}
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        region = (place.get("location", str(number)), place.get("offset", tensor.name))
        size = int(place["length"]) if place else tensor.ByteSize()
        found.setdefault(region, ("constants", size))
        if tensor.name in purposes and found[region][0] == "constants":
            found[region] = purposes[tensor.name], size
    return found


def _purpose(node: onnx.NodeProto, index: int) -> str:
    """Say what a node's input is for, should it be a weight."""
    kind, name = node.op_type, node.input[index]
    if name.startswith("rotary."):
        return "rotary tables"
    if name.endswith("norm.weight"):
        return "norms"
    if name.endswith((".input_order", ".input_scales")):
        return "constants"
    if index in (special := _QUANTISED_INPUTS.get(kind, {})):
        return special[index]
    if kind == "DequantizeLinear":
        table = node.output[0] in _TABLES
        return _DEQUANTIZED[index] or ("embedding and head" if table else "linear")
    if kind == "Gather" and name.endswith(".scales"):
        return "scales"
    # Of a layer that is the sum of parts, or has a bias.
    product = node.output[0].partition("/part.")[0].removesuffix("/product")
    if kind in ("Gather", "GatherBlockQuantized") or (kind in _PRODUCTS and product in _HEADS):
        return "embedding and head"
    return "linear" if kind in _PRODUCTS else "constants"
