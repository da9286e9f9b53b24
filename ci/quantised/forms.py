"""What each tool is asked for: forms by name, and the tool's own settings of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Forms = Mapping[str, dict[str, Any]]

# 576 inputs of SmolLM2 are 9 groups of 64; some tools refuse groups that do not divide them.
BITSANDBYTES: Final[Forms] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
HQQ: Final[Forms] = {
    "4-g64": {"nbits": 4, "group_size": 64, "axis": 1},
    "8-g64": {"nbits": 8, "group_size": 64, "axis": 1},
    "3-g64-axis0": {"nbits": 3, "group_size": 64, "axis": 0},
}
QUANTO: Final[Mapping[str, str]] = {"4": "qint4", "2": "qint2", "8": "qint8", "fp8": "qfloat8"}
MODELOPT: Final[Mapping[str, str]] = {
    "fp8": "FP8_DEFAULT_CFG",
    "fp8-blocks": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "int8": "INT8_WEIGHT_ONLY_CFG",
}
AUTOROUND: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "gptq-4-g64": ("auto_gptq", {"bits": 4, "group_size": 64, "sym": True}),
    "gptq-4-g64-affine": ("auto_gptq", {"bits": 4, "group_size": 64, "sym": False}),
    "awq-4-g64": ("auto_awq", {"bits": 4, "group_size": 64, "sym": False}),
    "own-4-g64": ("auto_round", {"bits": 4, "group_size": 64, "sym": True}),
    "own-3-g64": ("auto_round", {"bits": 3, "group_size": 64, "sym": True}),
    "own-2-g32-affine": ("auto_round", {"bits": 2, "group_size": 32, "sym": False}),
    "own-8-channel": ("auto_round", {"bits": 8, "group_size": -1, "sym": True}),
}
GPTQMODEL: Final[Forms] = {
    "4-g64": {"bits": 4, "group_size": 64, "desc_act": False, "sym": True},
    "4-g64-order": {"bits": 4, "group_size": 64, "desc_act": True, "sym": True},
}
_WEIGHTS: Final = {"observer": "minmax", "type": "int"}
LLMCOMPRESSOR: Final[Mapping[str, dict[str, Any] | str]] = {
    "w4a16-g64": {**_WEIGHTS, "num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": True},
    "w4a16-g64-affine": {
        **_WEIGHTS,
        "num_bits": 4,
        "strategy": "group",
        "group_size": 64,
        "symmetric": False,
    },
    "w8a16": {**_WEIGHTS, "num_bits": 8, "strategy": "channel", "symmetric": True},
    "w8a8": "W8A8",
    "fp8": "FP8_DYNAMIC",
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
}
