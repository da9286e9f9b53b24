"""A tiny Llama that says what is written here: thoughts, one call or two, an answer, or words without an end.

Each token's successor is fixed: embedding and head are one-hot matrices, and layers add nothing. The template
ends a prompt with a token that begins one of the scripts, chosen by what was asked. So a real export and a
real worker give known answers, and a client's every step can be looked at.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END: Final = "<|im_end|>"
CUES: Final = ("<|talk|>", "<|call|>", "<|both|>", "<|after|>", "<|count|>")
TALK: Final = "Paris is the capital of France."
THOUGHT: Final = "The user asks for a city."
CALL: Final = {"name": "get_weather", "arguments": {"city": "Paris"}}
CALL_THOUGHT: Final = "I must look it up."
BOTH: Final = (
    {"name": "get_weather", "arguments": {"city": "Rome"}},
    {"name": "get_weather", "arguments": {"city": "Oslo"}},
)
AFTER: Final = "It is sunny in Paris."

TEMPLATE: Final = """\
{%- if tools %}<|im_start|>system
You may call these functions, each call as JSON within <tool_call></tool_call>:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{#- Thoughts are written as <think></think>. #}
{%- set asked = messages[-1].content or '' %}
{%- if messages[-1].role == 'tool' %}<|after|>
{%- elif tools and 'both' in asked %}<|both|>
{%- elif tools %}<|call|>
{%- elif 'count' in asked %}<|count|>
{%- else %}<|talk|>
{%- endif %}
{%- endif %}"""


def _call(call: object) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _cut(text: str, pieces: int) -> list[str]:
    size = -(-len(text) // pieces)
    return [text[start : start + size] for start in range(0, len(text), size)]


# No piece occurs twice: a token has one successor.
SCRIPTS: Final = {
    "<|talk|>": [f"<think>\n{THOUGHT}\n</think>\n\n", *_cut(TALK, 4), END],
    "<|call|>": [f"<think>\n{CALL_THOUGHT}\n</think>\n\n", *_cut(_call(CALL), 5), END],
    "<|both|>": [f"{_call(BOTH[0])}\n", _call(BOTH[1]), END],
    "<|after|>": [*_cut(AFTER, 3), END],
    "<|count|>": [" one", " two", " three", " one"],
}


def write_scripted_model(path: Path, *, context: int = 4096) -> Path:
    """Write the model as a Hugging Face folder and return its path; export it in fp32."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    size = -(-tokenizer.get_vocab_size() // 32) * 32
    hidden = size
    embedding = np.eye(size, dtype=np.float32)
    head = np.zeros((size, size), np.float32)
    for cue, pieces in SCRIPTS.items():
        ids = [tokenizer.token_to_id(piece) for piece in (cue, *pieces)]
        for token, successor in itertools.pairwise(ids):
            head[successor, token] = 1.0
    narrow, kv = 32, 32
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (narrow, hidden),
        "mlp.up_proj": (narrow, hidden),
        "mlp.down_proj": (hidden, narrow),
    }
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        **{f"model.{name}.weight": np.ones(hidden, np.float32) for name in norms},
        **{f"model.layers.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in layer.items()},
    }
    save_file(weights, path / "model.safetensors")
    _write(path / "config.json", _config(hidden, narrow, context, tokenizer.token_to_id(END)))
    (path / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    _write(path / "tokenizer_config.json", settings)
    return path


def _config(hidden: int, narrow: int, context: int, end: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": narrow,
        "num_hidden_layers": 1,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": context,
        "vocab_size": hidden,
        "tie_word_embeddings": False,
        "eos_token_id": end,
    }


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", END, *CUES])
    pieces = dict.fromkeys(piece for script in SCRIPTS.values() for piece in script if piece != END)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return tokenizer


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
