"""The manifest, ``llorch.json``: what the exporter tells the worker about an artifact, as strict types.

Unknown fields, wrong types, values out of range and newer schema versions are refused. The JSON Schema in
``artifacts/manifest.schema.json`` is generated from these types.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NoReturn

import msgspec

from llorch_serve.errors import ArtifactError, NewerSchemaError
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.files.text import encode_json

SCHEMA_VERSION: Final = 2
"""The latest that this llorch reads."""

PLAIN_SCHEMA_VERSION: Final = 1
"""Of every artifact that has no field of a later one, so that an older llorch runs it."""

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4", "source"]
ComputeType = Literal["float32", "float16", "bfloat16"]
KvDtype = Literal["float32", "float16", "bfloat16", "int8"]
ScaleType = Literal["float32", "bfloat16", "float16"]
Quantizer = Literal["nearest", "search", "affine", "gptq", "hqq"]
Activations = Literal["block", "row", "quarters", "static"]
TransformName = Literal["rotate", "hadamard", "equalise", "smooth"]
Interop = Literal["genai"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "xielu"]
Pooling = Literal["last", "mean"]
Target = Literal["cpu", "cuda", "directml", "coreml", "openvino", "webgpu", "portable"]
KV_BYTES: Final[dict[KvDtype, int]] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
RuntimeVersion = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}$")]
ModelType = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]{1,40}$")]
Names = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=1000)], ...], msgspec.Meta(max_length=1000)]
ShortText = Annotated[str, msgspec.Meta(max_length=1000)]
ModuleNames = Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=100_000)]
# No other name of a template's variables can be taken by a token.
TemplateTokens = Annotated[
    dict[
        Annotated[str, msgspec.Meta(pattern=r"^\w*_token$", max_length=200)],
        Annotated[str, msgspec.Meta(max_length=4096)],
    ],
    msgspec.Meta(max_length=256),
]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
# Formatted with layer and kind, so nothing else may stand in braces.
CacheName = Annotated[str, msgspec.Meta(pattern=r"^[\w.]*\{layer\}[\w.]*\{kind\}[\w.]*$", max_length=200)]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the manifest's parts: immutable, and strict about unknown fields."""


class QueryScale(_Struct, frozen=True, kw_only=True):
    """Queries are multiplied by ``1 + beta log(1 + floor(position / positions))`` (Llama 4)."""

    beta: float
    positions: Count


class RopeConfig(_Struct, frozen=True, kw_only=True):
    """Rotary position embedding.

    theta: base of the frequencies.
    kind: ``default``; ``linear`` (all frequencies divided by ``factor``); ``llama3`` (Llama 3.1's scaling by
        wavelength); ``yarn`` (slow frequencies divided by ``factor``, fast ones kept, a ramp between them);
        ``dynamic`` (plain up to ``original_max_position_embeddings``); ``longrope`` (frequency i divided by
        ``short_factor[i]`` while a sequence is no longer than ``original_max_position_embeddings``, by
        ``long_factor[i]`` once it is); ``factors`` (GGUF ``rope_freqs.weight``: divided by
        ``frequency_factors[i]``).
    attention_factor: multiplies cosine and sine (yarn, longrope).
    beta_fast, beta_slow, truncate: turns over the original context between which yarn's ramp lies, and
        whether its ends are rounded to whole pairs.
    rotary_dim: how many leading elements of a head are rotated; absent: all.
    query_scale: by what queries are multiplied at their position; absent: nothing.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope", "factors"] = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    frequency_factors: tuple[float, ...] | None = None
    attention_factor: float = 1.0
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    rotary_dim: int | None = None
    query_scale: QueryScale | msgspec.UnsetType = msgspec.UNSET

    @property
    def exact_positions(self) -> int | None:
        """Longest sequence for which one fixed table is right; None if there is no such limit."""
        changes = self.kind == "dynamic" or (
            self.kind == "longrope" and self.short_factor != self.long_factor
        )
        return self.original_max_position_embeddings if changes else None


class ClampedGate(_Struct, frozen=True, kw_only=True):
    """SwiGLU whose factors have limits: ``g sigmoid(alpha g) (u + 1)`` of a gate ``g`` of ``limit`` at most
    and a second projection ``u`` that is at most as far from 0.
    """

    alpha: float
    limit: float


class ExpertsConfig(_Struct, frozen=True, kw_only=True):
    """Feed-forward blocks of which each token takes a few: those that a router gives the largest logits.

    count: blocks in a layer. per_token: how many a token takes. intermediate_size: of one of them.
    normalised: the shares of those that a token takes add up to one; else they are what softmax over all of
        them gives.
    shared_intermediate_size: of a block that every token takes too, scaled by a sigmoid; None: there is none.
    sparse_layers: one number a layer, 0 where it has one plain block; empty: all layers have experts.
    biases: the router and all matrices have one. clamped: the activation of experts, where it is not SwiGLU.
    """

    count: Count
    per_token: Count
    intermediate_size: Count
    normalised: bool = True
    shared_intermediate_size: Count | None = None
    sparse_layers: tuple[int, ...] = ()
    biases: bool | msgspec.UnsetType = msgspec.UNSET
    clamped: ClampedGate | msgspec.UnsetType = msgspec.UNSET


class LayerForm(_Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a decoder layer is built where it is not Llama's. What is not said is as in Llama.

    norm: root mean square, or mean and variance (``layer``). norm_bias: whether its norms have biases.
    norm_placement: ``before`` attention and MLP, ``after`` them (on what they add to the residual), or
        ``around``: both.
    parallel: attention and MLP read one norm of the layer's input, and the residual gets both at once.
    activation: of the MLP; ``xielu`` has factors of its own in each layer. gated: it is multiplied with a
        second projection.
    qk_norm_over: each query and key head, or ``row``: all heads of a token together.
    qk_norm_after_rope: queries and keys are normalised after rotation, not before it.
    attention_softcap, logits_softcap: ``cap * tanh(x / cap)`` of scores and logits; None: none.
    sliding_rope: rotation of the layers that have a window; None: as the others'.
    head_bias: the output layer has a bias.
    sinks: each head has one more score, learned and the same for all tokens, which takes its share in the
        softmax and stands for no value.
    """

    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_placement: Literal["before", "after", "around"] = "before"
    parallel: bool = False
    activation: Activation = "silu"
    gated: bool = True
    qk_norm_over: Literal["head", "row"] = "head"
    qk_norm_after_rope: bool = False
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    sliding_rope: RopeConfig | None = None
    head_bias: bool = False
    sinks: bool = False


_LLAMA_FORM: Final = LayerForm()


class LlamaConfig(_Struct, frozen=True, kw_only=True):
    """The architecture of a Llama-family decoder, in the terms of Hugging Face's ``config.json``.

    ``head_dim`` is independent of ``hidden_size / num_attention_heads``.

    architecture: the family, as ``model_type`` names it; the graph says all that a session needs of it.
    attention_bias: biases on q, k, v and o. qkv_bias: on q, k and v only.
    qk_norm: an RMS norm over each query and key head before rotation.
    no_rope_layers: one number a layer, 0 where the layer does not rotate; empty: all layers rotate.
    sliding_window: positions that a layer attends to, its own included; None: all.
    layer_types: which layers have that window; empty: all have it.
    embedding_multiplier, residual_multiplier: scale the embedding, and what each block adds to the residual.
    attention_multiplier: scales attention scores; None: 1 / sqrt(head_dim).
    logits_scaling: divides the logits.
    experts: of the layers whose feed-forward block is several; absent: there are none.
    layer_form: how layers are built where they are not Llama's; read it as :attr:`form`.
    """

    architecture: ModelType = "llama"
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    rms_norm_eps: float
    max_position_embeddings: Count
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    no_rope_layers: tuple[int, ...] = ()
    sliding_window: Count | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    experts: ExpertsConfig | msgspec.UnsetType = msgspec.UNSET

    @property
    def active_intermediate_size(self) -> int:
        """Return how wide the widest feed-forward block is for one token, all that it takes together."""
        if self.experts is msgspec.UNSET:
            return self.intermediate_size
        taken = self.experts.per_token * self.experts.intermediate_size
        sparse = taken + (self.experts.shared_intermediate_size or 0)
        return max(sparse, self.intermediate_size) if 0 in self.experts.sparse_layers else sparse

    def layer_experts(self, layer: int) -> ExpertsConfig | None:
        """Return what a layer has in place of one feed-forward block; None if it has just that."""
        if self.experts is msgspec.UNSET:
            return None
        dense = self.experts.sparse_layers and self.experts.sparse_layers[layer] == 0
        return None if dense else self.experts

    layer_form: LayerForm | msgspec.UnsetType = msgspec.UNSET

    @property
    def form(self) -> LayerForm:
        """How layers are built."""
        return _LLAMA_FORM if self.layer_form is msgspec.UNSET else self.layer_form

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotations that layers have: that of all or of those without a window, then of the others."""
        sliding = self.form.sliding_rope
        return (self.rope,) if sliding is None else (self.rope, sliding)

    def rope_index(self, layer: int) -> int:
        """Return which of :attr:`ropes` a layer has."""
        return int(self.form.sliding_rope is not None and self.window(layer) is not None)

    @property
    def rotary_dim(self) -> int:
        """How many leading elements of a head are rotated."""
        return self.head_dim if self.rope.rotary_dim is None else self.rope.rotary_dim

    @property
    def max_exact_context(self) -> int:
        """Longest sequence that a graph with one rotary table computes as the model was trained."""
        limits = (rope.exact_positions for rope in self.ropes)
        return min([self.max_position_embeddings, *(limit for limit in limits if limit is not None)])

    def rotates(self, layer: int) -> bool:
        """Tell whether a layer has rotary embedding."""
        return not self.no_rope_layers or self.no_rope_layers[layer] != 0

    def window(self, layer: int) -> int | None:
        """Return how many positions a layer attends to, or None for all."""
        full = self.layer_types and self.layer_types[layer] == "full_attention"
        return None if full else self.sliding_window


class TensorSpec(_Struct, frozen=True, kw_only=True):
    """A graph input or output. A string in ``shape`` is a symbolic dimension."""

    name: str
    dtype: Literal["float32", "int32", "int64", "float16", "bfloat16", "int8"]
    shape: tuple[int | str, ...]


class KvLayout(_Struct, frozen=True, kw_only=True):
    """The KV cache's tensors: one key and one value buffer a layer, shape ``axes``.

    ``past_name`` and ``present_name`` hold ``{layer}`` and ``{kind}`` (``key`` or ``value``). Past and
    present may be bound to one buffer of ``position`` capacity; the graph then appends in place.
    """

    layers: Count
    kv_heads: Count
    head_dim: Count
    dtype: KvDtype = "float32"
    axes: tuple[str, str, str, str] = ("slot", "kv_head", "position", "head_dim")
    past_name: CacheName = "past_key_values.{layer}.{kind}"
    present_name: CacheName = "present.{layer}.{kind}"

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token occupies over all layers, keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * KV_BYTES[self.dtype]


def cache_names(kv: KvLayout) -> frozenset[str]:
    """Return the names of all the cache's tensors, past and present."""
    return frozenset(
        pattern.format(layer=layer, kind=kind)
        for pattern in (kv.past_name, kv.present_name)
        for layer in range(kv.layers)
        for kind in ("key", "value")
    )


class CalibrationText(_Struct, frozen=True, kw_only=True):
    """The text that figures were measured on: SHA-256 of its bytes, and how many of its tokens were run."""

    sha256: Sha256
    tokens: Count


class ModuleRule(_Struct, frozen=True, kw_only=True):
    """Matrices that are stored otherwise than the recipe's defaults have it.

    modules: by the checkpoint's names, as ``model.layers.0.mlp.down_proj``; no module is in two rules. A tied
        table goes by ``model.embed_tokens``.
    block_size, quantizer, scale_type, activations: as in :class:`Recipe`.
    """

    modules: tuple[str, ...]
    precision: Precision
    block_size: int | None = None
    quantizer: Quantizer | None = None
    scale_type: ScaleType = "float32"
    activations: Activations | None = None


class Recipe(_Struct, frozen=True, kw_only=True):
    """How the weights were brought into the graph.

    precision: of the linear layers; ``source`` carries over the blocks of a GGUF file, or the codes of packed
        weights, each tensor as the file has it.
    block_size: elements along the input dimension that share one scale (``int8`` and ``int4`` only).
    head_precision: precision of the output head, and of the embedding where the two are tied.
    accuracy_level: MatMulNBits' ``accuracy_level``; 4 multiplies in int8, 0 leaves the choice to the runtime.
    two_bit_accuracy_level: the same for packed codes of 2 bits that the runtime widens to 4 when it opens the
        graph; absent: there are none, or theirs is ``accuracy_level``.
    fine_block_size: the same for the query, key, value and down projections; None: ``block_size``.
    quantizer: how 4-bit blocks got their scales: ``nearest`` (from the largest magnitude), ``search`` (least
        squared error of the weights), ``affine`` (the same, with a zero point for each block), ``gptq``
        (affine, and columns make up for each other's errors on a calibration text), ``hqq`` (scales of the
        range, zero points by half-quadratic splitting). 8-bit blocks have no zero points: they are
        ``nearest``, or ``gptq`` where that is said and the recipe's layers and head have 8 bits. An embedding
        that is no head too has no such inputs; where the rest is ``gptq`` it is ``affine`` in 4 bits and
        ``nearest`` in 8.
    scale_type: how the scales are stored; the runtime computes with ones in ``compute_type`` either way.
    kl_limit: the divergence in nats beyond which ``llorch verify`` fails.
    rules: modules that the fields above do not hold for.
    transforms: exact changes of the weights before they were quantised, in the order they were made:
        ``rotate`` (the residual stream into another basis), ``hadamard`` (values and what reads them),
        ``equalise`` (keys against queries), ``smooth`` (the down projection's input).
    transform_seed: of the random bases of ``rotate``; None: there are none.
    calibration: what was measured for transforms, scales or activations; None: nothing was.
    int8_cache: whether a graph that decodes over a KV cache in int8 lies beside the one whose cache is in
        ``compute_type``.
    compute_type: of everything between the weights and the logits: activations, residual stream, norms'
        weights, rotary tables, KV cache. Logits are float32 in any case. ``fp16`` and ``bf16`` weights are
        stored in it too.
    activations: how what enters int8 layers is rounded: ``block`` (with the weights' blocks, by the runtime);
        ``row`` (to 8 bits by each row's largest magnitude; weights then have a scale for each output);
        ``quarters`` (the same, each quarter of a row by its own); ``static`` (the same, by one scale for all
        rows, where a norm gives the input; the other layers have blocks). None: ``block``.
    """

    precision: Precision
    head_precision: Precision
    block_size: int | None
    accuracy_level: Literal[0, 4] | None
    kl_limit: Annotated[float, msgspec.Meta(gt=0)]
    fine_block_size: int | None = None
    quantizer: Quantizer | None = None
    scale_type: ScaleType = "float32"
    rules: tuple[ModuleRule, ...] = ()
    transforms: tuple[TransformName, ...] = ()
    transform_seed: int | None = None
    calibration: CalibrationText | None = None
    compute_type: ComputeType = "float32"
    int8_cache: bool = False
    activations: Activations | None = None
    two_bit_accuracy_level: Literal[0] | msgspec.UnsetType = msgspec.UNSET

    @property
    def precisions(self) -> frozenset[Precision]:
        """Every precision that some matrix is stored in."""
        return frozenset({self.precision, self.head_precision, *(rule.precision for rule in self.rules)})

    @property
    def multiplies_bytes(self) -> bool:
        """Whether some layer may multiply bytes with bytes, its input rounded by whole rows."""
        return any(
            form not in (None, "block")
            for form in (self.activations, *(rule.activations for rule in self.rules))
        )


class GenerationDefaults(_Struct, frozen=True, kw_only=True):
    """Sampling values that the model's authors recommend; used where a request does not say otherwise."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    typical_p: float | None = None
    repeat_last_n: int | None = None


class SourceInfo(_Struct, frozen=True, kw_only=True):
    """Where the weights came from.

    fingerprint: SHA-256 over the source's content, the adapters' included.
    adapter: name of the LoRA adapter that was merged into the weights, or of several with weights, as
        ``style=0.5 + facts``; None: there was none.
    repository: the hub repository that it was fetched from, as ``org/name``; absent: it lay on a
        disk.
    revision: that repository's commit, in hex; of ModelScope, which tells none, the branch or tag.
    hub: whose repository it is; absent: the Hugging Face hub's.
    """

    kind: Literal["gguf", "safetensors"]
    name: str
    fingerprint: str
    adapter: str | None = None
    repository: str | msgspec.UnsetType = msgspec.UNSET
    revision: str | msgspec.UnsetType = msgspec.UNSET
    hub: Literal["modelscope"] | msgspec.UnsetType = msgspec.UNSET


class SourceForm(_Struct, frozen=True, kw_only=True):
    """What became of matrices of a checkpoint whose weights a tool had packed.

    modules: their names. stored: how the checkpoint has them. becomes: how the graph has them.
    """

    modules: ModuleNames
    stored: ShortText
    becomes: ShortText


class FileEntry(_Struct, frozen=True, kw_only=True):
    """A file of the artifact: POSIX path relative to the folder, size in bytes, SHA-256 in hex."""

    path: str
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Sha256


SourceForms = Annotated[tuple[SourceForm, ...], msgspec.Meta(max_length=100_000)]


class FixedShapes(_Struct, frozen=True, kw_only=True):
    """What a graph of fixed shapes needs beside it: one that takes ``prefill_tokens`` tokens at once.

    prefill_graph: its file name; its weights, inputs and outputs are those of the graph that takes one token.
    """

    prefill_graph: str
    prefill_tokens: Count


class Int8Cache(_Struct, frozen=True, kw_only=True):
    """A second graph over the same data file, whose KV cache holds int8: value = byte * scale, a scale for
    each channel.

    decode_graph: its file name; inputs and outputs are those of the first graph but for the cache's type.
    scales: file name of the scales: float32, little endian, [layers, 2 (keys, values), kv_heads, head_dim].
    measured_on: where the channels' ranges come from; None: the text and random tokens that come with llorch.
    min_onnxruntime: the lowest onnxruntime version whose attention takes such a cache.
    """

    decode_graph: str
    scales: str
    measured_on: CalibrationText | None = None
    min_onnxruntime: RuntimeVersion


class PromptGraph(_Struct, frozen=True, kw_only=True):
    """A graph that takes prompts alone, with weights of its own in a form that is faster over many tokens.

    graph: its file name; inputs and outputs, the KV cache's type included, are those of the first graph.
    data: the file of its own weights; others are in the first graph's. recipe: of all of them.
    """

    graph: str
    data: str
    recipe: Recipe


class Stage(_Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Some successive layers of a model, as graphs of their own: one of the parts that run one after another.

    first_layer, end_layer: its layers, the end left out. The first stage also has the embedding, the last
        one the final norm and the head.
    graph: its file name. data: the file of weights that no other stage reads.
    shared_data: files of weights that other stages read too, as a table that is embedding and head at once.
    inputs, outputs: of ``graph``. Its KV cache's tensors are numbered from 0, so that the stage is by itself
        a graph of ``end_layer - first_layer`` layers; names are those of :class:`KvLayout`.
    takes: names of inputs that are outputs of the stage before, equal in name, type and shape
        ``[batch, tokens, hidden_size]``: the residual stream, and what is still to be added to it; none in
        the first stage.
    decode_graph, scales: as in :class:`Int8Cache`, of its layers alone; absent where the artifact has none.
    prompts_graph, prompts_data: as in :class:`PromptGraph`, of its layers alone; absent where the artifact
        has none.
    widened_bytes: as in :class:`Manifest`, of its layers alone.
    """

    first_layer: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    end_layer: Count
    graph: str
    data: str
    shared_data: Names = ()
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    takes: Names = ()
    decode_graph: str | msgspec.UnsetType = msgspec.UNSET
    scales: str | msgspec.UnsetType = msgspec.UNSET
    prompts_graph: str | msgspec.UnsetType = msgspec.UNSET
    prompts_data: str | msgspec.UnsetType = msgspec.UNSET
    widened_bytes: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return self.end_layer - self.first_layer

    @property
    def files(self) -> tuple[str, ...]:
        """All files that it needs: graphs, weights, and scales."""
        names = (self.decode_graph, self.scales, self.prompts_graph, self.prompts_data)
        further = (name for name in names if name is not msgspec.UNSET)
        return (self.graph, self.data, *self.shared_data, *further)


Stages = Annotated[tuple[Stage, ...], msgspec.Meta(min_length=2, max_length=1000)]


class EmbeddingForm(_Struct, frozen=True, kw_only=True):
    """How a graph turns a text into one vector: the hidden states behind the final norm, pooled.

    pooling: ``last``: that of the last token; ``mean``: the mean over all tokens.
    normalised: the vector is divided by its length.
    """

    pooling: Pooling
    normalised: bool = True


class Manifest(_Struct, frozen=True, kw_only=True):
    """Everything a worker must know about an artifact. See ``artifacts/manifest.schema.json``.

    graph, tokenizer, chat_template: file names inside the folder (no template: the model has none).
    other_chat_templates: files of further templates by name, like tool_use; none without chat_template.
    context_length: most tokens, prompt and generated together, that a sequence may hold.
    bos_token_id, eos_token_id: what chat templates write for begin and end of sequence; whether BOS is added
        to plain text is decided by tokenizer.json's post-processor.
    stop_token_ids: every token that ends generation; empty if the model has no end-of-sequence token.
    template_tokens: texts that chat templates see under names like ``pad_token``, begin and end of sequence
        included; absent: those two alone, as their ids say.
    min_onnxruntime: the lowest onnxruntime version that loads the graph.
    fingerprint: SHA-256 over source fingerprint and recipe; equal fingerprints mean the same export.
    interop: other runtimes that load this folder, by graphs and settings of their own over the same data
        file.
    layout: whose inputs and outputs the graph has: ``llorch``; or ``optimum``, traced by Optimum, with a
        cache that grows by concatenation, ``attention_mask`` and ``position_ids``.
    target: what the graph is made for; docs/targets.md says which inputs it has.
    checked_on: execution providers on which graphs of this target, though not this very one, have been
        compared with the reference.
    chunked_prefill: whether several tokens may be run after others of the same sequence.
    fixed_shapes: None where any number of sequences and tokens may be run.
    int8_cache: what decodes over a KV cache in int8; None: nothing does.
    prompts: what takes prompts; None: the first graph does.
    ignored_settings: settings of the source's config.json that its family does not read; absent: none.
    code_not_run: files of Python that the source asked to run; absent: none.
    source_forms: at precision ``source``, what became of packed weights; absent: there were none.
    widened_bytes: what weights take more in memory than in the data file, where the runtime widens them when
        it loads a graph; absent: nothing.
    embedding: the graph gives a vector for each text, [batch, hidden_size], in place of logits, and has no KV
        cache among its inputs and outputs; absent: it is a language model's.
    stages: the model as several graphs, in the order in which they run; absent: it is one. ``inputs``,
        ``outputs`` and ``kv`` are then what one graph of all layers would have; the files that ``graph``,
        ``int8_cache`` and ``prompts`` name are the first stage's. Needs ``schema_version`` 2, which others do
        not have.
    """

    schema_version: Literal[1, 2]
    model_id: str
    fingerprint: str
    model: LlamaConfig
    recipe: Recipe
    graph: str
    tokenizer: str
    chat_template: str | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    kv: KvLayout
    context_length: Annotated[int, msgspec.Meta(ge=2, lt=2**31)]
    bos_token_id: TokenId | None
    eos_token_id: TokenId | None
    stop_token_ids: tuple[TokenId, ...]
    generation: GenerationDefaults
    source: SourceInfo
    files: tuple[FileEntry, ...]
    versions: dict[str, str]
    min_onnxruntime: RuntimeVersion
    interop: tuple[Interop, ...] = ()
    layout: Literal["llorch", "optimum"] = "llorch"
    target: Target = "cpu"
    checked_on: tuple[str, ...] = ("CPUExecutionProvider",)
    chunked_prefill: bool = True
    fixed_shapes: FixedShapes | None = None
    int8_cache: Int8Cache | None = None
    prompts: PromptGraph | None = None
    other_chat_templates: dict[str, str] = {}
    ignored_settings: Names | msgspec.UnsetType = msgspec.UNSET
    code_not_run: Names | msgspec.UnsetType = msgspec.UNSET
    template_tokens: TemplateTokens | msgspec.UnsetType = msgspec.UNSET
    source_forms: SourceForms | msgspec.UnsetType = msgspec.UNSET
    widened_bytes: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET
    embedding: EmbeddingForm | msgspec.UnsetType = msgspec.UNSET
    stages: Stages | msgspec.UnsetType = msgspec.UNSET

    @property
    def embeds(self) -> EmbeddingForm | None:
        """How the graph turns a text into one vector; None if it is a language model's."""
        return None if self.embedding is msgspec.UNSET else self.embedding

    @property
    def kv_dtypes(self) -> tuple[KvDtype, ...]:
        """What the KV cache may hold, the default first."""
        return (self.kv.dtype,) if self.int8_cache is None else ("int8", self.kv.dtype)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as indented JSON with a final newline; the same manifest gives the same bytes."""
    return msgspec.json.format(encode_json(manifest), indent=2) + b"\n"


def decode_manifest(data: bytes, *, origin: str) -> Manifest:
    """Decode and check a manifest; ``origin`` names it in errors.

    Raises NewerSchemaError if a newer llorch wrote it, ArtifactError if it is not JSON or does not fit the
    schema.
    """
    try:
        version = msgspec.json.decode(data, type=_VersionOnly).schema_version
    except NOT_JSON as error:
        raise ArtifactError(f"{origin} is not a llorch manifest: {error}") from error
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"{origin} has schema version {version}; this llorch reads up to {SCHEMA_VERSION}. "
            "Upgrade with: pip install -U llorch"
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except NOT_JSON as error:
        raise ArtifactError(
            f"{origin} does not fit the manifest schema: {error}. Export the model again."
        ) from error
    _check_consistent(manifest, origin)
    return manifest


def _check_consistent(manifest: Manifest, origin: str) -> None:
    """Check what a schema cannot say. Raises ArtifactError."""
    vocab_size, kv = manifest.model.vocab_size, manifest.kv
    others = manifest.other_chat_templates
    if others and (manifest.chat_template is None or "default" in others):
        raise ArtifactError(
            f"{origin} names the chat templates {', '.join(sorted(others))[:200]} beside a default one in "
            f"{manifest.chat_template!r}; expected that to be a file, and the only default. Export the "
            f"model again."
        )
    for token in manifest.stop_token_ids:
        if token >= vocab_size:
            raise ArtifactError(
                f"{origin} names stop token {token}; the vocabulary has ids 0 to {vocab_size - 1}. Export "
                f"the model again."
            )
    if manifest.embeds is None:
        _check_cache(origin, kv, manifest.inputs, manifest.outputs)
    if manifest.stages is not msgspec.UNSET:
        _check_stages(manifest, manifest.stages, origin)


def _check_cache(
    origin: str, kv: KvLayout, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> None:
    """Raise ArtifactError unless a KV cache's tensors are among a graph's inputs and outputs."""
    for specs, pattern in ((inputs, kv.past_name), (outputs, kv.present_name)):
        types = {spec.name: spec.dtype for spec in specs}
        for layer in range(kv.layers):
            for kind in ("key", "value"):
                name = pattern.format(layer=layer, kind=kind)
                if name not in types:
                    raise ArtifactError(f"{origin} does not list the tensor {name}. Export the model again.")
                if types[name] != kv.dtype:
                    raise ArtifactError(
                        f"{origin} has {name} in {types[name]} and a KV cache in {kv.dtype}. Export the "
                        f"model again."
                    )


def _check_stages(manifest: Manifest, stages: tuple[Stage, ...], origin: str) -> None:
    """Raise ArtifactError unless the stages are the whole model, one behind the other."""

    def refuse(found: str) -> NoReturn:
        raise ArtifactError(f"{origin}: {found}. Export the model again.")

    if manifest.schema_version == PLAIN_SCHEMA_VERSION:
        refuse(f"it has stages and schema version {PLAIN_SCHEMA_VERSION}, expected {SCHEMA_VERSION}")
    if manifest.layout != "llorch" or manifest.embeds is not None or manifest.fixed_shapes is not None:
        refuse("it has stages, which only llorch's own graphs of any shape have that give logits")
    layers, end, given = manifest.kv.layers, 0, dict[str, TensorSpec]()
    for number, stage in enumerate(stages):
        here = f"stage {number}"
        if stage.first_layer != end or not stage.first_layer < stage.end_layer <= layers:
            refuse(
                f"{here} has layers {stage.first_layer} to {stage.end_layer}, expected some of {layers} from "
                f"{end} on"
            )
        kv = msgspec.structs.replace(manifest.kv, layers=stage.layers)
        _check_cache(f"{origin}, {here},", kv, stage.inputs, stage.outputs)
        taken = {spec.name: spec for spec in stage.inputs if spec.name in stage.takes}
        if taken != given or set(stage.takes) != given.keys():
            refuse(f"{here} takes {', '.join(stage.takes)[:200] or 'nothing'} and is given something else")
        if number and not _are_rows(taken):
            refuse(
                f"{', '.join(taken)[:200] or 'nothing'} crosses to {here}, expected rows of floats of one "
                "width, [batch, tokens, width]"
            )
        given = {spec.name: spec for spec in stage.outputs if spec.name not in cache_names(kv)}
        for what, found, expected in (
            ("a graph over an int8 cache", stage.decode_graph, manifest.int8_cache),
            ("its scales", stage.scales, manifest.int8_cache),
            ("a graph for prompts", stage.prompts_graph, manifest.prompts),
            ("its weights", stage.prompts_data, manifest.prompts),
        ):
            if (found is msgspec.UNSET) != (expected is None):
                refuse(f"not all stages have {what}: {here} differs")
        end = stage.end_layer
    if end != layers or given.keys() != {"logits"}:
        refuse(f"the stages end at layer {end} of {layers}, with {', '.join(given)[:200]}; expected logits")
    _check_owners(stages, origin)


def _check_owners(stages: tuple[Stage, ...], origin: str) -> None:
    """Raise ArtifactError where a stage has a file of another that is not said to be shared."""
    owners: dict[str, Stage] = {}
    for number, stage in enumerate(stages):
        for name in stage.files:
            owner = owners.setdefault(name, stage)
            if owner is not stage and not (name in stage.shared_data and name in owner.shared_data):
                raise ArtifactError(
                    f"{origin}: stage {number} has {name[:200]}, which is another stage's. Export the model "
                    "again."
                )


def _are_rows(crossing: dict[str, TensorSpec]) -> bool:
    """Tell whether tensors can cross a cut: hidden states, all of one width and type."""
    kinds = {(spec.dtype, len(spec.shape), *spec.shape[2:]) for spec in crossing.values()}
    match list(kinds):
        case [("float32" | "float16" | "bfloat16", 3, int(width))]:
            return width > 0 and "logits" not in crossing
    return False


class _VersionOnly(msgspec.Struct):
    """Reads the version before anything else, since a newer manifest may have fields unknown here."""

    schema_version: int
