"""An artifact that onnxruntime-genai also loads: its settings, and what it needs with ``tokenizer.json``.

Input is the checkpoint; its second graph (:mod:`llorch_export.graph.front`) reads the same data file as
llorch's own.
Output are the files that the pipeline adds to the artifact. Written for onnxruntime-genai 0.18, which
leaves windows and rotation to the graph.
"""

from __future__ import annotations

import json
from typing import Final

from tokenizers import Tokenizer

from llorch_export.checkpoint.base import Checkpoint, TokenizerAssets
from llorch_export.graph.check import checked_bytes
from llorch_export.graph.decoder import DecoderGraph
from llorch_export.graph.front import Interface
from llorch_export.graphs import ArtifactGraphs
from llorch_serve.artifact.manifest import GenerationDefaults, KvLayout
from llorch_serve.errors import UsageError
from llorch_serve.providers import EXACT_BYTES
from llorch_serve.text.tokenizer_library import read_tokenizer

GENAI_GRAPH: Final = "genai.onnx"
GENAI_CONFIG: Final = "genai_config.json"
# Families that onnxruntime-genai has a name for, and its name for all others; it treats them alike.
_KNOWN_TYPES: Final = frozenset(
    {
        "ernie4_5",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "nemotron",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
    }
)
_ANY_DECODER: Final = "decoder"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"


def interop_files(
    checkpoint: Checkpoint, graph: DecoderGraph, graphs: ArtifactGraphs, *, per_channel_int8: bool
) -> dict[str, bytes]:
    """Return the files for another runtime by name: a graph over ``graph``'s data file, and settings; none
    where no other runtime is asked for.

    graphs: builds the same decoder with another front. per_channel_int8: it multiplies int8 with int8.
    Raises UsageError if onnxruntime-genai cannot read the tokenizer.
    """
    if graphs.resolved.interop is None:
        return {}
    other = graphs.first(Interface.GENAI)
    assert [job.tensors for job in other.jobs] == [job.tensors for job in graph.jobs], (
        "one data file for both"
    )
    settings = _settings(
        checkpoint, graph.kv, graphs.resolved.context_length, per_channel_int8=per_channel_int8
    )
    return {
        GENAI_CONFIG: _json(settings),
        TOKENIZER_CONFIG: _json(_tokenizer_settings(checkpoint)),
        GENAI_GRAPH: checked_bytes(other.model, "cpu"),
    }


def _settings(
    checkpoint: Checkpoint, kv: KvLayout, context_length: int, *, per_channel_int8: bool
) -> dict[str, object]:
    config, text = checkpoint.config, checkpoint.tokenizer
    tokens: dict[str, object] = {"vocab_size": config.vocab_size}
    if text.bos_token_id is not None:
        tokens["bos_token_id"] = text.bos_token_id
    if text.stop_token_ids:
        tokens["eos_token_id"] = list(text.stop_token_ids)
    # What fills a batch's shorter prompts is masked, so any token does.
    tokens["pad_token_id"] = text.stop_token_ids[0] if text.stop_token_ids else 0
    names = {
        f"{when}_{kind}_names": pattern.replace("{layer}", "%d").replace("{kind}", kind)
        for when, pattern in (("past", kv.past_name), ("present", kv.present_name))
        for kind in ("key", "value")
    }
    decoder = {
        "filename": GENAI_GRAPH,
        "session_options": {
            "log_id": "onnxruntime-genai",
            "provider_options": [],
            **(dict([EXACT_BYTES]) if per_channel_int8 else {}),
        },
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": kv.layers,
        "num_key_value_heads": kv.kv_heads,
        "head_size": kv.head_dim,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            **{key: name for key, name in names.items() if key.startswith("past")},
        },
        "outputs": {
            "logits": "logits",
            **{key: name for key, name in names.items() if key.startswith("present")},
        },
    }
    return {
        "model": {
            "type": config.architecture if config.architecture in _KNOWN_TYPES else _ANY_DECODER,
            "context_length": context_length,
            **tokens,
            "decoder": decoder,
        },
        # One buffer for past and present: attention appends in place.
        "search": {
            "max_length": context_length,
            "past_present_share_buffer": True,
            **_sampling(text.generation),
        },
    }


def _sampling(recommended: GenerationDefaults) -> dict[str, object]:
    """Return the recommended sampling; greedy where there is none, as in llorch. There is no min-p to carry
    over.
    """
    sampled = bool(recommended.temperature)
    found: dict[str, object] = {"do_sample": sampled}
    if sampled:
        found["temperature"] = recommended.temperature
        found["top_k"] = recommended.top_k or 0
        found["top_p"] = 1.0 if recommended.top_p is None else recommended.top_p
    if recommended.repetition_penalty is not None:
        found["repetition_penalty"] = recommended.repetition_penalty
    return found


def _tokenizer_settings(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the little that onnxruntime-genai reads with tokenizer.json: the class, and the special
    tokens' texts.
    """
    text = checkpoint.tokenizer
    kind = json.loads(text.tokenizer_json)["model"]["type"]
    if kind != "BPE":
        raise UsageError(
            f"--interop genai: the tokenizer of {checkpoint.path} is of type {kind}; onnxruntime-genai is "
            f"known to read BPE "
            "as llorch does. Leave the option out"
        )
    tokenizer = read_tokenizer(text.tokenizer_json, origin=str(checkpoint.path))
    adds_bos = text.bos_token_id is not None and text.bos_token_id in tokenizer.encode("a").ids
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        **_special_tokens(tokenizer, text),
    }


def _special_tokens(tokenizer: Tokenizer, text: TokenizerAssets) -> dict[str, object]:
    ids = {"bos_token": text.bos_token_id, "eos_token": text.eos_token_id}
    found = {key: None if id_ is None else tokenizer.id_to_token(id_) for key, id_ in ids.items()}
    return {key: token for key, token in found.items() if token is not None}


def _json(value: dict[str, object]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
