"""Tiny folders as onnxruntime-genai's builder and Optimum lay them out, and what their model must answer.

The graphs are built here node by node, from the weights of :mod:`checkpoints`: genai's with one fused
attention operator a layer, Optimum's from primitive operators, as tracing leaves them. :func:`greedy` is the
oracle, in numpy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from support.builders.checkpoints import (
    BOS,
    BOS_ID,
    CHAT_TEMPLATE,
    EOS,
    EOS_ID,
    TURN_END_ID,
    Weights,
    tiny_config,
    tiny_llama_config,
    tiny_tokenizer_json,
    tiny_weights,
)
from support.oracles import numpy_llama

MICROSOFT = "com.microsoft"
SHAPE = tiny_llama_config()
LAYERS, HEADS, KV_HEADS, HEAD_DIM = (
    SHAPE.num_hidden_layers,
    SHAPE.num_attention_heads,
    SHAPE.num_key_value_heads,
    SHAPE.head_dim,
)


def weights() -> Weights:
    """Return the weights that every graph here has."""
    return tiny_weights(SHAPE)


def reference(token_ids: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return logits [tokens, vocabulary], from the definition."""
    return numpy_llama.forward(tiny_config(), weights(), token_ids)


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """Return the ``count`` likeliest tokens, one after another."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(reference(ids)[-1].argmax()))
    return ids[len(prompt) :]


@dataclass
class _Graph:
    """Nodes, initialisers and a counter of names."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def op(self, kind: str, *inputs: str, outputs: Sequence[str] = (), domain: str = "", **given: Any) -> str:
        names = list(outputs) or [f"v{len(self.nodes)}"]
        self.nodes.append(helper.make_node(kind, inputs, names, domain=domain, **given))
        return names[0]

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"c{len(self.constants)}"
        array = np.asarray(value, dtype, order="C")
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def linear(self, x: str, weight: npt.NDArray[np.float32]) -> str:
        return self.op("MatMul", x, self.constant(weight.T, np.float32))

    def norm(self, x: str, weight: npt.NDArray[np.float32]) -> str:
        squares = self.op("Mul", x, x)
        mean = self.op("ReduceMean", squares, self.constant([-1]), keepdims=1)
        scale = self.op("Sqrt", self.op("Add", mean, self.constant(SHAPE.rms_norm_eps, np.float32)))
        return self.op("Mul", self.op("Div", x, scale), self.constant(weight, np.float32))

    def size(self, x: str, axis: int) -> str:
        return self.op("Gather", self.op("Shape", x), self.constant(axis), axis=0)


def _rotary_tables() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    steps = np.arange(0, HEAD_DIM, 2) / HEAD_DIM
    angles = np.arange(SHAPE.max_position_embeddings)[:, None] * SHAPE.rope.theta**-steps
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _fused_attention(g: _Graph, q: str, k: str, v: str, layer: int, positions: bool) -> str:
    """One operator a layer, its lengths counted from the attention mask."""
    total = g.op("ReduceSum", "attention_mask", g.constant([1]), keepdims=0)
    seqlens = g.op("Cast", g.op("Sub", total, g.constant(1)), to=TensorProto.INT32)
    longest = g.op("Cast", g.size("attention_mask", 1), to=TensorProto.INT32)
    tables = [g.constant(table, np.float32) for table in _rotary_tables()]
    if positions:
        q, k = (
            g.op("RotaryEmbedding", x, "position_ids", *tables, domain=MICROSOFT, num_heads=heads)
            for x, heads in ((q, HEADS), (k, KV_HEADS))
        )
        tables = []
    inputs = [
        q,
        k,
        v,
        f"past_key_values.{layer}.key",
        f"past_key_values.{layer}.value",
        seqlens,
        longest,
        *tables,
    ]
    return g.op(
        "GroupQueryAttention",
        *inputs,
        outputs=[f"attention.{layer}", f"present.{layer}.key", f"present.{layer}.value"],
        domain=MICROSOFT,
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        do_rotary=int(not positions),
    )


def _traced_attention(g: _Graph, q: str, k: str, v: str, layer: int, half: bool) -> str:
    """Primitive operators; new keys and values are joined to the past ones."""

    def heads(x: str, count: int) -> str:
        split = g.op("Reshape", x, g.constant([0, 0, count, HEAD_DIM]))
        return g.op("Transpose", split, perm=[0, 2, 1, 3])

    cos, sin = (
        g.op("Unsqueeze", g.op("Gather", g.constant(table, np.float32), "position_ids"), g.constant([1]))
        for table in _rotary_tables()
    )

    def rotate(x: str) -> str:
        first, second = f"{x}.first", f"{x}.second"
        g.op("Split", x, outputs=[first, second], axis=-1, num_outputs=2)
        low = g.op("Sub", g.op("Mul", first, cos), g.op("Mul", second, sin))
        high = g.op("Add", g.op("Mul", second, cos), g.op("Mul", first, sin))
        return g.op("Concat", low, high, axis=-1)

    def joined(x: str, kind: str) -> str:
        past, present = f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}"
        if not half:
            return g.op("Concat", past, x, outputs=[present], axis=2)
        whole = g.op("Concat", g.op("Cast", past, to=TensorProto.FLOAT), x, axis=2)
        g.op("Cast", whole, outputs=[present], to=TensorProto.FLOAT16)
        return whole

    def repeated(x: str) -> str:
        group = g.constant([1, 1, HEADS // KV_HEADS, 1, 1])
        wide = g.op("Tile", g.op("Unsqueeze", x, g.constant([2])), group)
        return g.op("Reshape", wide, g.constant([0, HEADS, -1, HEAD_DIM]))

    q, k = rotate(heads(q, HEADS)), joined(rotate(heads(k, KV_HEADS)), "key")
    v = joined(heads(v, KV_HEADS), "value")
    scores = g.op("MatMul", q, g.op("Transpose", repeated(k), perm=[0, 1, 3, 2]))
    scores = g.op("Mul", scores, g.constant(1 / math.sqrt(HEAD_DIM), np.float32))
    columns = g.op("Range", g.constant(0), g.size("attention_mask", 1), g.constant(1))
    seen = g.op("LessOrEqual", columns, g.op("Unsqueeze", "position_ids", g.constant([1, 3])))
    real = g.op("Unsqueeze", g.op("Cast", "attention_mask", to=TensorProto.BOOL), g.constant([1, 2]))
    scores = g.op("Where", g.op("And", seen, real), scores, g.constant(-1e30, np.float32))
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), repeated(v))
    rows = g.op("Transpose", mixed, perm=[0, 2, 1, 3])
    return g.op("Reshape", rows, g.constant([0, 0, HEADS * HEAD_DIM]))


def decoder(*, fused: bool, positions: bool, half: bool = False, pruned: bool = False) -> onnx.ModelProto:
    """Return the graph.

    fused: with genai's attention operator. positions: takes position_ids, which primitive operators need.
    half: keys, values and logits pass as float16. pruned: only the last token's logits are computed.
    """
    g, w = _Graph(), weights()
    x = g.op("Gather", g.constant(w["model.embed_tokens.weight"], np.float32), "input_ids")
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        normed = g.norm(x, w[f"{prefix}.input_layernorm.weight"])
        q, k, v = (g.linear(normed, w[f"{prefix}.self_attn.{part}_proj.weight"]) for part in "qkv")
        mixed = (
            _fused_attention(g, q, k, v, layer, positions)
            if fused
            else _traced_attention(g, q, k, v, layer, half)
        )
        x = g.op("Add", x, g.linear(mixed, w[f"{prefix}.self_attn.o_proj.weight"]))
        normed = g.norm(x, w[f"{prefix}.post_attention_layernorm.weight"])
        gate, up = (g.linear(normed, w[f"{prefix}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        inner = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        x = g.op("Add", x, g.linear(inner, w[f"{prefix}.mlp.down_proj.weight"]))
    if pruned:
        x = g.op("Unsqueeze", g.op("Gather", x, g.constant(-1), axis=1), g.constant([1]))
    logits = g.linear(g.norm(x, w["model.norm.weight"]), w["lm_head.weight"])
    real = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    g.op("Cast", logits, outputs=["logits"], to=real)
    cache = [(layer, kind) for layer in range(LAYERS) for kind in ("key", "value")]
    past, whole = ["batch", KV_HEADS, "past", HEAD_DIM], ["batch", KV_HEADS, "total", HEAD_DIM]
    inputs = [("input_ids", TensorProto.INT64, ["batch", "tokens"])]
    inputs += [("attention_mask", TensorProto.INT64, ["batch", "total"])]
    inputs += [("position_ids", TensorProto.INT64, ["batch", "tokens"])] if positions else []
    inputs += [(f"past_key_values.{layer}.{kind}", real, past) for layer, kind in cache]
    outputs = [("logits", real, ["batch", 1 if pruned else "tokens", SHAPE.vocab_size])]
    outputs += [(f"present.{layer}.{kind}", real, whole) for layer, kind in cache]
    graph = helper.make_graph(
        g.nodes,
        "decoder",
        [helper.make_tensor_value_info(*spec) for spec in inputs],
        [helper.make_tensor_value_info(*spec) for spec in outputs],
        g.constants,
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def write_genai_folder(
    path: Path,
    *,
    positions: bool = False,
    shared: bool = True,
    pruned: bool = False,
    edit: dict[str, Any] | None = None,
) -> Path:
    """Write a folder as genai's builder does; ``edit`` replaces values of its config by their dotted
    names.
    """
    config: dict[str, Any] = {
        "model": {
            "bos_token_id": BOS_ID,
            "context_length": SHAPE.max_position_embeddings,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "model.onnx",
                "head_size": HEAD_DIM,
                "hidden_size": SHAPE.hidden_size,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": HEADS,
                "num_hidden_layers": LAYERS,
                "num_key_value_heads": KV_HEADS,
            },
            "eos_token_id": [EOS_ID, TURN_END_ID],
            "pad_token_id": EOS_ID,
            "type": "llama",
            "vocab_size": SHAPE.vocab_size,
        },
        "search": {
            "do_sample": False,
            "past_present_share_buffer": shared,
            "repetition_penalty": 1.0,
            "temperature": 0.7,
            "top_k": 50,
            "top_p": 0.9,
        },
    }
    _edit(config, edit or {})
    _write_shared_files(path)
    (path / "genai_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    onnx.save(decoder(fused=True, positions=positions, pruned=pruned), path / "model.onnx")
    return path


def write_optimum_folder(path: Path, *, half: bool = False, edit: dict[str, Any] | None = None) -> Path:
    """Write a folder as Optimum does; ``edit`` replaces values of its config.json."""
    config = tiny_config()
    _edit(config, edit or {})
    _write_shared_files(path, chat_template=CHAT_TEMPLATE)
    (path / "config.json").write_text(json.dumps(config))
    generation = {
        "eos_token_id": TURN_END_ID,
        "do_sample": True,
        "temperature": 0.6,
        "typical_p": 0.9,
        "top_p": 0.9,
    }
    (path / "generation_config.json").write_text(json.dumps(generation))
    onnx.save(decoder(fused=False, positions=True, half=half), path / "model.onnx")
    return path


def _write_shared_files(path: Path, **settings: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(tiny_tokenizer_json())
    config = {"bos_token": BOS, "eos_token": {"content": EOS}, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _edit(config: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        *parents, last = name.split(".")
        place = config
        for parent in parents:
            place = place[parent]
        if value is None:
            del place[last]
        else:
            place[last] = value
