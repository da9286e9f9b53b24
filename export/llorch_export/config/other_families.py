"""Why a model of a family that is not supported cannot be one of those that are, as its config.json tells.

A person who reads the refusal learns what the model has that no graph here has, not only that its name is
missing from a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llorch_export.config.fields import Fields, shown

_ATTENTION: Final = ("full_attention", "sliding_attention", "chunked_attention")
# Keys that only such models have, and what they do; the first that a file has says it.
_SIGNS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "vision_config",
            "audio_config",
            "visual",
            "vision_tower",
            "mm_vision_tower",
            "img_processor",
            "vit",
            "vae",
            "image_token_id",
        ),
        "takes more than text",
    ),
    "kv_lora_rank": "compresses keys and values into one latent vector",
    **dict.fromkeys(
        (
            "hybrid_override_pattern",
            "conv_L_cache",
            "linear_num_key_heads",
            "mamba_num_heads",
        ),
        "has layers with a recurrent state in the place of attention",
    ),
    "index_topk": "chooses by an index which tokens attention sees",
    "compress_ratios": "compresses keys and values of distant tokens",
    "n_embd": "is built as GPT-2, with blocks that no graph here has",
    **dict.fromkeys(
        ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
        "arranges its experts in a way of its own",
    ),
    "block_configs": "has layers that each are built otherwise",
    "text_config": "takes more than text",
}


def what_it_has(fields: Fields) -> str:
    """Return what a model has that no family here has, ``which DOES THAT (KEY)``; "" if nothing tells it."""
    if "layer_types" in fields:
        kinds = fields.get("layer_types")
        others = [kind for kind in kinds if kind not in _ATTENTION] if isinstance(kinds, list) else []
        if others:
            return f"which has layers of the kind {shown(str(others[0]), 40)!r} (layer_types)"
    for key, does in _SIGNS.items():
        if key in fields and fields.get(key) not in ([], {}, 0, False):
            return f"which {does} ({key})"
    return ""
