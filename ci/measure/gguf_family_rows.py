"""The models that ``gguf_families`` compares, every row of the tests among them, and what is known to
differ.
"""

from __future__ import annotations

from typing import Any, Final

from support.builders.arch_rows import HF, LONG, SHORT
from support.builders.checkpoints import of_family

_LONGROPE: Final = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
# Models of which llama.cpp's converter or loader asks for more than a config must say.
SHAPED: Final[dict[str, dict[str, Any]]] = {
    "phi, as many kv heads": {**HF["phi"], "num_key_value_heads": 4, "intermediate_size": 256},
    "olmoe, as many kv heads": {**HF["olmoe"], "num_key_value_heads": 4},
    "cohere2, rotary_pct": {**HF["cohere2"], "rotary_pct": 1.0},
    "exaone4, 64 layers": {**HF["exaone4"], "num_hidden_layers": 64},
    "hunyuan, alpha, 32768 positions": {
        **HF["hunyuan, alpha"],
        "max_position_embeddings": 32768,
        "attention_bias": False,
    },
    "phi3, longrope, short, 256 positions": {
        **HF["phi3, longrope, all short"],
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 256,
    },
    "glm, epsilon of 1e-5": {**HF["glm"], "rms_norm_eps": 1e-5},
    "exaone, its own class": {**HF["exaone"], "architectures": ["ExaoneForCausalLM"]},
    "internlm3, its own class": {**HF["internlm3"], "architectures": ["InternLM3ForCausalLM"]},
    "ministral3, sharpened for all dimensions": {
        **HF["ministral3"],
        "rope_parameters": {**HF["ministral3"]["rope_parameters"], "mscale_all_dim": 1.0},
    },
}
FOLDERS: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "llama, biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    **HF,
    **SHAPED,
}
IN_ONE: Final = ", q, k and v in one"
# Files that the converter writes of other models or when told to: overrides of the config, changes of the
# metadata.
BY_HAND: Final[dict[str, tuple[dict[str, Any], dict[str, object]]]] = {
    "gemma3, a file without a window": (HF["gemma3, tied"], {"gemma3.attention.sliding_window": None}),
    "gemma3, a pattern as a number": (HF["gemma3, tied"], {"gemma3.attention.sliding_window_pattern": 2}),
    "gemma3, a pattern as a list": (
        HF["gemma3, tied"],
        {"gemma3.attention.sliding_window_pattern": [True, False, False, True, True, False, True]},
    ),
    "gemma2, a file without a window": (HF["gemma2, tied"], {"gemma2.attention.sliding_window": None}),
    "exaone4, a file without a window": (
        {**HF["exaone4"], "num_hidden_layers": 2},
        {"exaone4.attention.sliding_window": None},
    ),
    f"llama{IN_ONE}": ({}, {}),
    f"qwen2{IN_ONE}": (HF["qwen2"], {}),
    f"glm{IN_ONE}": (HF["glm"], {}),
    f"phi{IN_ONE}": (
        {**HF["phi"], "num_key_value_heads": 4, "intermediate_size": 256},
        {"phi2.attention.key_length": None, "phi2.attention.value_length": None},
    ),
    f"mixtral{IN_ONE}": (HF["mixtral"], {}),
    "llama, linear by the old key": (of_family("llama"), {"llama.rope.scale_linear": 2.0}),
}
# Where ours is not llama.cpp's, and why ours is the model's.
DIFFERENT: Final[dict[str, str]] = {
    "phi3, window": "llama.cpp has windows of Phi-3 turned off",
    "phi3, longrope, all short": "llama.cpp takes the long divisors for any context beyond the original one",
    "phi3, longrope, partial": "llama.cpp takes the long divisors for any context beyond the original one",
    "yarn, betas": "llama.cpp reads the betas of mistral3 alone",
    "olmo3, yarn where there is no window": "llama.cpp reads the base of layers with a window and leaves it",
    "exaone4": "llama.cpp has windows in the model of 64 layers alone",
    "exaone4, types beside a pattern in letters": "llama.cpp has windows in the model of 64 layers alone",
}
# What llorch does not read, and why.
REFUSED: Final[dict[str, str]] = {
    "yarn, attention factor": "refused: llama.cpp does not read the factor that its converter writes",
    "phi": "refused: the converter writes the usual sizes of Phi-2's heads and MLP",
    "phi, all rotated, one kv head": "refused: the converter writes the usual sizes of Phi-2's heads and MLP",
    "longrope, all short": "refused: the converter leaves the divisors out",
}
