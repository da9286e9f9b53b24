"""Tiny checkpoints for tests: a random-weight Llama as a Hugging Face folder and as a GGUF file.

Both writers draw the same weights for the same config and seed, so that what is read from one can be held
against the other. Nothing here uses the exporter except its config parser and its table of families, and
nothing needs torch.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from llorch_export.checkpoint.names import stored_tensors
from llorch_export.config.families import FAMILIES
from llorch_export.config.family import Family
from llorch_export.config.hf import config_from_hf
from llorch_serve.artifact.manifest import ExpertsConfig, LlamaConfig
from support.builders.stored_experts import Weights, with_gguf_experts, with_stored_experts
from support.oracles.gguf_blocks import storage_type

VOCAB_SIZE = 512
BOS, EOS, TURN, TURN_END = "<|bos|>", "<|eos|>", "<|turn|>", "<|turn_end|>"
SPECIAL_TOKENS = (BOS, EOS, TURN, TURN_END)  # ids 0 to 3
BOS_ID, EOS_ID, TURN_END_ID = 0, 1, 3
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content }}<|turn_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
# Enough different text for 512 tokens, with what tokenizers get wrong: digits, runs of space, other scripts.
_PATTERN_IN_GGUF = ("exaone4", "olmo3")
_DEPTH_SCALED = {"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 16}
_NUMBERS = ("act_fn.beta", "act_fn.eps")
_DRAWN_IN_LLAMAS_ORDER = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "phi3")
_CORPUS = (
    "The quick brown fox jumps over the lazy dog while seventeen engineers measure latency and throughput.",
    "Tokens are generated one by one; every step reads all weights once, so memory bandwidth sets the pace.",
    "def decode(tokens):\n    for token in tokens:\n        yield token + 1  # 1234567890\n",
    "Paris is the capital of France, Rome is the capital of Italy, and Vienna is the capital of Austria.",
    "Größe, naïve café, 東京 タワー, Привет мир, 🙂🚀 emoji, 3.14159 and 2,718 are also text.",
    "Whether the weather is fine or whether the weather is not, we weather the weather whatever the weather.",
)
_DTYPES: Mapping[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
    "I32": np.int32,
}


def tiny_config(**overrides: object) -> dict[str, object]:
    """Return the content of a ``config.json``; an override of None removes the key."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 128,
        "rms_norm_eps": 2.0**-17,  # near 1e-5, and a float32, so that it survives a GGUF file unchanged
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
        **overrides,
    }
    return {key: value for key, value in config.items() if value is not None}


def of_family(model_type: str, **overrides: object) -> dict[str, object]:
    """Return overrides for :func:`tiny_config` that make it a config of another family."""
    return {
        "model_type": model_type,
        "architectures": [FAMILIES[model_type].causal_lm],
        "hidden_act": None,
        "rms_norm_eps": None,
        FAMILIES[model_type].activation_key: next(iter(FAMILIES[model_type].activations)),
        FAMILIES[model_type].norm_key: 2.0**-17,
        "head_dim": 16,  # what all families but one take from hidden_size and heads by themselves
        **(_DEPTH_SCALED if FAMILIES[model_type].depth_scaled else {}),
        **({"rope_theta": None} if "rope_theta" in FAMILIES[model_type].usual_rope else {}),
        "pad_token_id": EOS_ID,  # transformers' own default for some families lies beyond a tiny vocabulary
        **overrides,
    }


def tiny_llama_config(**overrides: object) -> LlamaConfig:
    """Return :func:`tiny_config` parsed."""
    return config_from_hf(tiny_config(**overrides))


def tiny_weights(config: LlamaConfig, seed: int = 0) -> Weights:
    """Draw all weights of a config under Hugging Face's names, ``[out, in]``; large biases, norms around
    one.
    """
    if config.architecture not in _DRAWN_IN_LLAMAS_ORDER:
        return _weights_by_name(config, seed)
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32)

    def norm(size: int = config.hidden_size) -> npt.NDArray[np.float32]:
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = (
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    )
    weights: Weights = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden) * math.sqrt(hidden) / 2
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        weights[f"{prefix}input_layernorm.weight"] = norm()
        weights[f"{prefix}post_attention_layernorm.weight"] = norm()
        for name, rows, columns in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", key_value, hidden),
            ("self_attn.v_proj", key_value, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            weights[f"{prefix}{name}.weight"] = matrix(rows, columns)
            if _has_bias(config, name):
                weights[f"{prefix}{name}.bias"] = rng.standard_normal(rows).astype(np.float32)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}self_attn.{name}.weight"] = norm(config.head_dim)
    weights["model.norm.weight"] = norm()
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = matrix(config.vocab_size, hidden)
    return weights


def _weights_by_name(config: LlamaConfig, seed: int) -> Weights:
    """Draw the weights of a family whose modules are not Llama's, under the names of its own checkpoints.

    Names are the exporter's; transformers, which would not find its own under others, is their oracle.
    """
    rng = np.random.default_rng(seed)
    offset = FAMILIES[config.architecture].norm_offset
    weights: Weights = {}
    for name, shape in stored_tensors(config).items():
        values = rng.standard_normal(shape)
        if len(shape) > 1:
            values /= math.sqrt(shape[1])
            values *= (
                math.sqrt(config.hidden_size) / 2 / config.embedding_multiplier if "embed" in name else 1
            )
        elif name.endswith("weight"):
            values = 1 - offset + 0.2 * values
        elif name.endswith("act_fn.eps"):
            values = -2e-4 * np.abs(values)  # a larger one makes the activation jump at 0
        weights[name] = values.astype(np.float32)
    return weights


def stored_name(name: str, family: Family) -> str:
    """Return what published checkpoints of a family that is renamed on loading call a tensor."""
    module, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if layer is None:
        return f"{family.stored_names.get(module, module)}.{kind}"
    return f"{family.stored_layers}.{layer[1]}.{family.stored_names[layer[2]]}.{kind}"


def _has_bias(config: LlamaConfig, module: str) -> bool:
    if "attn" not in module:
        return config.mlp_bias
    return config.attention_bias or (config.qkv_bias and "o_proj" not in module)


def fused(weights: Weights, *, qkv: bool = True) -> Weights:
    """Return the weights as Phi-3 stores them: q, k, v in one matrix unless told, gate and up in another."""
    result: Weights = {}
    for name, value in weights.items():
        whole = name
        for parts, together in (
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj"),
            (("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
        ):
            for part in parts if qkv or "qkv" not in together else ():
                whole = whole.replace(part, together)
        result[whole] = np.concatenate([result[whole], value]) if whole in result else value
    return result


@functools.cache
def tiny_tokenizer_json() -> str:
    """Return a byte-level BPE tokenizer of 512 tokens that puts BOS in front of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer.to_str()


def write_hf_folder(
    path: Path,
    config_overrides: Mapping[str, object] | None = None,
    seed: int = 0,
    dtype: str = "F32",
    shards: int = 1,
    tokenizer: bool = True,
    *,
    edit: Callable[[Weights], None] | None = None,
    stacked_experts: bool = False,
    generation_config: Mapping[str, object] | None = None,
    tokenizer_config: Mapping[str, object] | None = None,
) -> Path:
    """Write a model folder and return its path.

    dtype: ``F32``, ``F16`` or ``BF16``; ``F64`` and ``I32`` for what must be refused.
    shards: above 1, weights are dealt out to so many files beside an index.
    edit: changes the weights before they are written.
    stacked_experts: keep the experts of a layer together, as transformers' own modules have them; else as
        hubs have them.
    tokenizer_config: settings added to the file; None removes one.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**(config_overrides or {}))
    weights = tiny_weights(config_from_hf(config), seed)
    if edit is not None:
        edit(weights)
    if config["model_type"] == "phi3":
        weights = fused(weights)
    weights = with_stored_experts(weights, str(config["model_type"]), stacked=stacked_experts)
    family = FAMILIES[str(config["model_type"])]
    if family.renamed_on_loading:
        weights = {stored_name(name, family): value for name, value in weights.items()}
    stored = {name: np.ascontiguousarray(value.astype(_DTYPES[dtype])) for name, value in weights.items()}
    # transformers' buffers have no dimension.
    stored = {name: v.reshape(()) if name.endswith(_NUMBERS) else v for name, v in stored.items()}
    _write_json(path / "config.json", config)
    if shards == 1:
        save_file(stored, path / "model.safetensors")
    else:
        weight_map: dict[str, str] = {}
        for index in range(shards):
            shard = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: stored[name] for name in list(stored)[index::shards]}
            save_file(part, path / shard)
            weight_map |= dict.fromkeys(part, shard)
        total = sum(value.nbytes for value in stored.values())
        _write_json(
            path / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )
    if tokenizer:
        (path / "tokenizer.json").write_text(tiny_tokenizer_json(), encoding="utf-8")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "chat_template": CHAT_TEMPLATE,
            **(tokenizer_config or {}),
        }
        _write_json(path / "tokenizer_config.json", {k: v for k, v in settings.items() if v is not None})
    if generation_config is not None:
        _write_json(path / "generation_config.json", generation_config)
    return path


def write_gguf(
    path: Path,
    config_overrides: Mapping[str, object] | None = None,
    seed: int = 0,
    weight_type: str = "F32",
    tokenizer: bool = True,
    *,
    edit: Callable[[Weights], None] | None = None,
    metadata: Mapping[str, object] | None = None,
    extra: Mapping[str, npt.NDArray[np.float32]] | None = None,
    blocks: Callable[[str, int, int], tuple[str, npt.NDArray[np.uint8]] | None] | None = None,
    tensors_a_part: int = 0,
    empty_first_part: bool = False,
    fused_qkv: bool | None = None,
) -> Path:
    """Write a GGUF file with the weights of :func:`write_hf_folder` and return its path.

    tensors_a_part: split it into files of so many tensors, by gguf's own writer, and return the first, which
        with empty_first_part has metadata alone.

    weight_type: storage type of all matrices; norms and biases are F32, as conversion does it.
    edit: changes the weights, under Hugging Face's names, before they are written.
    metadata: keys added or replaced; None removes one.
    extra: further tensors under their GGUF names. Llama 3 scaling writes ``rope_freqs.weight`` without being
        asked.
    blocks: given a matrix's GGUF name, rows and columns, returns storage type and bytes [rows, bytes of a
        row] to write in place of its weights, or None to leave them.
    fused_qkv: store query, key and value projections of a layer in one tensor, as the converter can, or each
        in its own; None: as the family does.
    """
    hf_config = tiny_config(**(config_overrides or {}))
    config = config_from_hf(hf_config)
    weights = tiny_weights(config, seed)
    if edit is not None:
        edit(weights)
    values = gguf_metadata(config) | (gguf_tokenizer_metadata() if tokenizer else {})
    values |= _factors(weights) | dict(metadata or {})
    family = FAMILIES[config.architecture]
    writer = gguf.GGUFWriter(
        path, family.gguf_name, split_max_tensors=tensors_a_part, small_first_shard=empty_first_part
    )
    for key, value in values.items():
        if value is not None and key != "general.architecture":
            add_metadata(writer, key, value)
    if config.rope.kind == "llama3":
        extra = {"rope_freqs.weight": llama3_frequency_factors(config), **(extra or {})}
    if config.rope.kind == "longrope":
        divisors = {"short": config.rope.short_factor, "long": config.rope.long_factor}
        tables = {f"rope_factors_{k}.weight": np.array(v, np.float32) for k, v in divisors.items()}
        extra = {**tables, **(extra or {})}
    if config.architecture == "phi3":
        weights = fused(weights, qkv=fused_qkv is not False)
    tensors = {
        gguf_tensor_name(name, family.gguf_name): converted(name, value, config)
        for name, value in with_gguf_experts(weights).items()
    }
    tensors = _with_fused_qkv(tensors) if fused_qkv else tensors
    kind = gguf.GGMLQuantizationType[weight_type]
    for name, value in (tensors | dict(extra or {})).items():
        if value.ndim == 1:
            writer.add_tensor(name, value)
        elif blocks is not None and value.ndim == 2 and (given := blocks(name, *value.shape)) is not None:
            writer.add_tensor(name, given[1], raw_dtype=storage_type(given[0]))
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def _factors(weights: Weights) -> dict[str, list[float]]:
    """Take the numbers of activations out of the weights and return them as metadata, a list of layers'."""
    found: dict[str, list[float]] = {}
    for name in [name for name in weights if ".act_fn." in name]:
        found.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(float(weights.pop(name)[0]))
    return found


def _with_fused_qkv(tensors: Weights) -> Weights:
    """Return a GGUF file's tensors with the three projections of each layer as one, biases too."""
    result: Weights = {}
    for name, value in tensors.items():
        whole = re.sub(r"\.attn_[qkv]\.", ".attn_qkv.", name)
        result[whole] = np.concatenate([result[whole], value]) if whole in result else value
    return result


def gguf_metadata(config: LlamaConfig) -> dict[str, object]:
    """Return the metadata under the architecture's name that conversion writes for a config."""
    rope = config.rope
    values: dict[str, object] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.rotary_dim,
        "rope.freq_base": rope.theta,
        "vocab_size": config.vocab_size,
    }
    if rope.kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind in ("yarn", "longrope"):
        values["rope.scaling.original_context_length"] = rope.original_max_position_embeddings
    if rope.kind == "longrope":
        values["rope.scaling.attn_factor"] = rope.attention_factor
    if FAMILIES[config.architecture].multipliers or FAMILIES[config.architecture].depth_scaled:
        values |= {
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
            "attention.scale": config.attention_multiplier,
        }
    experts = config.experts
    if isinstance(experts, ExpertsConfig):
        values |= {"expert_count": experts.count, "expert_used_count": experts.per_token}
        if experts.intermediate_size != config.intermediate_size:
            values["expert_feed_forward_length"] = experts.intermediate_size
        if experts.shared_intermediate_size is not None:
            values["expert_shared_feed_forward_length"] = experts.shared_intermediate_size
    if config.architecture == "phi3":
        values["attention.sliding_window"] = config.sliding_window or 0
    family, form = FAMILIES[config.architecture], config.form
    values[f"attention.layer_norm{'_rms' if form.norm == 'rms' else ''}_epsilon"] = config.rms_norm_eps
    if family.parallel_key:
        values[family.parallel_key] = form.parallel
    if family.logit_scale:
        values["logit_scale"] = 1 / config.logits_scaling
    if family.windows == "pattern":
        values["attention.sliding_window"] = config.sliding_window
    values |= _metadata_of_some(config)
    caps = {"attn_logit_softcapping": form.attention_softcap, "final_logit_softcapping": form.logits_softcap}
    values |= {key: cap for key, cap in caps.items() if cap is not None}
    return {
        "general.type": "model",
        **{f"{family.gguf_name}.{key}": value for key, value in values.items() if value is not None},
    }


def _metadata_of_some(config: LlamaConfig) -> dict[str, object]:
    """Return what conversion writes for some families alone, as the converter's own runs show it."""
    values: dict[str, object] = {}
    if config.architecture in _PATTERN_IN_GGUF and config.layer_types:
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        values["attention.sliding_window_pattern"] = pattern
    if config.form.sliding_rope is not None:
        values["rope.freq_base_swa"] = config.form.sliding_rope.theta
    if config.architecture == "nemotron":
        values["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if config.architecture == "ministral3":
        values |= {
            "rope.scaling.yarn_log_multiplier": 0.0,
            "rope.scaling.yarn_beta_fast": config.rope.beta_fast,
            "rope.scaling.yarn_beta_slow": config.rope.beta_slow,
            "attention.temperature_scale": getattr(config.rope.query_scale, "beta", 0.0),
        }
    return values


def gguf_tokenizer_metadata() -> dict[str, object]:
    """Return the tiny tokenizer as GGUF metadata."""
    model = json.loads(tiny_tokenizer_json())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def gguf_tensor_name(name: str, architecture: str = "llama") -> str:
    """Return the GGUF name of a Hugging Face tensor, by gguf's own table."""
    base, kind = (name, "weight") if name.endswith(".sinks") else name.rsplit(".", 1)
    found = _gguf_names(architecture).get_name(base)
    return f"{found}.{kind}" if found is not None else name


@functools.cache
def _gguf_names(architecture: str) -> gguf.TensorNameMap:
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(known[architecture], 16)


def converted(name: str, value: npt.NDArray[np.float32], config: LlamaConfig) -> npt.NDArray[np.float32]:
    """Return what conversion to GGUF makes of a tensor: heads in another order, norms as factors."""
    if name.endswith("norm.weight"):
        return value + np.float32(FAMILIES[config.architecture].norm_offset)
    return permuted(name, value, config)


def permuted(name: str, value: npt.NDArray[np.float32], config: LlamaConfig) -> npt.NDArray[np.float32]:
    """Interleave the two halves of every query and key head, as conversion to GGUF does for some families."""
    if not FAMILIES[config.architecture].permuted:
        return value
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        name.split(".")[-2], 0
    )
    if not heads or "self_attn" not in name:
        return value
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


def llama3_frequency_factors(config: LlamaConfig) -> npt.NDArray[np.float32]:
    """Return by what Llama 3.1's scaling divides each rotary frequency.

    Long wavelengths by ``factor``, short ones by 1, and between the two a blend (the model's reference code).
    """
    rope = config.rope
    assert rope.factor is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    assert rope.original_max_position_embeddings is not None
    factors = []
    for pair in range(config.head_dim // 2):
        wavelength = 2 * math.pi * rope.theta ** (2 * pair / config.head_dim)
        turns = rope.original_max_position_embeddings / wavelength
        if turns < rope.low_freq_factor:
            factors.append(rope.factor)
        elif turns > rope.high_freq_factor:
            factors.append(1.0)
        else:
            smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            factors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(factors, dtype=np.float32)


def add_metadata(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Add a key with the GGUF type that its Python type stands for."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        raise TypeError(f"{key} is {value!r}")


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False), encoding="utf-8")
