"""A published config.json made small: fewer and narrower layers and a small vocabulary, all else as it is.

What makes a family's arithmetic stays: sizes of heads, how many of them share keys and values, rotary
settings, windows, biases, ties, epsilons and multipliers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from support.builders.checkpoints import BOS_ID, EOS_ID, VOCAB_SIZE

_LAYERS: Final = 4
_MOST_HEADS: Final = 4  # of those that share nothing; groups are kept whole
_TOKENS: Final = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}


def shrunk(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json for a model of some million weights, as ``data`` otherwise."""
    heads = data["num_attention_heads"]
    kv_heads = data.get("num_key_value_heads") or heads
    group = heads // kv_heads
    kept = max(1, min(kv_heads, _MOST_HEADS // group))
    head_dim = data.get("head_dim") or data["hidden_size"] // heads
    hidden = _even(data["hidden_size"] * kept * group / heads)
    if "head_dim" not in data:
        hidden = head_dim * kept * group  # as the family takes it from the two
    layers = min(_LAYERS, data["num_hidden_layers"])
    small = {
        **data,
        "hidden_size": hidden,
        "intermediate_size": _even(data["intermediate_size"] * hidden / data["hidden_size"]),
        "num_hidden_layers": layers,
        "num_attention_heads": kept * group,
        "vocab_size": VOCAB_SIZE,
        **{key: value for key, value in _TOKENS.items() if key in data or key == "pad_token_id"},
    }
    if data.get("num_key_value_heads") is not None:
        small["num_key_value_heads"] = kept
    for by_layer in ("layer_types", "no_rope_layers"):
        if isinstance(data.get(by_layer), list):
            small[by_layer] = data[by_layer][:layers]
    if isinstance(data.get("max_window_layers"), int):
        small["max_window_layers"] = math.ceil(data["max_window_layers"] * layers / data["num_hidden_layers"])
    return small


def _even(size: float) -> int:
    return max(32, 32 * round(size / 32))
